"""Writing tokens to a latent cache, in one launch for all tokens of a step.

For token t, with the latent x and the rope key k as they were given, or, of the layer's form,

    x = round(c * (rsqrt(mean(c^2) + eps) * weight)),   k = round(rotate(kv_a[C:], cos, sin))

of the projection's output kv_a = [c, kv_a[C:]] (round: to the dtype of kv_a), the kernel stores

    scale[slot]  as the format says (docs/cache_formats.md)
    latent[slot] = x * (1 / scale),   rope[slot] = k * (1 / scale) or k

each rounded to the dtype of the array. A token whose slot the cache does not have is not stored.

One CTA of one warpgroup takes one token, and each of its four warps does all of the token's work:
16 channels a lane at 512 + 64. They load and store the same; in exchange no value has to cross from
warp to warp, so there is no shared memory and no barrier, and the largest magnitude, an integer
maximum of the bits, is one instruction. A token is too small (1.2 KB in, at most as much out) for
anything but latency to count, and no load's address depends on another load. What is not needed
before the slot is tested (rope keys without a scale of their own) the compiler loads after the
test.

The arithmetic is that of `mla_jax.quantise`, in the same order; its results are the same bits on
the same device, NaNs for NaNs. A reciprocal is the device's own in both.
"""

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import (
    DS_MLA_MIN_SCALE_EXPONENT,
    E4M3_MAX,
    MIN_SCALE,
    SCALE_TILE,
    CacheFormat,
)

LANES = 32
WARPS = 4


def write(
    cache_format: CacheFormat,
    norm_eps: float | None,
    cache: dict[str, jax.Array],
    tokens: dict[str, jax.Array],
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """Write `tokens` to the arrays `[slots, channels]` of `cache`, in place.

    Args:
        cache_format: of the cache.
        norm_eps: of the layer's form; None for finished tokens.
        cache: `latent`, `rope` and, if the format has one, `scale`.
        tokens: `slots [T]`; and `latent [T, C]` and `rope [T, R]`, or, in the layer's form,
            `kv_a [T, C + R]`, `norm_weight [1, C]`, `cos` and `sin [T, R / 2]`, and `pairs`, which
            is `kv_a` again. Where neighbours are pairs, in `pairs` or in the rope keys of the
            cache, that array is given as `[..., channels / 2, 2]`.
        interpret: simulate the GPU.
    """
    # As in the combine kernel: in a loop over stacked caches XLA would let the kernel read and
    # write the stacks themselves, forgetting that it works in place. On both sides, for both.
    refs = {name: jax.new_ref(array) for name, array in lax.optimization_barrier(cache).items()}

    def body(*arguments):
        gmem = SimpleNamespace(**dict(zip(tokens, arguments, strict=False)))
        stored = SimpleNamespace(**dict(zip(refs, arguments[len(tokens) :], strict=True)))
        token = lax.axis_index("token")
        slot = gmem.slots[token]
        num_slots, d_latent = stored.latent.shape
        if norm_eps is None:
            latent = _load_tiles(gmem.latent, token, d_latent)
            rope = [_load(gmem.rope.at[pl.ds(token, 1)])]
            rope_refs = [stored.rope.at[pl.ds(slot, 1)]]
        else:
            latent, rope = _norm_rope(norm_eps, gmem, token, bool(interpret))
            rope_refs = _members(stored.rope, slot, 0, gmem.cos.shape[1])
        latent, rope, scales = _encode(cache_format, latent, rope)

        @pl.when((slot >= 0) & (slot < num_slots))
        def _():
            for i, tile in enumerate(latent):
                at = pl.ds(slot, 1), pl.ds(i * SCALE_TILE, SCALE_TILE)
                stored.latent[at] = tile.astype(stored.latent.dtype)
            for ref, piece in zip(rope_refs, rope, strict=True):
                ref[...] = piece.astype(stored.rope.dtype)
            for i, scale in enumerate(scales):
                stored.scale[slot, pl.ds(i, 1)] = scale

    kernel: Any = pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=tokens["slots"].shape, grid_names=("token",)),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
        name="mla_cache_append",
    )
    kernel(*tokens.values(), *refs.values())
    return lax.optimization_barrier({name: ref[...] for name, ref in refs.items()})


