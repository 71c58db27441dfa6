"""Measurements of mla-jax; bench/README.md says how to run them."""
