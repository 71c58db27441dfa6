"""Dense paged decode with the keys on the rows of the accumulators, for few heads."""
