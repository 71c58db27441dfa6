"""Merging the partial results of split sequences."""
