"""Dense paged decode in e4m3 products, `fp8_token` and `fp8_full` caches."""
