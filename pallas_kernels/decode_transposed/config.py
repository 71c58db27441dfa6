"""Static parameters of the transposed decode kernel: what it accepts, its shared memory, its
registers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import E4M3_FORMATS, E4M3_MAX, FORMATS, SCALE_TILE
from pallas_kernels.hopper.columns import EXCHANGE_ROW, WARPS
from pallas_kernels.hopper.decode import SCALE_ROW, DecodeConfig
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.limits import BLOCK_KV, TRANSPOSED_ROWS

CACHE_FORMATS = ("bf16", "f16", "fp8_ds_mla", *E4M3_FORMATS)

VIEWS = ("latent", "exchange", "pairs")
"""What the memory of the key ring is used as: keys; half an output on its way to the other math
warpgroup; in e4m3 also pairs of channels, to be transposed."""

F16_MAX = 65504.0
"""The largest finite float16."""


@dataclasses.dataclass(frozen=True)
class Config(DecodeConfig):
    """One variant of the kernel."""

    cache_formats = CACHE_FORMATS

    @property
    def in_e4m3(self) -> bool:
        """Both products are of e4m3 operands, otherwise of 16-bit ones."""
        return FORMATS[self.cache_format].in_e4m3

    @property
    def scaled(self) -> bool:
        """The latents are e4m3, which go through registers, and have scales."""
        return self.scales_per_token > 0

    @property
    def widened(self) -> bool:
        """The latents become 16-bit operands on the way."""
        return self.scaled and not self.in_e4m3

    @property
    def num_stages(self) -> int:
        """Key tiles in flight; even, for a stage always is the same warpgroup's."""
        return 4 if self.scaled else 2

    @property
    def p_max(self) -> float:
        """What a probability of 1 is, for a token with the scale that all are relative to."""
        return 256.0 if self.widened else 32.0

    @property
    def slack(self) -> float:
        """How far, base 2, a score may exceed what the row's are relative to before that moves
        (`hopper.softmax`)."""
        if self.widened:
            return 4.0
        return 3.5 if self.in_e4m3 else 8.0

    @property
    def headroom(self) -> float:
        """How far, base 2, that then is set above the largest score. float16 has range to spare; in
        e4m3 what is gained in time by more of it is lost in accuracy."""
        if self.widened:
            return 4.0
        return 1.0 if self.in_e4m3 else 0.0

    @property
    def scale_slack(self) -> float:
        """Factor by which a token's scale may exceed the one that all are relative to; where values
        have no scales, all are 1."""
        if not self.scaled:
            return 1.0
        largest = self.p_max * 2.0**self.slack
        # Powers of two are compared, and scales may be up to twice as large.
        return F16_MAX / 2 / largest if self.widened else E4M3_MAX / largest

    @property
    def scale_groups(self) -> int:
        """Groups of channels whose values are relative to scales of their own."""
        return self.d_latent // SCALE_TILE if self.widened else 1

    @property
    def spill_bytes(self) -> int:
        """Spills the compile gate accepts: where an output of 24 or 32 columns leaves widened
        operands too little room, mostly of sums and of addresses (docs/decode_transposed.md has
        what that takes); in e4m3 where row tiles overlap, of addresses, outside the loop over key
        tiles; and where `load_wg` has four pages, a tile ahead, and the addresses of their scales
        in its 24 registers."""
        if self.widened and not self.loads_ahead and self.d_latent == 512:
            return 424
        if self.in_e4m3 and self.row_tiles > 1 and self.rows % self.row_tile:
            return 40
        return 4 if self.scaled and self.pages_per_tile > 2 else 0

    @property
    def latent_dtype(self) -> str:
        """Of the stored latents."""
        return FORMATS[self.cache_format].latent_dtype

    @property
    def operand_dtype(self) -> str:
        """Of both products' operands, the rope part of the scores apart. In 16 bits, float16 holds
        every e4m3, and there is an instruction for it."""
        return "float16" if self.widened else self.latent_dtype

    @property
    def row_tile(self) -> int:
        """Rows of a CTA, the columns of its accumulators: whole swizzle atoms of 8."""
        return min(TRANSPOSED_ROWS, self.rows)

    @property
    def shared_rows(self) -> int:
        """Rows of the last tile that the one before has too, if they may differ there in bits."""
        return self.row_tiles * self.row_tile - self.rows if self.widened else 0

    @property
    def half_groups(self) -> int:
        """`scale_groups` of half an output."""
        return max(1, self.scale_groups // 2)

    @property
    def loads_ahead(self) -> bool:
        """Operands that go through registers are loaded while the tensor cores work on others, for
        which the output must leave room."""
        return self.row_tile <= 16

    @property
    def p_groups(self) -> int:
        """Groups whose P are in shared memory together, as far as there is room."""
        return self.scale_groups if self.loads_ahead else self.half_groups

    @property
    def groups_at_once(self) -> int:
        """Groups whose widened operands are in registers together."""
        return self.half_groups if self.loads_ahead else 1

    @property
    def accumulators(self) -> int:
        """Those of half an output: of values that go through registers the even and the odd
        channels have one each, of every group."""
        return 2 * self.half_groups if self.scaled else 1

    @property
    def exchange_rows(self) -> int:
        """Rows of the exchange buffer that one accumulator takes, in float32."""
        return self.d_half // self.accumulators * self.row_tile // EXCHANGE_ROW

    @property
    def p_transforms(self) -> tuple[plgpu.Transform, ...]:
        """Of P in shared memory."""
        return tiled(BLOCK_KV, jnp.dtype(self.operand_dtype).itemsize)

    def smem(self, interpret: bool = False) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this.

        The simulated GPU takes any use of a union's members for one of all of it; there the members
        are buffers of their own.
        """
        operand, rope, f32 = jnp.dtype(self.operand_dtype), jnp.dtype(self.rope_dtype), jnp.float32
        latent = jnp.dtype(self.latent_dtype)

        def tile(count: int, rows: int, cols: int, dtype: Any):
            dtype = jnp.dtype(dtype)
            transforms = tiled(cols, dtype.itemsize)
            return plgpu.SMEM((count, rows, cols), dtype, transforms=transforms)

        stages = self.num_stages
        stage_rows = BLOCK_KV * self.d_latent * latent.itemsize // (4 * EXCHANGE_ROW)
        views = [
            tile(stages, BLOCK_KV, self.d_latent, latent),
            plgpu.SMEM((stages, stage_rows, EXCHANGE_ROW), f32),
        ]
        if self.in_e4m3:
            views.append(tile(stages, BLOCK_KV, self.d_half, jnp.uint16))
        kv_latent: dict[str, Any] = {"kv_latent": plgpu.RefUnion(*views)}
        if interpret:
            kv_latent = dict(zip(VIEWS, views, strict=False))
        buffers = {
            "q_latent": tile(1, self.row_tile, self.d_latent, operand),
            "q_rope": tile(1, self.row_tile, self.d_rope, rope),
            **kv_latent,
            "k_rope": tile(stages, BLOCK_KV, self.d_rope, rope),
            "p": tile(2 * self.p_groups, self.row_tile, BLOCK_KV, operand),
        }
        if self.scaled:
            buffers["q_factor"] = plgpu.SMEM((1, self.row_tile), f32)
            if self.widened:
                buffers["q_largest"] = plgpu.SMEM((self.scale_groups, self.row_tile), f32)
            scale_row = max(self.page_tokens * self.scales_per_token, SCALE_ROW)
            buffers["k_scale"] = plgpu.SMEM((stages, self.pages_per_tile, scale_row), f32)
        else:
            buffers["staging"] = tile(2, self.row_tile, self.d_half, self.dtype)
        return buffers | {
            "scratch": plgpu.SMEM((2, WARPS, self.row_tile), f32),
            "m": plgpu.SMEM((4, self.row_tile), f32),
            "l": plgpu.SMEM((4, self.row_tile), f32),
        }

    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""
        stages = self.num_stages
        loads = (3 if self.scaled else 2) * self.pages_per_tile
        of_queries = ("q_ready",) if self.scaled else ("q_full", "q_empty")
        return {
            **{name: plgpu.Barrier(num_arrivals=2) for name in of_queries},
            "k_full": plgpu.Barrier(num_barriers=stages, num_arrivals=loads),
            "k_empty": plgpu.Barrier(num_barriers=stages),
            "merge_ready": plgpu.Barrier(num_arrivals=2),
        }

    def refusal(self) -> str:
        """Which requirement the call does not meet; empty if it meets all."""
        if self.widened and self.dtype != self.rope_dtype:
            return (
                f"takes {self.rope_dtype} queries with {self.cache_format}, these are {self.dtype}"
            )
        return super().refusal()
