"""GPU kernels of mla-jax and what they need on the host; never imports `mla_jax`."""
