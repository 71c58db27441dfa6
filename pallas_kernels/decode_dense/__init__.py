"""Dense paged decode, in 16-bit products: bf16, f16 and `fp8_ds_mla` caches."""
