"""The command line, `mla-jax`."""

from mla_jax.cli.app import main as main
