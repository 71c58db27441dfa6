"""`python -m mla_jax.cli`."""

from mla_jax.cli import main

main()
