"""The pages that a key tile is loaded from."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.pieces import Piece


def pages(seq_len, tile, page_size, table, begin=0):
    i32 = jnp.int32
    end = -(-seq_len // BLOCK_KV)
    piece = Piece(i32(1), i32(seq_len), i32(begin), i32(end), jnp.bool_(True), i32(0))
    return [int(page) for page in piece.pages(table, i32(tile), page_size)]


@pytest.mark.parametrize("seq_len", [1, 16, 17, 63, 64, 65, 128, 500])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages_of_every_tile(page_size, seq_len):
    """Those of its tokens; past the end, where the table may hold anything, the last live one."""
    live = -(-seq_len // page_size)
    table = np.full((2, 40), -1)
    table[1, :live] = np.random.default_rng(0).permutation(1000)[:live]
    for tile in range(-(-seq_len // BLOCK_KV)):
        tokens = np.arange(tile * BLOCK_KV, (tile + 1) * BLOCK_KV, min(page_size, BLOCK_KV))
        expected = table[1, np.minimum(tokens // page_size, live - 1)]
        assert pages(seq_len, tile, page_size, jnp.asarray(table)) == expected.tolist()
        assert -1 not in expected


@pytest.mark.parametrize("begin", [0, 3])
def test_pages_before_the_first_tile(begin):
    """Those of the first one: the last tile that is loaded is followed by itself."""
    table = jnp.arange(80).reshape(2, 40)
    first, before = (pages(500, tile, 32, table, begin) for tile in (begin, begin - 1))
    assert before == first == [40 + 2 * begin, 41 + 2 * begin]
