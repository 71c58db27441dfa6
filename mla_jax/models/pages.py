"""Cache pages of a batch of sequences, handed out on the host as the sequences grow."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class PageTable:
    """Which pages belong to which sequence.

    Lengths are known on the host without asking the device, so handing out pages never waits for
    it; and since only the entries of the table change, nothing is compiled again.
    """

    def __init__(self, batch: int, *, num_pages: int, page_size: int, max_pages: int):
        """`num_pages` in all, of `page_size` tokens each; at most `max_pages` per sequence."""
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))
        self._used = [0] * batch
        self._table = np.full((batch, max_pages), -1, np.int32)
        self._on_device: jax.Array | None = None

    @property
    def num_used(self) -> int:
        """Pages that belong to a sequence."""
        return sum(self._used)

    def grow(self, seq_lens: Int[np.ndarray, " b"]) -> None:
        """Gives every sequence the pages that `seq_lens` tokens need.

        Raises:
          ValueError: a sequence needs more than `max_pages`.
          RuntimeError: no page is left.
        """
        for row, length in enumerate(seq_lens):
            needed = -(-int(length) // self.page_size)
            if needed > self._table.shape[1]:
                raise ValueError(
                    f"sequence {row} has {length} tokens: must be at most "
                    f"{self._table.shape[1]} pages of {self.page_size}"
                )
            while self._used[row] < needed:
                if not self._free:
                    raise RuntimeError(
                        f"sequence {row} needs a page for token {length} and all "
                        f"{self.num_used} are in use: make the caches with more pages"
                    )
                self._table[row, self._used[row]] = self._free.pop()
                self._used[row] += 1
                self._on_device = None

    def on_device(self) -> Int[Array, "b max_pages"]:
        """The block table as the attention functions take it; sent only after a change."""
        if self._on_device is None:
            self._on_device = jnp.array(self._table)
        return self._on_device
