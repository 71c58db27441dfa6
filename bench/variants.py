"""The kernel variants that the compile gate compiles.

A variant is a frozen dataclass with `kernel` (the folder in pallas_kernels), `str` (the rest of its
name), `function` and `arguments` (what to compile) and `declared` (what its kernels may take).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from mla_jax import LatentCache
from pallas_kernels import decode
from pallas_kernels.cache_append import entry as cache_append
from pallas_kernels.combine import kernel as combine
from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_e4m3.config import Config as E4m3Config
from pallas_kernels.decode_transposed.config import Config as TransposedConfig
from pallas_kernels.formats import E4M3_FORMATS, FORMATS, unscaled_format
from pallas_kernels.hopper.plan import divide

BATCH, PAGES, TABLE = 4, 64, 16
SCALE = 0.1


class Declared(NamedTuple):
    """What one kernel of a variant may take."""

    kernel: str
    smem_bytes: int
    """Of a CTA, `SMEM_ALIGN` of it for barriers; 0: none."""
    spill_bytes: int
    registers: int = 255
    """Per thread at launch, at most."""


def _combine(d_latent: int) -> Declared:
    return Declared("combine", combine.smem_bytes(d_latent), 0, combine.REGISTERS)


@dataclasses.dataclass(frozen=True)
class DecodeDense:
    """`mla_decode` in 16-bit products: attention and combine."""

    dtype: str = "bfloat16"
    h: int = 128
    s_q: int = 1
    page_size: int = 64
    causal: bool = True
    has_sink: bool = False
    d_latent: int = 512
    d_rope: int = 64
    run_scale: bool = False
    """`scale` is traced."""
    cache_format: str = ""
    """Empty: that which stores `dtype` as it is."""

    kernel = "decode_dense"

    def __str__(self) -> str:
        flags = ("causal" if self.causal else "full") + (" sink" if self.has_sink else "")
        flags += " traced scale" if self.run_scale else ""
        return (
            f"{self.cache_format or self.dtype} {self.h}x{self.s_q} {self.d_latent}+{self.d_rope} "
            f"page {self.page_size} {flags}"
        )

    @property
    def config(self) -> Config:
        return Config(
            cache_format=self.cache_format or unscaled_format(self.dtype).name,
            dtype=self.dtype,
            d_latent=self.d_latent,
            d_rope=self.d_rope,
            page_size=self.page_size,
            num_heads=self.h,
            q_len=self.s_q,
            causal=self.causal,
            has_sink=self.has_sink,
            scale=None if self.run_scale else SCALE,
        )

    def declared(self) -> tuple[Declared, ...]:
        """In the order of the kernels."""
        config = self.config
        return (
            Declared(self.kernel, config.smem_bytes(), config.spill_bytes),
            _combine(self.d_latent),
        )

    def function(self) -> Callable[..., Any]:
        return functools.partial(_decode_dense, self.causal)

    def arguments(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """The arguments of `function`, made by `array(shape, dtype)`."""
        stored = FORMATS[self.cache_format] if self.cache_format else unscaled_format(self.dtype)
        q = lambda d: array((BATCH, self.s_q, self.h, d), self.dtype)
        pages = lambda d, dtype: array((PAGES, self.page_size, d), dtype)
        num_scales = stored.num_scales(self.d_latent)
        cache = LatentCache(
            pages(self.d_latent, stored.latent_dtype),
            pages(self.d_rope, stored.rope_dtype),
            pages(num_scales, jnp.float32) if num_scales else None,
            stored.name,
        )
        sink = array((self.h,), jnp.float32) if self.has_sink else None
        table, lens = array((BATCH, TABLE), jnp.int32), array((BATCH,), jnp.int32)
        scale = array((), jnp.float32) if self.run_scale else None
        return q(self.d_latent), q(self.d_rope), cache, table, lens, sink, scale


def _decode_dense(
    causal, q_latent, q_rope, cache, block_table, seq_lens, sink, scale, *, transposed=False
):
    return decode.mla_decode(
        q_latent,
        q_rope,
        cache,
        block_table,
        seq_lens,
        scale=SCALE if scale is None else scale,
        causal=causal,
        attn_sink=sink,
        plan=None,
        return_lse=True,
        transposed=transposed,
    )


@dataclasses.dataclass(frozen=True)
class CacheAppend:
    """`append`, or `norm_rope_append` where it is said how the rope channels are paired."""

    format: str
    dtype: str = "bfloat16"
    d_latent: int = 512
    rope: tuple[str, str] | None = None
    """Pairs and order."""

    kernel = "cache_append"

    def __str__(self) -> str:
        rope = "" if self.rope is None else " norm and rope, {} to {}".format(*self.rope)
        return f"{self.format} of {self.dtype} {self.d_latent}{rope}"

    def declared(self) -> tuple[Declared, ...]:
        """In the order of the kernels."""
        return (Declared(self.kernel, 0, 0),)

    def function(self) -> Callable[..., Any]:
        if self.rope is None:
            return cache_append.append
        pairs, order = self.rope
        static = {"norm_eps": 1e-6, "rope_pairs": pairs, "rope_order": order}
        return lambda cache, kv_a, slots, norm_weight, cos, sin: cache_append.norm_rope_append(
            cache, kv_a, slots, norm_weight=norm_weight, cos=cos, sin=sin, **static
        )

    def arguments(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """The arguments of `function`, made by `array(shape, dtype)`."""
        cache_format, d_rope = FORMATS[self.format], cache_append.D_ROPE
        pages = lambda d, dtype: array((PAGES, 64, d), jnp.dtype(dtype))
        num_scales = cache_format.num_scales(self.d_latent)
        cache = LatentCache(
            pages(self.d_latent, cache_format.latent_dtype),
            pages(d_rope, cache_format.rope_dtype),
            pages(num_scales, "float32") if num_scales else None,
            self.format,
        )
        rows = lambda d, dtype=self.dtype: array((BATCH, d), dtype)
        slots = array((BATCH,), jnp.int32)
        if self.rope is None:
            return cache, rows(self.d_latent), rows(d_rope), slots
        weight = array((self.d_latent,), self.dtype)
        tables = rows(d_rope // 2, jnp.float32), rows(d_rope // 2, jnp.float32)
        return cache, rows(self.d_latent + d_rope), slots, weight, *tables


@dataclasses.dataclass(frozen=True)
class DecodeE4m3:
    """`mla_decode` on an fp8 cache in e4m3 products: attention and combine.

    With `p_terms` other than 1, which the public function does not take, attention alone.
    """

    cache_format: str = "fp8_token"
    dtype: str = "bfloat16"
    h: int = 128
    s_q: int = 1
    page_size: int = 64
    causal: bool = True
    has_sink: bool = False
    d_latent: int = 512
    d_rope: int = 64
    run_scale: bool = False
    """`scale` is traced."""
    p_terms: int = 1

    kernel = "decode_e4m3"

    def __str__(self) -> str:
        flags = ("causal" if self.causal else "full") + (" sink" if self.has_sink else "")
        flags += " traced scale" if self.run_scale else ""
        flags += f" {self.p_terms} terms" if self.p_terms > 1 else ""
        return (
            f"{self.cache_format} {self.dtype} {self.h}x{self.s_q} {self.d_latent}+{self.d_rope} "
            f"page {self.page_size} {flags}"
        )

    @property
    def config(self) -> E4m3Config:
        return E4m3Config(
            cache_format=self.cache_format,
            dtype=self.dtype,
            d_latent=self.d_latent,
            d_rope=self.d_rope,
            page_size=self.page_size,
            num_heads=self.h,
            q_len=self.s_q,
            causal=self.causal,
            has_sink=self.has_sink,
            scale=None if self.run_scale else SCALE,
            p_terms=self.p_terms,
        )

    def declared(self) -> tuple[Declared, ...]:
        """In the order of the kernels."""
        config = self.config
        attention = Declared(self.kernel, config.smem_bytes(), config.spill_bytes)
        return (attention, _combine(self.d_latent)) if self.p_terms == 1 else (attention,)

    def function(self) -> Callable[..., Any]:
        if self.p_terms == 1:
            return functools.partial(_decode_dense, self.causal)
        return functools.partial(_attention_alone, self.config)

    def arguments(self, array: Callable[[tuple[int, ...], Any], Any]) -> tuple[Any, ...]:
        """The arguments of `function`, made by `array(shape, dtype)`."""
        stored = FORMATS[self.cache_format]
        q = lambda d: array((BATCH, self.s_q, self.h, d), self.dtype)
        pages = lambda d, dtype: array((PAGES, self.page_size, d), dtype)
        cache = LatentCache(
            pages(self.d_latent, stored.latent_dtype),
            pages(self.d_rope, stored.rope_dtype),
            pages(stored.num_scales(self.d_latent), jnp.float32) if stored.num_scales(1) else None,
            self.cache_format,
        )
        sink = array((self.h,), jnp.float32) if self.has_sink else None
        table, lens = array((BATCH, TABLE), jnp.int32), array((BATCH,), jnp.int32)
        scale = array((), jnp.float32) if self.run_scale else None
        return q(self.d_latent), q(self.d_rope), cache, table, lens, sink, scale


@dataclasses.dataclass(frozen=True)
class DecodeTransposed(DecodeE4m3):
    """`mla_decode`, transposed: attention and combine."""

    cache_format: str = "bf16"
    h: int = 16

    kernel = "decode_transposed"

    @property
    def config(self) -> Any:
        fields = vars(super().config)
        names = {field.name for field in dataclasses.fields(TransposedConfig)}
        return TransposedConfig(**{name: fields[name] for name in fields if name in names})

    def function(self) -> Callable[..., Any]:
        return functools.partial(_decode_dense, self.causal, transposed=True)


def _attention_alone(config, q_latent, q_rope, cache, block_table, seq_lens, sink, scale):
    parts = divide(seq_lens, rows=config.rows)
    arrays = q_latent, q_rope, cache, block_table, seq_lens, parts
    slots = None if sink is None else config.slots(sink)
    return decode.launch(config, *arrays, run_scale=scale, sink=slots)


Variant = DecodeDense | DecodeTransposed | DecodeE4m3 | CacheAppend

HEADS = (
    *((128, 1), (128, 2), (64, 1), (40, 1), (32, 1)),
    *((24, 1), (13, 5), (16, 1), (16, 4), (8, 1), (1, 1)),
)


def few() -> list[Variant]:
    """Every value of every option, and most pairs: what `make test` compiles."""
    f16 = "float16"
    ds_mla = functools.partial(DecodeDense, cache_format="fp8_ds_mla")
    return [
        DecodeDense(),
        DecodeDense(h=16, s_q=4, run_scale=True),
        DecodeDense(h=16, has_sink=True, page_size=128),
        DecodeDense(f16, h=128, s_q=2, has_sink=True, page_size=16, causal=False),
        DecodeDense(f16, h=8, s_q=4, page_size=32, has_sink=True, d_latent=256, d_rope=32),
        DecodeDense(h=13, s_q=5, page_size=128, d_rope=32),
        DecodeDense(h=1, page_size=16, d_latent=256),
        ds_mla(),
        ds_mla(h=16, s_q=4, run_scale=True, page_size=16),
        ds_mla(h=16, has_sink=True, page_size=128),
        ds_mla(h=128, s_q=2, has_sink=True, page_size=16, causal=False, d_rope=32),
        ds_mla(h=13, s_q=5, page_size=32, d_latent=256, d_rope=32),
        DecodeTransposed(),
        DecodeTransposed(h=32, has_sink=True, page_size=128),
        DecodeTransposed("f16", f16, h=8, s_q=4, page_size=16, run_scale=True, causal=False),
        DecodeTransposed("f16", f16, h=13, s_q=5, page_size=32, has_sink=True, d_rope=32),
        DecodeTransposed(h=1, d_latent=256),
        DecodeTransposed("fp8_token"),
        DecodeTransposed("fp8_full", h=32, has_sink=True, page_size=16),
        DecodeTransposed("fp8_token", h=16, s_q=2, page_size=32, run_scale=True, causal=False),
        DecodeTransposed("fp8_full", f16, h=8, page_size=128, d_latent=256, d_rope=32),
        DecodeTransposed("fp8_ds_mla"),
        DecodeTransposed("fp8_ds_mla", h=32, has_sink=True, page_size=16),
        DecodeTransposed("fp8_ds_mla", h=13, s_q=5, page_size=32, run_scale=True, causal=False),
        DecodeTransposed("fp8_ds_mla", h=8, page_size=128, d_latent=256, d_rope=32),
        DecodeE4m3(),
        DecodeE4m3("fp8_full"),
        DecodeE4m3(h=16, s_q=4, run_scale=True),
        DecodeE4m3("fp8_full", f16, h=16, has_sink=True, page_size=128),
        DecodeE4m3(h=128, s_q=2, has_sink=True, page_size=16, causal=False, p_terms=2),
        DecodeE4m3("fp8_full", h=8, s_q=4, page_size=32, has_sink=True, d_latent=256, d_rope=32),
        DecodeE4m3(h=13, s_q=5, page_size=128, d_rope=32, p_terms=2),
        DecodeE4m3("fp8_full", h=1, page_size=16, d_latent=256),
        *(CacheAppend(format) for format in FORMATS),
        CacheAppend("fp8_full", "float32", d_latent=256),
        CacheAppend("bf16", "float16", rope=("halves", "halves")),
        CacheAppend("f16", rope=("interleaved", "interleaved")),
        CacheAppend("fp8_ds_mla", rope=("interleaved", "halves")),
        CacheAppend("fp8_token", rope=("interleaved", "halves")),
        CacheAppend("fp8_full", rope=("halves", "interleaved"), d_latent=256),
    ]


def every() -> list[Variant]:
    """All heads, masks and sinks at the usual sizes; all sizes at a few heads; every append."""
    f16 = "float16"
    heads = [
        DecodeDense(h=h, s_q=s_q, causal=causal, has_sink=sink, cache_format=cache_format)
        for cache_format, (h, s_q), sink in itertools.product(
            ("", "fp8_ds_mla"), HEADS, (False, True)
        )
        for causal in ((True, False) if s_q > 1 else (True,))
    ]
    sizes = [
        DecodeDense(
            dtype, page_size=page_size, d_latent=d_latent, d_rope=d_rope, cache_format=cache_format
        )
        for (dtype, cache_format), page_size, d_latent, d_rope in itertools.product(
            (("bfloat16", ""), ("float16", ""), ("bfloat16", "fp8_ds_mla")),
            (16, 32, 64, 128),
            (512, 256),
            (64, 32),
        )
    ]
    transposed_heads = [
        DecodeTransposed(format, h=h, s_q=s_q, causal=causal, has_sink=sink)
        for format, (h, s_q), sink in itertools.product(
            ("bf16", "fp8_ds_mla", *E4M3_FORMATS), (*HEADS, (8, 2), (8, 4)), (False, True)
        )
        for causal in ((True, False) if s_q > 1 else (True,))
    ]
    dtypes = {"bf16": "bfloat16", "f16": f16, "fp8_token": "bfloat16", "fp8_full": f16}
    dtypes["fp8_ds_mla"] = "bfloat16"
    transposed_sizes = [
        DecodeTransposed(format, dtype, h=h, page_size=page_size, d_latent=d_latent, d_rope=d_rope)
        for (format, dtype), h, page_size, d_latent, d_rope in itertools.product(
            dtypes.items(), (16, 32), (16, 32, 64, 128), (512, 256), (64, 32)
        )
    ]
    e4m3_heads = [
        DecodeE4m3(cache_format, h=h, s_q=s_q, causal=causal, has_sink=sink)
        for cache_format, (h, s_q), sink in itertools.product(E4M3_FORMATS, HEADS, (False, True))
        for causal in ((True, False) if s_q > 1 else (True,))
    ]
    e4m3_sizes = [
        DecodeE4m3(
            cache_format, page_size=page_size, d_latent=d_latent, d_rope=d_rope, p_terms=p_terms
        )
        for cache_format, page_size, d_latent, d_rope, p_terms in itertools.product(
            E4M3_FORMATS, (16, 32, 64, 128), (512, 256), (64, 32), (1, 2)
        )
    ]
    orders = ("interleaved", "halves")
    ropes = (None, *((pairs, order) for pairs in orders for order in orders))
    appends = [
        CacheAppend(format, dtype, d_latent, rope)
        for format, d_latent, rope in itertools.product(FORMATS, (512, 256), ropes)
        for dtype in ("bfloat16", "float16", "float32")
    ]
    dense = [*heads, *sizes, *transposed_heads, *transposed_sizes]
    return list(dict.fromkeys([*few(), *dense, *e4m3_heads, *e4m3_sizes, *appends]))
