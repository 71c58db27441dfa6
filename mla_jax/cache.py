"""The paged latent cache: what MLA keeps of a token (DeepSeek-V2, arXiv:2405.04434, sec. 2.1.2).

A token is one latent row, shared by all heads as key and value, and one rotated rope key. Pages of
`page_size` tokens are handed out by the caller; a *slot* is `page * page_size + offset`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from mla_jax import quantise
from mla_jax.checks import (
    as_int32,
    check_array,
    check_choice,
    check_dtype,
    check_integer,
    check_size,
)
from pallas_kernels.formats import FORMATS, CacheFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """The paged cache of one layer; make it with `init_cache`.

    A pytree of its arrays. `format` is static: one of `bf16`, `f16`, `f32`, `fp8_ds_mla`,
    `fp8_token` and `fp8_full`. A leading axis of layers on every array is fine for `jax.vmap` and
    `jax.lax.scan`; the functions of this package take one layer.
    """

    latent: Float[Array, "p ps c"]
    rope: Float[Array, "p ps r"]
    scale: Float[Array, "p ps n"] | None
    format: str = dataclasses.field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages, shared by all sequences."""
        return self.latent.shape[-3]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.latent.shape[-2]

    @property
    def kv_lora_rank(self) -> int:
        """Channels of the latent."""
        return self.latent.shape[-1]

    @property
    def rope_dim(self) -> int:
        """Channels of the rope key."""
        return self.rope.shape[-1]

    @property
    def num_slots(self) -> int:
        """Tokens that all pages together can hold."""
        return self.num_pages * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token of one layer takes, scales included."""
        return FORMATS[self.format].bytes_per_token(self.kv_lora_rank, self.rope_dim)


def check_cache(cache: Any) -> CacheFormat:
    """Check that `cache` is a `LatentCache` whose arrays are what its format declares.

    Returns:
        The format.

    Raises:
        TypeError: not a `LatentCache`, or an array has another dtype than the format's.
        ValueError: unknown format, or shapes that do not fit together.
    """
    if not isinstance(cache, LatentCache):
        raise TypeError(
            f"`cache` is of type {type(cache).__name__}: must be a LatentCache, see init_cache"
        )
    check_choice("cache.format", cache.format, tuple(FORMATS))
    cache_format = FORMATS[cache.format]
    num_pages, page_size, kv_lora_rank = check_array("cache.latent", cache.latent, "p ps c")
    check_array("cache.rope", cache.rope, "p ps r", p=num_pages, ps=page_size)
    declared = {"latent": cache_format.latent_dtype, "rope": cache_format.rope_dtype}
    if num_scales := cache_format.num_scales(kv_lora_rank):
        sizes = {"p": num_pages, "ps": page_size, "n": num_scales}
        check_array("cache.scale", cache.scale, "p ps n", **sizes)
        declared["scale"] = "float32"
    elif cache.scale is not None:
        raise TypeError(f"`cache.scale` is an array: must be None in format {cache.format!r}")
    for name, dtype in declared.items():
        found = getattr(cache, name).dtype.name
        if found != dtype:
            raise TypeError(
                f"`cache.{name}` is {found}: must be {dtype} in format {cache.format!r}; "
                "write tokens with append, which converts them"
            )
    return cache_format


def init_cache(
    num_pages: int,
    *,
    page_size: int = 64,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    format: str = "bf16",
) -> LatentCache:
    """Make an empty cache of `num_pages * page_size` slots.

    Args:
        num_pages: pages, shared by all sequences.
        page_size: tokens in a page. Kernels may take fewer sizes than the reference, which takes
            any; one page as long as the longest sequence makes a cache that is not paged.
        kv_lora_rank: channels of the latent.
        rope_dim: channels of the rope key.
        format: `bf16`, `f16`, `f32`; `fp8_ds_mla` (e4m3 latent with a power-of-two scale for each
            128 channels, bfloat16 rope: 656 bytes a token, DeepSeek-V3.2's); `fp8_token` (e4m3
            latent with one scale a token, bfloat16 rope divided by it: 644); `fp8_full` (e4m3
            latent and rope with a scale each: 584; rounding the rope key to e4m3 costs accuracy
            at long context, so measure before using it).

    Raises:
        TypeError: a size is not an int.
        ValueError: a size below 1, or an unknown format.
    """
    sizes = {
        "num_pages": num_pages,
        "page_size": page_size,
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": rope_dim,
    }
    for name, size in sizes.items():
        check_size(name, size)
    check_choice("format", format, tuple(FORMATS))
    cache_format = FORMATS[format]
    empty = lambda channels, dtype: jnp.zeros((num_pages, page_size, channels), dtype)
    num_scales = cache_format.num_scales(kv_lora_rank)
    return LatentCache(
        latent=empty(kv_lora_rank, cache_format.latent_dtype),
        rope=empty(rope_dim, cache_format.rope_dtype),
        scale=empty(num_scales, jnp.float32) if num_scales else None,
        format=format,
    )


def slots_of(
    block_table: Int[Array, "b max_pages"], positions: Int[Array, "#b k"], cache: LatentCache
) -> Int[Array, "b k"]:
    """Slots of the tokens at `positions`, from 0, of their sequences or of all (one row).

    -1 where the table names no page.

    Any int32 may stand in the table: an entry that is not a page of the cache gives -1.
    """
    column, offset = positions // cache.page_size, positions % cache.page_size
    column = jnp.broadcast_to(column, (len(block_table), column.shape[1]))
    page = jnp.take_along_axis(block_table, column, axis=1, mode="fill", fill_value=-1)
    live = (page >= 0) & (page < cache.num_pages)
    return jnp.where(live, page * cache.page_size + offset, -1)


def read(
    cache: LatentCache, slots: Int[Array, "*t"]
) -> tuple[Float[Array, "*t c"], Float[Array, "*t r"]]:
    """Dequantised tokens at `slots`; zero where the slot is not one of the cache's.

    Nothing that the cache holds elsewhere, NaN included, has any influence.
    """
    live = (slots >= 0) & (slots < cache.num_slots)

    def rows_of(pages, slots):
        return jnp.take(pages.reshape(-1, pages.shape[-1]), slots, axis=0, mode="clip")

    def take(pages):
        if pages.dtype.itemsize > 1:
            return rows_of(pages, slots)
        # XLA's CPU gather of 8-bit floats converts the whole operand to float16, so bytes are
        # gathered; and the barrier keeps it from copying them all ahead of a loop over slots.
        stored, at = lax.optimization_barrier((pages, slots))
        rows = rows_of(lax.bitcast_convert_type(stored, jnp.uint8), at)
        return lax.bitcast_convert_type(rows, pages.dtype)

    rows = jax.tree.map(take, cache)
    latent, rope = quantise.decode(FORMATS[cache.format], rows.latent, rows.rope, rows.scale)
    return jnp.where(live[..., None], latent, 0), jnp.where(live[..., None], rope, 0)


def gather(
    cache: LatentCache,
    block_table: Int[Array, "b max_pages"],
    seq_lens: Int[Array, " b"],
    *,
    dtype: DTypeLike,
) -> tuple[Float[Array, "b l c"], Float[Array, "b l r"]]:
    """Lay every sequence's tokens out in order, dequantised.

    Args:
        cache: the cache.
        block_table: page of the i-th `page_size` tokens of each sequence; unused entries may hold
            anything.
        seq_lens: tokens of each sequence in the cache.
        dtype: of the result.

    Returns:
        Latents and rope keys, `l = max_pages * page_size`; zero past `seq_lens`.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: dtypes, or a `cache` whose arrays are not what its format declares.
    """
    check_cache(cache)
    block_table, seq_lens = check_table(block_table, seq_lens)
    dtype = check_dtype("dtype", dtype)
    positions = jnp.arange(block_table.shape[1] * cache.page_size)
    slots = slots_of(block_table, positions[None], cache)
    latent, rope = read(cache, jnp.where(positions < seq_lens[:, None], slots, -1))
    return latent.astype(dtype), rope.astype(dtype)


def check_table(
    block_table: Any, seq_lens: Any, **sizes: int
) -> tuple[Int[Array, "b max_pages"], Int[Array, " b"]]:
    """Check a block table and the lengths that go with it; return them as int32 arrays."""
    (b, max_pages) = check_array("block_table", block_table, "b max_pages", **sizes)
    check_array("seq_lens", seq_lens, "b", b=b)
    check_integer("block_table", block_table)
    check_integer("seq_lens", seq_lens)
    if max_pages == 0:
        raise ValueError(
            f"`block_table` has shape {block_table.shape}: must have a column at least"
        )
    return as_int32(block_table), as_int32(seq_lens)


def pack_fp8_ds_mla(cache: LatentCache) -> UInt8[Array, "p ps bytes"]:
    """Lay an `fp8_ds_mla` cache out as DeepSeek-V3.2's byte rows, bit for bit.

    A row is the e4m3 codes, then the float32 scales, then the bfloat16 rope key, little-endian:
    656 bytes for 512 + 64 channels.

    Raises:
        TypeError, ValueError: `cache` is not a well-formed `fp8_ds_mla` cache.
    """
    check_cache(cache)
    if cache.format != "fp8_ds_mla":
        raise ValueError(f"`cache` has format {cache.format!r}: must be 'fp8_ds_mla'")
    parts = (cache.latent, cache.scale, cache.rope)
    as_bytes = lambda x: lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:2], -1)
    return jnp.concatenate([as_bytes(x) for x in parts], axis=-1)


def unpack_fp8_ds_mla(
    packed: UInt8[Array, "p ps bytes"], *, kv_lora_rank: int = 512, rope_dim: int = 64
) -> LatentCache:
    """Read DeepSeek-V3.2's byte rows as an `fp8_ds_mla` cache; inverse of `pack_fp8_ds_mla`.

    Raises:
        ValueError: rows of another length than the sizes make.
        TypeError: `packed` is not uint8.
    """
    cache_format = FORMATS["fp8_ds_mla"]
    row_bytes = cache_format.bytes_per_token(kv_lora_rank, rope_dim)
    (num_pages, page_size, _) = check_array("packed", packed, "p ps bytes", bytes=row_bytes)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"`packed` is {packed.dtype}: must be uint8")

    def piece(start, stop, dtype):
        itemsize = jnp.dtype(dtype).itemsize
        x = jnp.asarray(packed)[..., start:stop]
        if itemsize > 1:
            x = x.reshape(num_pages, page_size, -1, itemsize)
        return lax.bitcast_convert_type(x, dtype)

    rope_start = kv_lora_rank + 4 * cache_format.num_scales(kv_lora_rank)
    return LatentCache(
        latent=piece(0, kv_lora_rank, cache_format.latent_dtype),
        scale=piece(kv_lora_rank, rope_start, jnp.float32),
        rope=piece(rope_start, row_bytes, cache_format.rope_dtype),
        format=cache_format.name,
    )
