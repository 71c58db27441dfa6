"""Operations and bytes of one dense decode step: for the bench, the docs and rooflines.

Standard library only. "Keys" are the tokens that a query attends to. The operations are those that
the formula needs, not those that padding to whole tiles adds.
"""

from pallas_kernels.formats import FORMATS, ITEM_BYTES
from pallas_kernels.hopper.gpus import Gpu
from pallas_kernels.hopper.limits import TRANSPOSED_ROWS

_MOST_OWN_WORK = 0.85
"""What the transposed schedule's own work may be of the dense one's, where memory bounds both and
tiles are multiplied as they are loaded, in 16 bits, for it to be taken.

Fitted to an H200, bf16 and large caches; f16 and the H100 are taken to be alike. MEASURED:
attention + combine, transposed and dense, us: (128, 4096), 16 heads (0.82) 142.7 and 143.7, 24
heads (0.89) 145.8 and 143.7, 32 heads (0.95) 149.0 and 144.4; (16, 65536) 277.8 and 278.5, 280.6
and 279.9, 284.9 and 280.2; (16, 4096) 25.7 and 26.9, 28.0 and 28.9, 29.6 and 28.0.
"""

_TILE = 64
"""Tokens of a key tile; rows of queries of a CTA of the dense schedule."""


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
        operand_bytes=_operand_bytes(format),
    )


def schedule_us(
    gpu: Gpu,
    *,
    transposed: bool,
    b: int,
    s_q: int,
    h: int,
    keys: int,
    format: str = "bf16",
    d_latent: int = 512,
    d_rope: int = 64,
) -> tuple[float, float]:
    """Microseconds below which a schedule cannot end the step, and those of its SMs' own work.

    The first is the larger of the second and the time of the bytes from memory. An SM's own work is
    what its tensor cores do, padding included, or the bytes that go into and out of its shared
    memory, whichever takes longer; both are derived in docs/decode_transposed.md.
    """
    rows, size = s_q * h, _operand_bytes(format)
    row_tile = min(TRANSPOSED_ROWS, -(-rows // 8) * 8) if transposed else _TILE
    row_tiles = -(-rows // row_tile)
    stored, latent_size = FORMATS[format], size
    loaded = _TILE * stored.bytes_per_token(d_latent, d_rope)
    p_tile = _TILE * row_tile * size
    p_tiles = 2  # written, read
    if transposed:
        p_tiles += d_latent // _TILE - 1  # each 64 channels read P anew
    stored_size = ITEM_BYTES[stored.latent_dtype]
    if stored_size < size:  # widened: behind shared memory, or by way of it
        if transposed:
            latent_size = stored_size
            p_tiles += stored.num_scales(d_latent) - 1  # each scale has a P of its own
        else:
            loaded += _TILE * d_latent * (stored_size + size)  # read, and stored again
    keys_read = _TILE * (d_latent * latent_size + d_rope * size)
    values_read = _TILE * d_latent * latent_size
    queries_read = row_tile * (d_latent + d_rope) * size
    smem = loaded + keys_read + values_read + queries_read + p_tiles * p_tile
    tiles = b * -(-keys // _TILE) * row_tiles
    padded = 2 * row_tile * _TILE * (2 * d_latent + d_rope)
    tensor_us = gpu.roofline_us(tiles * padded, 0.0, operand_bytes=size)
    own_us = max(tensor_us, tiles * smem / gpu.smem_tbs / 1e6)
    moved = bytes_moved(
        b=b, s_q=s_q, h=h, keys=keys, format=format, d_latent=d_latent, d_rope=d_rope
    )
    return max(own_us, moved / gpu.tbs / 1e6), own_us


def transposed_is_faster(gpu: Gpu, *, s_q: int, h: int, format: str) -> bool:
    """Whether the transposed schedule is predicted to end a step of so many rows earlier.

    Where memory bounds both, that with less work for the SMs: the rest of the time goes by while
    loads are awaited, and what does not overlap with them is less. In 16 bits it has to be less by
    a margin (`_MOST_OWN_WORK`). Never with several row tiles, each of which reads the whole cache
    again: slower in all that was measured with 64 and 128 rows.
    """
    if not 0 < s_q * h <= TRANSPOSED_ROWS:
        return False
    step = {"b": 128, "s_q": s_q, "h": h, "keys": 4096, "format": format}
    transposed, dense = (schedule_us(gpu, transposed=x, **step) for x in (True, False))
    if transposed[0] != dense[0]:
        return transposed[0] < dense[0]
    most = _MOST_OWN_WORK if FORMATS[format].scaling == "none" else 1.0
    return transposed[1] < dense[1] * most


def _operand_bytes(format: str) -> int:
    return 1 if FORMATS[format].in_e4m3 else 2
