"""Static parameters of the e4m3 decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import E4M3_FORMATS, E4M3_MAX
from pallas_kernels.hopper.decode import SCALE_ROW, DecodeConfig
from pallas_kernels.hopper.inline import VOTES
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M


@dataclasses.dataclass(frozen=True)
class Config(DecodeConfig):
    """One variant of the kernel."""

    cache_formats = E4M3_FORMATS

    p_terms: int = 1
    """1: probabilities are rounded to e4m3. 2: what that leaves is rounded and multiplied too."""
    slack: float = 3.5
    """How far, base 2, a score may exceed what the row's are relative to before that moves."""
    headroom: float = 1.0
    """How far, base 2, that then is set above the largest score. What is gained in time by more of
    it is lost in accuracy: small probabilities become zeros."""
    p_max: float = 32.0
    """What a probability of 1 is in e4m3, for a token with the scale that all are relative to: it
    and both slacks must stay below the format's end. A power of two, so that scales of 0.7 to 1 of
    the largest, as those of one distribution are, lie in the upper part of an octave, where the
    format's relative error is least; so `headroom` is a whole number."""

    @property
    def num_stages(self) -> int:
        """Key tiles in flight."""
        return 4

    @property
    def rope_has_scale(self) -> bool:
        """Rope keys have a scale of their own, not that of the latent."""
        return self.scales_per_token > 1

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
