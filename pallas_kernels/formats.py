"""Byte layouts of the latent cache. Standard library only: kernels, tools and docs all read it.

One token is three pieces: the latent (`kv_lora_rank` channels), the scales of a quantised latent,
and the rotated rope key (`rope_dim` channels).
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Literal

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""

SCALE_TILE = 128
"""Latent channels that share one scale in `fp8_ds_mla`; the last tile may be narrower."""

DS_MLA_MIN_SCALE_EXPONENT = -13
"""`fp8_ds_mla` floors `amax / 448` at 1e-4 and rounds up to a power of two: at least 2**-13."""

MIN_SCALE = 2.0**-64
"""Floor of the other fp8 scales: all-zero tokens divide by it, and rope keys up to 1e19 divided by
it are still finite in bfloat16."""

EXPONENT = 0x7F800000
"""The bits of a float32 that are its exponent."""

BITS_OF_ONE = 0x3F800000
"""Those of a float32 that is 1."""

ITEM_BYTES: Mapping[str, int] = types.MappingProxyType(
    {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
)

Scaling = Literal["none", "tile", "token", "parts"]


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """How the tokens of a `LatentCache` are stored.

    `scaling` says what a float32 scale covers: nothing is scaled (`none`), 128 latent channels
    (`tile`), the latent of a token and, divided by the same scale, its rope key (`token`), or the
    latent and the rope key of a token apart (`parts`).
    """

    name: str
    latent_dtype: str
    rope_dtype: str
    scaling: Scaling = "none"

    @property
    def in_e4m3(self) -> bool:
        """Multiplied as it is stored, in e4m3: a token's latent has a single scale."""
        return self.scaling in ("token", "parts")

    def num_scales(self, kv_lora_rank: int) -> int:
        """Float32 scales per token."""
        return {
            "none": 0,
            "tile": -(-kv_lora_rank // SCALE_TILE),
            "token": 1,
            "parts": 2,
        }[self.scaling]

    def bytes_per_token(self, kv_lora_rank: int = 512, rope_dim: int = 64) -> int:
        """Bytes that one token of one layer takes."""
        return (
            kv_lora_rank * ITEM_BYTES[self.latent_dtype]
            + self.num_scales(kv_lora_rank) * ITEM_BYTES["float32"]
            + rope_dim * ITEM_BYTES[self.rope_dtype]
        )


FORMATS: Mapping[str, CacheFormat] = types.MappingProxyType(
    {
        f.name: f
        for f in (
            CacheFormat("bf16", "bfloat16", "bfloat16"),
            CacheFormat("f16", "float16", "float16"),
            CacheFormat("f32", "float32", "float32"),
            CacheFormat("fp8_ds_mla", "float8_e4m3fn", "bfloat16", "tile"),
            CacheFormat("fp8_token", "float8_e4m3fn", "bfloat16", "token"),
            CacheFormat("fp8_full", "float8_e4m3fn", "float8_e4m3fn", "parts"),
        )
    }
)

E4M3_FORMATS = tuple(f.name for f in FORMATS.values() if f.in_e4m3)


def unscaled_format(dtype: str) -> CacheFormat:
    """The format that stores values of `dtype` (`bfloat16`, `float16` or `float32`) as they are."""
    (found,) = (f for f in FORMATS.values() if f.scaling == "none" and f.latent_dtype == dtype)
    return found
