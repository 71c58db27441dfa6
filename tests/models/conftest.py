import jax
import pytest


@pytest.fixture(autouse=True)
def full_precision():
    """Recorded and float64 answers are compared with full float32 products."""
    with jax.default_matmul_precision("highest"):
        yield
