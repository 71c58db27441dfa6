"""Dense paged decode, bf16 and f16 caches."""
