"""Static parameters of the dense decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import dequantise
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M

CACHE_FORMATS = ("bf16", "f16", "fp8_ds_mla")

RAW_PARTS = BLOCK_KV // dequantise.TOKENS
"""Those of a raw tile, which come one after the other: one is converted while the next is on its
way."""


@dataclasses.dataclass(frozen=True)
class Config(DecodeConfig):
    """One variant of the kernel."""

    cache_formats = CACHE_FORMATS

    slack: float = 8.0
    """Growth of the running maximum, base 2, that is let pass without rescaling
    (`hopper.softmax`)."""

    @property
    def num_stages(self) -> int:
        """Key tiles in flight."""
        return 2

    @property
    def converts(self) -> bool:
        """The cache's latents are not what is multiplied: `convert_wg` takes the place of
        `load_wg`."""
        return self.scales_per_token > 0

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of `mma_wg0`, `mma_wg1`, `load_wg` or `convert_wg`; their sum is 3 x 168, what
        a CTA of 384 threads starts with."""
        return (232, 176, 96) if self.converts else (240, 240, 24)

    @property
    def raw_tokens(self) -> int:
        """Tokens of the copies that a raw tile comes in: of one page and of one part."""
        return min(self.page_size, dequantise.TOKENS)

    @property
    def left(self) -> slice:
        """Columns of `mma_wg0`."""
        return slice(0, self.d_half)

    @property
    def right(self) -> slice:
        """Columns of `mma_wg1`."""
        return slice(self.d_half, self.d_latent)

    @property
    def p_in_rope(self) -> bool:
        """P takes the place of its tile's rope keys, dead once the scores are there, if they are as
        wide."""
        return self.d_rope == BLOCK_KV

    def smem(self, interpret: bool = False) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this.

        The simulated GPU takes any use of a union's members for one of all of it; there the members
        are buffers of their own.
        """

        def tile(count: int, cols: int, dtype: Any = self.dtype):
            dtype = jnp.dtype(dtype)
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
        if self.converts:
            raw = tile(self.num_stages, self.d_latent, jnp.float8_e4m3fn)
            if interpret:
                buffers["raw"] = raw
            else:
                buffers["kv_left"] = plgpu.RefUnion(buffers["kv_left"], raw)
            copies, scales = dequantise.TOKENS // self.raw_tokens, self.scales_per_token
            shape = RAW_PARTS, copies, self.raw_tokens * scales
            buffers["k_scale"] = plgpu.SMEM(shape, jnp.float32)
        return buffers

    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""
        stages = self.num_stages
        # A tile's pages bring latents, in two halves, and rope keys; converted latents come at
        # once.
        filled = self.pages_per_tile + 1 if self.converts else 3 * self.pages_per_tile
        barriers = {
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_empty": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=filled),
            "k_empty": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "p_ready": plgpu.Barrier(num_barriers=stages),
            "inverse_ready": plgpu.Barrier(),
            "inverse_free": plgpu.Barrier(),
        }
        if self.converts:
            copies = 2 * dequantise.TOKENS // self.raw_tokens  # of latents and of scales
            barriers["raw_full"] = plgpu.Barrier(num_barriers=RAW_PARTS, num_arrivals=copies)
        return barriers

    def refusal(self) -> str:
        """Which requirement the call does not meet; empty if it meets all."""
        if self.converts and self.dtype != "bfloat16":
            # That of the rope keys, and the only one with room for every scale.
            return f"takes bfloat16 queries with {self.cache_format}, these are {self.dtype}"
        return super().refusal()
