"""What the attention kernels of a decode step have in common: their parameters and their launch."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import FORMATS
from pallas_kernels.hopper.inline import keep_in_l2
from pallas_kernels.hopper.layouts import smem_bytes
from pallas_kernels.hopper.limits import (
    BLOCK_KV,
    BLOCK_M,
    LAUNCH_REGISTERS,
    SMEM_BYTES,
)
from pallas_kernels.hopper.row_tiles import num_tiles, row_of_slots

PAGE_SIZES = (16, 32, 64, 128)
D_LATENT = (256, 512)
D_ROPE = (32, 64)
DTYPES = ("bfloat16", "float16")

SCALE_ROW = 32
"""Float32 of the row that the scales of one page take in shared memory, at least: TMA writes to
multiples of 128 bytes."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig(abc.ABC):
    """Static parameters of one variant of a kernel."""

    cache_formats: ClassVar[tuple[str, ...]]
    """Those that the kernel takes."""

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

    @property
    @abc.abstractmethod
    def num_stages(self) -> int:
        """Key tiles in flight."""

    @property
    def query_rows(self) -> int:
        """Folded (query, head) rows of a sequence, the heads of a query together."""
        return self.q_len * self.num_heads

    @property
    def rows(self) -> int:
        """`query_rows`, padded to whole swizzle atoms of 8: TMA loads and stores no less."""
        return -(-self.query_rows // 8) * 8

    @property
    def row_tile(self) -> int:
        """Rows of a CTA."""
        return BLOCK_M

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the rows of a sequence."""
        return num_tiles(self.rows, self.row_tile)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, less those of a CTA that there are too many of for so few rows."""
        return min(self.rows, self.row_tile)

    def fold(self, q: jax.Array) -> jax.Array:
        """Queries `[batch, q_len, num_heads, d]` as `[batch, rows, d]`."""
        q = q.reshape(q.shape[0], self.query_rows, q.shape[-1])
        missing = self.rows - self.query_rows
        return jnp.pad(q, ((0, 0), (0, missing), (0, 0))) if missing else q

    def slots(self, of_heads: jax.Array) -> jax.Array:
        """A value for each head as one for each slot of the row tiles (`row_tiles`)."""
        return of_heads[row_of_slots(self.rows, self.row_tile) % self.num_heads]

    @property
    def d_half(self) -> int:
        """Output channels of one math warpgroup."""
        return self.d_latent // 2

    def half(self, side: int) -> slice:
        """The output channels of math warpgroup `side`."""
        return slice(side * self.d_half, (side + 1) * self.d_half)

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
        """Of the stored rope keys."""
        return FORMATS[self.cache_format].rope_dtype

    @property
    def scales_per_token(self) -> int:
        """Float32 scales of a token."""
        return FORMATS[self.cache_format].num_scales(self.d_latent)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of the two math warpgroups and of the one that loads; their sum is 3 x 168,
        what a CTA of 384 threads starts with."""
        return 240, 240, 24

    @property
    def spill_bytes(self) -> int:
        """Spills the compile gate accepts."""
        return 0

    @abc.abstractmethod
    def smem(self, interpret: bool = False) -> dict[str, Any]:
        """The shared-memory buffers, by name: the launch and `smem_bytes` both read this."""

    @abc.abstractmethod
    def barriers(self) -> dict[str, plgpu.Barrier]:
        """The barriers, by name; the kernel's header says who arrives and who waits."""

    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return smem_bytes(self.smem().values())

    def refusal(self) -> str:
        """Which requirement the call does not meet; empty if it meets all."""
        for name, value, accepted in (
            ("format", self.cache_format, self.cache_formats),
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


Role = Callable[[Any], None]


def launch(
    config: DecodeConfig,
    inputs: dict[str, jax.Array],
    roles: Sequence[Role],
    cta: Callable[..., Any],
    *,
    name: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(out, lse, partial, partial_lse2)`, natural-log `lse`, of a kernel of `len(roles)`
    warpgroups.

    A role, of one warpgroup or of several in a row, is called with
    `cta(role, gmem, smem, bar, part, row_tile)`.

    Undefined are: rows beyond a sequence's `query_rows`, which `out` has up to a multiple of 8 and
    the others up to whole tiles; and the partial results of whole sequences.
    """
    batch = inputs["q_latent"].shape[0]
    num_parts = inputs["parts"].shape[0]
    padded = config.row_tiles * config.row_tile
    # A single part has no sequence split: with many rows, the place for pieces would be large.
    slots, slot_rows = (2 * num_parts, padded) if num_parts > 1 else (1, config.row_tile)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    outputs = {
        "out": array(config.dtype, batch, config.rows, config.d_latent),
        "lse": array("float32", batch, padded),
        "partial": array(config.dtype, slots, slot_rows, config.d_latent),
        "partial_lse2": array("float32", slots, slot_rows),
    }
    smem, bars = config.smem(bool(interpret)), config.barriers()

    def body(*refs):
        refs = list(refs)
        take = lambda names: SimpleNamespace(**{name: refs.pop(0) for name in names})
        memory = take([*inputs, *outputs]), take(smem), take(bars)
        gmem, *_ = memory

        def act(role, registers):
            action = "increase" if registers > LAUNCH_REGISTERS else "decrease"
            plgpu.set_max_registers(registers, action=action)
            if action == "increase":
                # Else the first load waits for memory three times: for its part, the length, the
                # page. MEASURED: H200, (128, 4096), bf16, 64 heads: 146.4 us, 147.5 without.
                keep_in_l2([gmem.seq_lens, gmem.block_table], interpret=bool(interpret))
            # Found anew by every role: what lives across the branch must fit load_wg's registers.
            index, row_tiles = lax.axis_index("cta"), jnp.int32(config.row_tiles)
            role(cta(role, *memory, lax.div(index, row_tiles), lax.rem(index, row_tiles)))

        # Neighbours with the same role share its code.
        # MEASURED: H200, (128, 4096), 32 heads, transposed, `fp8_ds_mla`: 118 us, 124 with a copy
        # each.
        end = 0
        for (role, registers), same in itertools.groupby(zip(roles, config.registers, strict=True)):
            wg, first, end = lax.axis_index("wg"), end, end + len(list(same))
            pl.when((wg >= first) & (wg < end))(functools.partial(act, role, registers))

    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=[*smem.values(), *bars.values()],
        grid=(num_parts * config.row_tiles,),
        grid_names=("cta",),
        num_threads=len(roles),
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        kernel_name=name,
    )
    return kernel(*inputs.values())
