"""Static parameters of the dense decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import FORMATS
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M, SMEM_ALIGN, SMEM_BYTES
from pallas_kernels.hopper.row_tiles import num_tiles

PAGE_SIZES = (16, 32, 64, 128)
D_LATENT = (256, 512)
D_ROPE = (32, 64)
DTYPES = ("bfloat16", "float16")
CACHE_FORMATS = ("bf16", "f16", "fp8_ds_mla")


@dataclasses.dataclass(frozen=True)
class Config:
    """One variant of the kernel."""

    dtype: str
    """Of the queries and of the output, and what is multiplied."""
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
    """Key tiles in flight."""
    slack: float = 8.0
    """Growth of the running maximum, base 2, that is let pass without rescaling
    (`hopper.softmax`)."""
    cache_format: str = ""
    """Empty: that which stores `dtype` as it is."""

    @property
    def converts(self) -> bool:
        """The cache's latents are not what is multiplied: `convert_wg` takes the place of
        `load_wg`."""
        return bool(self.cache_format) and FORMATS[self.cache_format].latent_dtype != self.dtype

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of `mma_wg0`, `mma_wg1`, `load_wg` or `convert_wg`; their sum is 3 x 168, what
        a CTA of 384 threads starts with."""
        return (232, 176, 96) if self.converts else (240, 240, 24)

    @property
    def spill_bytes(self) -> int:
        """Spills the compile gate accepts. Only a `convert_wg` needs some: for the first row of
        tiles that overlap, and for two pages a tile of narrow latents."""
        if not self.converts:
            return 0
        if self.row_tiles > 1 and self.rows % BLOCK_M:
            return 28
        return 8 if self.d_latent == 256 and self.page_size == 32 else 0

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
        """Query rows of a tile; the other rows of the accumulator, if any, mean nothing."""
        return min(self.rows, BLOCK_M)

    @property
    def q_tile_rows(self) -> int:
        """`tile_rows` in whole swizzle atoms of 8 rows, as TMA loads and stores them; queries and
        output are padded to that."""
        return -(-self.tile_rows // 8) * 8

    @property
    def d_half(self) -> int:
        """Output columns of one math warpgroup."""
        return self.d_latent // 2

    @property
    def left(self) -> slice:
        """Columns of `mma_wg0`."""
        return slice(0, self.d_half)

    @property
    def right(self) -> slice:
        """Columns of `mma_wg1`."""
        return slice(self.d_half, self.d_latent)

    @property
    def pages_per_tile(self) -> int:
        """Pages that a key tile is loaded from; 1 where a page holds several tiles."""
        return max(1, BLOCK_KV // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens that a tile takes from one page."""
        return min(self.page_size, BLOCK_KV)

    @property
    def p_in_rope(self) -> bool:
        """P takes the place of its tile's rope keys, dead once the scores are there, if they are as
        wide."""
        return self.d_rope == BLOCK_KV

    def smem(self) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this."""
        dtype = jnp.dtype(self.dtype)

        def tile(count: int, cols: int):
            transforms = tiled(cols, dtype.itemsize)
            return plgpu.SMEM((count, BLOCK_KV, cols), dtype, transforms=transforms)

        buffers = {
            "q_latent": tile(1, self.d_latent),
            "q_rope": tile(1, self.d_rope),
            "kv_left": tile(self.num_stages, self.d_half),
            "kv_right": tile(self.num_stages, self.d_half),
            "k_rope": tile(self.num_stages, self.d_rope),
            "alpha": plgpu.SMEM((self.num_stages, BLOCK_M), jnp.float32),
            "inverse": plgpu.SMEM((BLOCK_M,), jnp.float32),
        }
        if not self.p_in_rope:
            buffers["p"] = tile(self.num_stages, BLOCK_KV)
        return buffers

    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""
        stages = self.num_stages
        # A tile's pages bring latents, in two halves, and rope keys; converted latents come at
        # once.
        filled = self.pages_per_tile + 1 if self.converts else 3 * self.pages_per_tile
        return {
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_empty": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=filled),
            "k_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "p_ready": plgpu.Barrier(num_barriers=stages),
            "inverse_ready": plgpu.Barrier(),
            "inverse_free": plgpu.Barrier(),
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
        if self.converts and self.dtype != "bfloat16":
            # That of the rope keys, and the only one with room for every scale.
            return f"takes bfloat16 queries with {self.cache_format}, these are {self.dtype}"
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
