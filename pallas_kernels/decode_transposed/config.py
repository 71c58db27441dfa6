"""Static parameters of the transposed decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.columns import EXCHANGE_ROW, WARPS
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, SMEM_ALIGN, SMEM_BYTES
from pallas_kernels.hopper.row_tiles import num_tiles

PAGE_SIZES = (16, 32, 64, 128)
D_LATENT = (256, 512)
D_ROPE = (32, 64)
DTYPES = ("bfloat16", "float16")

MAX_COLUMNS = 32
"""Query rows of a CTA: with 32, its output takes 128 registers of each math warpgroup."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One variant of the kernel."""

    dtype: str
    d_latent: int
    d_rope: int
    page_size: int
    num_heads: int
    q_len: int
    causal: bool
    has_sink: bool
    scale: float | None = None
    """Factor of the scores; None if it is known at run time only, or not positive."""
    num_stages: int = 2
    """Key tiles in flight; even, for a stage always is the same warpgroup's."""
    slack: float = 8.0
    """Growth of the running maximum, base 2, that is let pass without rescaling
    (`hopper.softmax`)."""
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
    def row_tile(self) -> int:
        """Rows of a CTA, the columns of its accumulators: whole swizzle atoms of 8."""
        return min(MAX_COLUMNS, -(-self.rows // 8) * 8)

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the rows of a sequence."""
        return num_tiles(self.rows, self.row_tile)

    @property
    def d_half(self) -> int:
        """Output channels that one math warpgroup stores."""
        return self.d_latent // 2

    def half(self, wg: int) -> slice:
        """The channels that math warpgroup `wg` stores."""
        return slice(wg * self.d_half, (wg + 1) * self.d_half)

    @property
    def exchange_rows(self) -> int:
        """Rows of the exchange buffer that half an output takes, in float32."""
        return self.d_half * self.row_tile // EXCHANGE_ROW

    @property
    def pages_per_tile(self) -> int:
        """Pages that a key tile is loaded from; 1 where a page holds several tiles."""
        return max(1, BLOCK_KV // self.page_size)

    def smem(self, interpret: bool = False) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this.

        The simulated GPU takes any use of a union's members for one of all of it; there the members
        are buffers of their own.
        """
        dtype, f32 = jnp.dtype(self.dtype), jnp.float32

        def tile(count: int, rows: int, cols: int):
            transforms = tiled(cols, dtype.itemsize)
            return plgpu.SMEM((count, rows, cols), dtype, transforms=transforms)

        # As keys; as half an output on its way to the other math warpgroup.
        stage_rows = BLOCK_KV * self.d_latent * dtype.itemsize // (4 * EXCHANGE_ROW)
        views = (
            tile(self.num_stages, BLOCK_KV, self.d_latent),
            plgpu.SMEM((self.num_stages, stage_rows, EXCHANGE_ROW), f32),
        )
        kv_latent = (
            {"latent": views[0], "exchange": views[1]}
            if interpret
            else {"kv_latent": plgpu.RefUnion(*views)}
        )
        return {
            "q_latent": tile(1, self.row_tile, self.d_latent),
            "q_rope": tile(1, self.row_tile, self.d_rope),
            **kv_latent,
            "k_rope": tile(self.num_stages, BLOCK_KV, self.d_rope),
            "p": tile(2, self.row_tile, BLOCK_KV),
            "staging": tile(2, self.row_tile, self.d_half),
            "scratch": plgpu.SMEM((2, WARPS, self.row_tile), f32),
            "m": plgpu.SMEM((4, self.row_tile), f32),
            "l": plgpu.SMEM((4, self.row_tile), f32),
        }

    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""
        stages = self.num_stages
        return {
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_empty": plgpu.Barrier(num_arrivals=2),
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=2 * self.pages_per_tile),
            "k_empty": plgpu.Barrier(num_barriers=stages),
            "merge_ready": plgpu.Barrier(num_arrivals=2),
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
