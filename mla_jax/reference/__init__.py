"""The public operations in plain `jax.numpy`: the `xla` implementation, and their definition."""
