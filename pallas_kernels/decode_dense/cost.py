"""Operations and bytes of one dense decode step: for the bench, the docs and rooflines.

Standard library only. "Keys" are the tokens that a query attends to. The operations are those that
the formula needs, not those that padding to whole tiles adds.
"""

from pallas_kernels.formats import FORMATS, ITEM_BYTES
from pallas_kernels.hopper.gpus import Gpu

_OPERAND_BYTES = {"fp8_token": 1, "fp8_full": 1}
"""Formats that are multiplied in e4m3; the others in 16 bits."""


def flops(*, b: int, s_q: int, h: int, keys: int, d_latent: int = 512, d_rope: int = 64) -> int:
    """Operations of both products, an addition and a multiplication counted apart."""
    return 2 * b * s_q * h * keys * (d_latent + d_rope + d_latent)


def cache_bytes(
    *, b: int, keys: int, format: str = "bf16", d_latent: int = 512, d_rope: int = 64
) -> int:
    """Bytes of the cache that the step reads: every token once, for all heads and queries."""
    return b * keys * FORMATS[format].bytes_per_token(d_latent, d_rope)


def bytes_moved(
    *,
    b: int,
    s_q: int,
    h: int,
    keys: int,
    format: str = "bf16",
    q_dtype: str = "bfloat16",
    page_size: int = 64,
    d_latent: int = 512,
    d_rope: int = 64,
) -> int:
    """Bytes that the step cannot do without: cache, block table, queries, outputs and `lse`."""
    cache = cache_bytes(b=b, keys=keys, format=format, d_latent=d_latent, d_rope=d_rope)
    rows = b * s_q * h
    queries_and_outputs = rows * (d_latent + d_rope + d_latent) * ITEM_BYTES[q_dtype]
    table = b * -(-keys // page_size) * 4 + b * 4
    return cache + queries_and_outputs + rows * ITEM_BYTES["float32"] + table


def roofline_us(
    gpu: Gpu,
    *,
    b: int,
    s_q: int,
    h: int,
    keys: int,
    format: str = "bf16",
    d_latent: int = 512,
    d_rope: int = 64,
) -> float:
    """Microseconds below which `gpu` cannot end the step."""
    return gpu.roofline_us(
        flops(b=b, s_q=s_q, h=h, keys=keys, d_latent=d_latent, d_rope=d_rope),
        bytes_moved(b=b, s_q=s_q, h=h, keys=keys, format=format, d_latent=d_latent, d_rope=d_rope),
        operand_bytes=_OPERAND_BYTES.get(format, 2),
    )
