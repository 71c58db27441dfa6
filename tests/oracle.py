"""Attention and cache formats in float64 numpy, straight from their formulas.

Shares nothing with `mla_jax.reference`: whole score matrices, one sequence at a time.
"""

import ml_dtypes
import numpy as np


def softmax(scores, visible):
    """`scores [h, t, n]`, `visible [t, n]`; returns p, lse."""
    scores = np.where(visible, scores, -np.inf)
    m = scores.max(-1, initial=-np.inf, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(m), 0, m))
    l = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[..., 0]
    return p / np.where(l == 0, 1, l), lse


def times(rows, shared):
    """`rows [h, t, n] @ shared [n, d]` as one product; numpy would make one of each head."""
    h, t, n = rows.shape
    return (rows.reshape(h * t, n) @ shared).reshape(h, t, shared.shape[1])


def sink_weight(lse, sink):
    """`1 / (1 + exp(sink - lse))`, 0 where there is nothing to attend to."""
    if sink is None:
        return np.ones_like(lse)
    with np.errstate(over="ignore", invalid="ignore"):
        weight = 1 / (1 + np.exp(np.float64(sink) - lse))
    return np.where(np.isneginf(lse), 0, weight)


def dequantise(cache):
    """The values that a cache stands for: `[slots, c]`, `[slots, r]`."""
    latent, rope = (np.asarray(x).astype(np.float64) for x in (cache.latent, cache.rope))
    if cache.scale is not None:
        scale = np.asarray(cache.scale).astype(np.float64)
        if cache.format == "fp8_ds_mla":
            latent = latent * np.repeat(scale, 128, axis=-1)[..., : latent.shape[-1]]
        else:
            with np.errstate(invalid="ignore"):
                latent, rope = latent * scale[..., :1], rope * scale[..., -1:]
    return latent.reshape(-1, latent.shape[-1]), rope.reshape(-1, rope.shape[-1])


def attend(q_latent, q_rope, latent, rope, visible, scale, sink=None):
    """One sequence, absorbed: `q [s, h, .]`, keys `[n, .]`; returns `[s, h, c]`, `[s, h]` twice."""
    q_latent, q_rope = (np.asarray(x).astype(np.float64).swapaxes(0, 1) for x in (q_latent, q_rope))
    scores = (times(q_latent, latent.T) + times(q_rope, rope.T)) * scale
    p, lse = softmax(scores, visible)
    out = times(p, latent)
    largest = np.where(visible, scores, -np.inf).max(-1, initial=-np.inf)
    out = out * sink_weight(lse, None if sink is None else np.asarray(sink)[:, None])[..., None]
    return out.swapaxes(0, 1), lse.T, largest.T


def decode(q_latent, q_rope, cache, block_table, seq_lens, *, scale, causal=True, attn_sink=None):
    """`mla_decode`: out `[b, s, h, c]`, lse `[b, h, s]`."""
    latent, rope = dequantise(cache)
    s_q, page_size, block_table = q_latent.shape[1], cache.page_size, np.asarray(block_table)
    outs, lses = [], []
    for b, n in enumerate(np.asarray(seq_lens)):
        t = np.arange(n)
        slots = block_table[b, t // page_size] * page_size + t % page_size
        ends = n - np.arange(s_q)[::-1] if causal else np.full(s_q, n)
        visible = np.arange(n) < ends[:, None]
        out, lse, _ = attend(
            q_latent[b], q_rope[b], latent[slots], rope[slots], visible, scale, attn_sink
        )
        outs.append(out)
        lses.append(lse.T)
    return np.stack(outs), np.stack(lses)


def sparse(q_latent, q_rope, latent, rope, indices, *, scale, lengths=None, attn_sink=None):
    """One query a row: `q [t, h, .]`, `indices [t, k]`; returns out, max_logits, lse."""
    results = []
    for t, row in enumerate(np.asarray(indices)):
        chosen = [int(i) for i in (row if lengths is None else row[: max(lengths[t], 0)])]
        chosen = [i for i in chosen if 0 <= i < len(latent)]
        visible = np.ones((1, len(chosen)), bool)
        one = slice(t, t + 1)
        out, lse, largest = attend(
            q_latent[one], q_rope[one], latent[chosen], rope[chosen], visible, scale, attn_sink
        )
        results.append((out[0], largest[0], lse[0]))
    return tuple(np.stack(x) for x in zip(*results, strict=True))


def prefill(q, k, v, *, scale, causal=True, q_lens=None, kv_lens=None, d_out=None, d_lse=None):
    """`mla_prefill`: out, lse, and with cotangents the gradients of q, k and v (else zeros)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (b, t, h, _), n = q.shape, k.shape[1]
    q_lens = np.full(b, t) if q_lens is None else np.asarray(q_lens)
    kv_lens = np.full(b, n) if kv_lens is None else np.asarray(kv_lens)
    out, lse = np.zeros((b, t, h, v.shape[-1])), np.full((b, h, t), -np.inf)
    grads = tuple(np.zeros(x.shape) for x in (q, k, v))
    for i in range(b):
        rows, keys = slice(q_lens[i]), slice(kv_lens[i])
        q_i, k_i, v_i = (
            x.swapaxes(0, 1) for x in (q[i, rows], k[i, keys], v[i, keys])
        )  # [h, ., d]
        ends = kv_lens[i] - np.arange(q_lens[i])[::-1] if causal else np.full(q_lens[i], kv_lens[i])
        visible = np.arange(kv_lens[i]) < ends[:, None]
        p, lse[i, :, rows] = softmax(q_i @ k_i.mT * scale, visible)
        out[i, rows] = (p @ v_i).swapaxes(0, 1)
        if d_out is not None:
            d_out_i = np.asarray(d_out, np.float64)[i, rows].swapaxes(0, 1)
            d_p = d_out_i @ v_i.mT
            base = (d_p * p).sum(-1) - np.asarray(d_lse, np.float64)[i, :, rows]
            d_score = p * (d_p - base[..., None]) * scale
            parts = (d_score @ k_i, d_score.mT @ q_i, p.mT @ d_out_i)
            for grad, live, part in zip(grads, (rows, keys, keys), parts, strict=True):
                grad[i, live] = part.swapaxes(0, 1)
    return out, lse, grads


def ds_mla_scale(amax):
    """The scale of an `fp8_ds_mla` tile, for float32 `amax`, by exact integer arithmetic."""
    for exponent in range(-13, 128):
        # amax / 448 <= 2 ** exponent, both sides exact in float64.
        if amax <= 448 * 2.0**exponent:
            return 2.0**exponent
    raise AssertionError(amax)


def e4m3(x):
    """Round float32 values to e4m3, to nearest even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn)
