"""The decode steps that are measured: every sequence `s_k` tokens long."""

import dataclasses

from pallas_kernels.decode_dense import cost


@dataclasses.dataclass(frozen=True)
class Shape:
    """`b` sequences of `s_k` tokens, `h` heads, `s_q` queries, causal; page size 64."""

    b: int
    s_k: int
    h: int
    s_q: int = 1

    def __str__(self) -> str:
        return f"{self.b}x{self.s_k}x{self.h}x{self.s_q}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """The inverse of `str`; `s_q` may be left out.

        Raises:
            ValueError: `text` is something else.
        """
        sizes = text.lower().split("x")
        if len(sizes) not in (3, 4) or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"{text!r} is not a shape: must be BxS_KxH or BxS_KxHxS_Q")
        shape = cls(*map(int, sizes))
        if shape.s_q > shape.s_k:
            raise ValueError(f"{text!r}: s_q must be at most s_k")
        return shape

    @property
    def flops(self) -> int:
        return cost.flops(b=self.b, s_q=self.s_q, h=self.h, keys=self.s_k)

    def bytes_moved(self, format: str) -> int:
        return cost.bytes_moved(b=self.b, s_q=self.s_q, h=self.h, keys=self.s_k, format=format)


GOALS: dict[str, dict[Shape, int]] = {
    "bf16": {
        Shape(128, 4096, 128): 216,
        Shape(128, 4096, 128, 2): 420,
        Shape(16, 32768, 128): 216,
        Shape(32, 32768, 128): 420,
        Shape(1, 131072, 128): 70,
        Shape(128, 4096, 64): 143,
        Shape(128, 4096, 16): 143,
        Shape(16, 1024, 16): 13,
        Shape(16, 4096, 16): 27,
        Shape(16, 65536, 16): 278,
        Shape(32, 65536, 16): 545,
        Shape(8, 8192, 128): 42,
        Shape(1, 4096, 128): 16,
    },
    "fp8_ds_mla": {
        Shape(128, 4096, 128): 225,
        Shape(128, 4096, 16): 92,
        Shape(16, 65536, 16): 164,
    },
    "fp8_token": {
        Shape(128, 4096, 128): 165,
        Shape(32, 32768, 128): 310,
        Shape(128, 4096, 64): 92,
        Shape(128, 4096, 16): 84,
        Shape(16, 65536, 16): 160,
    },
    "fp8_full": {
        Shape(128, 4096, 128): 160,
        Shape(128, 4096, 16): 78,
        Shape(16, 65536, 16): 146,
        Shape(1, 131072, 128): 52,
    },
}
"""Kernel time to reach on an H200, microseconds, by cache format."""

MORE = (
    Shape(256, 2048, 128),
    Shape(8, 32768, 128),
    Shape(4, 32768, 128),
    Shape(64, 1024, 128),
    Shape(1, 32768, 128),
    Shape(64, 8192, 64),
    Shape(128, 4096, 32),
    Shape(128, 4096, 16, 2),
    Shape(1, 131072, 16),
    Shape(1, 4096, 16),
)
"""What a full run adds."""

_WITH_GOAL = tuple(dict.fromkeys(shape for goals in GOALS.values() for shape in goals))

SETS = {
    "goals": _WITH_GOAL,
    "full": (*_WITH_GOAL, *MORE),
    # The table of the ETAP paper: few heads, from short to long.
    "etap": tuple(Shape(b, 1 << n, 16) for b in (16, 32) for n in range(9, 17)),
    # Expanding against the absorbed form, at 32K tokens.
    "two-stage": tuple(Shape(b, 32768, 128) for b in (4, 8, 16, 32)),
}
"""Shapes to choose by name; of `goals`, each format's own."""
