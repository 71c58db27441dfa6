"""Static parameters of the e4m3 decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import E4M3_MAX, FORMATS
from pallas_kernels.hopper.inline import VOTES
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M, SMEM_ALIGN, SMEM_BYTES
from pallas_kernels.hopper.row_tiles import num_tiles

PAGE_SIZES = (16, 32, 64, 128)
D_LATENT = (256, 512)
D_ROPE = (32, 64)
DTYPES = ("bfloat16", "float16")
CACHE_FORMATS = ("fp8_token", "fp8_full")

SCALE_ROW = 32
"""Float32 of the row that the scales of one page take in shared memory, at least: TMA writes to
multiples of 128 bytes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One variant of the kernel."""

    cache_format: str
    dtype: str
    """Of the queries and of the output."""
    d_latent: int
    d_rope: int
    page_size: int
    num_heads: int
    q_len: int
    causal: bool
    has_sink: bool
    scale: float | None = None
    """Factor of the scores; None if it is known at run time only, or not positive."""
    p_terms: int = 1
    """1: probabilities are rounded to e4m3. 2: what that leaves is rounded and multiplied too."""
    num_stages: int = 4
    """Key tiles in flight."""
    slack: float = 3.0
    """Growth of the running maximum, base 2, that is let pass without rescaling."""
    p_max: float = 16.0
    """What a probability of 1 is in e4m3, for a token with the scale that all are relative to: it
    and both slacks must stay below the format's end. A power of two, so that scales of 0.7 to 1 of
    the largest, as those of one distribution are, lie in the upper part of an octave, where the
    format's relative error is least."""
    registers: tuple[int, int, int] = (240, 240, 24)
    """Per thread of `mma_wg0`, `mma_wg1`, `load_wg`; their sum is 3 x 168, what a CTA of 384
    threads starts with."""
    spill_bytes: int = 0
    """Spills the compile gate accepts."""

    @property
    def rows(self) -> int:
        """Folded (query, head) rows of a sequence, the heads of a query together."""
        return self.q_len * self.num_heads

    @property
    def row_tiles(self) -> int:
        """Tiles of `BLOCK_M` rows that cover the rows of a sequence."""
        return num_tiles(self.rows)

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile; the others of the `BLOCK_M` repeat the last one."""
        return min(self.rows, BLOCK_M)

    @property
    def out_rows(self) -> int:
        """`tile_rows` in whole swizzle atoms of 8 rows: the columns of the output's accumulator,
        and the rows that a tile stores."""
        return -(-self.tile_rows // 8) * 8

    @property
    def d_half(self) -> int:
        """Output columns of one math warpgroup."""
        return self.d_latent // 2

    @property
    def pages_per_tile(self) -> int:
        """Pages that a key tile is loaded from; 1 where a page holds several tiles."""
        return max(1, BLOCK_KV // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens that a tile takes from one page."""
        return min(self.page_size, BLOCK_KV)

    @property
    def rope_dtype(self) -> str:
        """Of the stored rope keys, and of the rope part of the queries in the product."""
        return FORMATS[self.cache_format].rope_dtype

    @property
    def rope_has_scale(self) -> bool:
        """Rope keys have a scale of their own, not that of the latent."""
        return self.scales_per_token > 1

    @property
    def scales_per_token(self) -> int:
        """Float32 scales of a token."""
        return FORMATS[self.cache_format].num_scales(self.d_latent)

    @property
    def scale_slack(self) -> float:
        """Factor by which a token's scale may exceed the one that all are relative to."""
        return E4M3_MAX / (self.p_max * 2.0**self.slack)

    @property
    def out_transforms(self) -> tuple[plgpu.Transform, ...]:
        """Of the output tile in shared memory."""
        return tiled(self.d_half, jnp.dtype(self.dtype).itemsize)

    def smem(self, interpret: bool = False) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this.

        The simulated GPU takes any use of a union's members for one of all of it; there the members
        are buffers of their own.
        """
        e4m3, rope, f32 = jnp.float8_e4m3fn, jnp.dtype(self.rope_dtype), jnp.float32

        def tile(count: int, rows: int, cols: int, dtype: Any):
            dtype = jnp.dtype(dtype)
            transforms = tiled(cols, dtype.itemsize)
            return plgpu.SMEM((count, rows, cols), dtype, transforms=transforms)

        stages = self.num_stages
        scale_row = max(self.page_tokens * self.scales_per_token, SCALE_ROW)
        # As keys; as pairs of channels, to be transposed; as one warpgroup's output.
        views = (
            tile(stages, BLOCK_KV, self.d_latent, e4m3),
            tile(stages, BLOCK_KV, self.d_half, jnp.uint16),
            tile(stages, BLOCK_M, self.d_half, self.dtype),
        )
        kv_latent = (
            {"kv_latent": plgpu.RefUnion(*views)}
            if not interpret
            else {"latent": views[0], "pairs": views[1], "staging": views[2]}
        )
        return {
            "q_latent": tile(1, BLOCK_M, self.d_latent, e4m3),
            "q_rope": tile(1, BLOCK_M, self.d_rope, rope),
            **kv_latent,
            "k_rope": tile(stages, BLOCK_KV, self.d_rope, rope),
            "k_scale": plgpu.SMEM((stages, self.pages_per_tile, scale_row), f32),
            "p": tile(2 * self.p_terms, BLOCK_M, BLOCK_KV, e4m3),
            "row_max": plgpu.SMEM((2, BLOCK_M), f32),
            "scale_max": plgpu.SMEM((2, BLOCK_M), f32),
            "row_sum": plgpu.SMEM((2, BLOCK_M), f32),
            "alpha": plgpu.SMEM((2, BLOCK_M), f32),
            "votes": plgpu.SMEM((2, VOTES), f32),
        }

    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""
        stages = self.num_stages
        return {
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=3 * self.pages_per_tile),
            "k_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "q_max_ready": plgpu.Barrier(num_arrivals=2),
            "q_ready": plgpu.Barrier(num_arrivals=2),
            "max_ready": plgpu.Barrier(num_arrivals=2),
            "p_ready": plgpu.Barrier(num_arrivals=2),
            "sum_ready": plgpu.Barrier(num_arrivals=2),
        }

    def smem_bytes(self) -> int:
        """Shared memory of a CTA: each buffer rounded up to its alignment, and the barriers."""
        total = 0
        for buffer in self.smem().values():
            size = jnp.dtype(buffer.dtype).itemsize
            for extent in buffer.shape:
                size *= extent
            total += -(-size // SMEM_ALIGN) * SMEM_ALIGN
        return total + SMEM_ALIGN

    def refusal(self) -> str:
        """Which requirement the call does not meet; empty if it meets all."""
        for name, value, accepted in (
            ("format", self.cache_format, CACHE_FORMATS),
            ("page_size", self.page_size, PAGE_SIZES),
            ("kv_lora_rank", self.d_latent, D_LATENT),
            ("rope_dim", self.d_rope, D_ROPE),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in accepted:
                return f"takes {name} of {' or '.join(map(str, accepted))}, this call has {value}"
        if self.smem_bytes() > SMEM_BYTES:
            return f"needs {self.smem_bytes()} bytes of shared memory, an SM has {SMEM_BYTES}"
        return ""