def _row(channels: int) -> Any:
    """Layout of `[1, channels]` in which every warp holds all channels, neighbours in a lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, channels), (channels // LANES,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _load(ref: Any) -> jax.Array:
    # "Optimized" asks for the transfers that shared memory needs.
    return plgpu.load(ref, layout=_row(ref.shape[1]), optimized=False)


def _load_tiles(ref: Any, row: Any, channels: int) -> list[jax.Array]:
    starts = range(0, channels, SCALE_TILE)
    return [_load(ref.at[pl.ds(row, 1), pl.ds(start, SCALE_TILE)]) for start in starts]


def _members(ref: Any, row: Any, start: int, half: int) -> list[Any]:
    """The first and the second members of the `half` pairs from channel `start` on."""
    if len(ref.shape) == 3:
        return [ref.at[pl.ds(row, 1), pl.ds(start // 2, half), i] for i in range(2)]
    return [ref.at[pl.ds(row, 1), pl.ds(start + i * half, half)] for i in range(2)]


def _across(value: jax.Array, channels: int) -> jax.Array:
    """Repeat a token's value over its channels."""
    return lax.broadcast_in_dim(value, (1, channels), (0,))


def _norm_rope(
    norm_eps: float, gmem: SimpleNamespace, token: Any, interpret: bool
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The normed tiles, and the first and the second members of the rotated pairs."""
    d_latent, dtype = gmem.norm_weight.shape[1], gmem.kv_a.dtype
    tiles = _load_tiles(gmem.kv_a, token, d_latent)
    first, second = map(_load, _members(gmem.pairs, token, d_latent, gmem.cos.shape[1]))
    weights = _load_tiles(gmem.norm_weight, 0, d_latent)
    cos, sin = (_load(table.at[pl.ds(token, 1)]) for table in (gmem.cos, gmem.sin))

    tiles, weights, (first, second) = map(_float32, (tiles, weights, (first, second)))
    squares = functools.reduce(jnp.add, [tile * tile for tile in tiles])
    mean = jnp.sum(squares, axis=1) * jnp.float32(1 / d_latent)
    factor = _across(lax.rsqrt(mean + norm_eps), SCALE_TILE)
    tiles = [tile * (factor * weight) for tile, weight in zip(tiles, weights, strict=True)]
    turned = [first * cos - second * sin, second * cos + first * sin]
    # Without a barrier XLA, when it compiles the simulated kernel, would skip the rounding.
    keep = lax.optimization_barrier if interpret else lambda x: x
    rounded = lambda values: [keep(x.astype(dtype)) for x in values]
    return rounded(tiles), rounded(turned)


def _float32(values: Iterable[jax.Array]) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in values]


def _encode(
    cache_format: CacheFormat, latent: list[jax.Array], rope: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """What is stored, before it is rounded to the dtypes of the cache; and the scales."""
    if cache_format.scaling == "none":
        convert = lambda values, dtype: values if values[0].dtype == dtype else _float32(values)
        return (
            convert(latent, cache_format.latent_dtype),
            convert(rope, cache_format.rope_dtype),
            [],
        )
    latent, rope = _float32(latent), _float32(rope)
    if cache_format.scaling == "tile":
        scales = [_power_of_two_scale(_amax([tile])) for tile in latent]
        return _scaled(latent, scales), rope, scales
    scale = _scale(_amax(latent))
    if cache_format.scaling == "token":
        rope = [x * _across(1 / scale, x.shape[1]) for x in rope]
        return _scaled(latent, [scale] * len(latent)), rope, [scale]
    rope_scale = _scale(_amax(rope))
    return (
        _scaled(latent, [scale] * len(latent)),
        _scaled(rope, [rope_scale] * len(rope)),
        [scale, rope_scale],
    )


def _amax(values: list[jax.Array]) -> jax.Array:
    """The largest magnitude, `[1]`; NaN if one is."""
    # On the bits, which have the order of the magnitudes: warps have an instruction for integers.
    bits = [lax.bitcast_convert_type(jnp.abs(x), jnp.int32) for x in values]
    return lax.bitcast_convert_type(
        jnp.max(functools.reduce(jnp.maximum, bits), axis=1), jnp.float32
    )


def _scale(amax: jax.Array) -> jax.Array:
    return jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), MIN_SCALE)


def _power_of_two_scale(amax: jax.Array) -> jax.Array:
    """As in `mla_jax.quantise`: `amax / 448` floored and rounded up to a power of two."""
    mantissa_bits, bias = 23, 127
    carry = (1 << mantissa_bits - 2) - 1
    amax = jnp.where(amax < jnp.inf, amax, jnp.inf)
    bits = lax.bitcast_convert_type(amax, jnp.int32) + carry
    exponent = jnp.maximum((bits >> mantissa_bits) - 8, DS_MLA_MIN_SCALE_EXPONENT + bias)
    return lax.bitcast_convert_type(exponent << mantissa_bits, jnp.float32)


def _scaled(values: list[jax.Array], scales: list[jax.Array]) -> list[jax.Array]:
    """Values over their scales, to be rounded to e4m3."""
    scaled = [x * _across(1 / s, x.shape[1]) for x, s in zip(values, scales, strict=True)]
    # The GPU's conversion would make 448 of an infinity.
    return [jnp.where(jnp.abs(x) == jnp.inf, jnp.nan, x) for x in scaled]
