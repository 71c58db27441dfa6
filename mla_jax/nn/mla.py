"""Multi-head Latent Attention as a flax nnx module (DeepSeek-V2, arXiv:2405.04434 sec. 2.1)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_jax.cache import LatentCache, check_cache, check_table, gather, slots_of
from mla_jax.checks import check_array, check_dtype, check_integer
from mla_jax.config import MLAConfig
from mla_jax.nn.rope import apply_rope, rope_tables
from mla_jax.ops import (
    Implementation,
    append,
    merge_states,
    mla_decode,
    mla_prefill,
    norm_rope_append,
)
from mla_jax.plan import DecodePlan

# DeepSeek's two inner norms ignore `rms_norm_eps`.
_LATENT_NORM_EPS = 1e-6
# Cached tokens, of all sequences together, that `prefill` expands to keys and values per head at a
# time: 640 MiB of them in DeepSeek-V3, with 128 heads of 192 + 128 in 16 bits.
_PREFIX_CHUNK = 8192


class MultiHeadLatentAttention(nnx.Module):
    """Attention whose cache holds one low-rank latent and one rope key per token, for all heads.

    Three ways to run it, with one set of parameters:

    - `layer(x)`: a whole sequence without a cache, in MHA form (keys and values per head).
      Differentiable.
    - `layer.prefill(x, cache, ...)`: the next chunk of each prompt, in MHA form; the chunk attends
      to itself and to the cached prefix, which is expanded a bounded piece at a time.
    - `layer.decode(x, cache, ...)`: a few new tokens per sequence, in absorbed form: W_UK moves to
      the query and W_UV to the output, so attention reads the latents as they lie in the cache.

    Prefill costs less per key than decode once a step brings more than about
    `(d_nope + d_v) * d_latent / (2 * d_latent - d_nope - d_v)` tokens per sequence, 170 in
    DeepSeek-V3, since expanding a key then pays off.

    `prefill_fn` and `decode_fn` compute the attention itself and take the arguments of
    `mla_jax.mla_prefill` and `mla_jax.mla_decode`. In linen:
    `flax.nnx.bridge.to_linen(MultiHeadLatentAttention, config)`; call the other two forms with
    `apply(variables, ..., nnx_method="decode")`.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
        prefill_fn: Callable = mla_prefill,
        decode_fn: Callable = mla_decode,
    ):
        """Random weights, LeCun normal; `mla_jax.models.load` brings those of a checkpoint.

        Args:
          config: sizes and conventions.
          rngs: for the parameters.
          dtype: of parameters and activations, `config.dtype` by default.
          prefill_fn: attention in MHA form, called as `mla_jax.mla_prefill`.
          decode_fn: attention in absorbed form, called as `mla_jax.mla_decode`.

        Raises:
          TypeError: `dtype` is not bfloat16, float16 or float32.
        """
        dtype = check_dtype("dtype", config.dtype if dtype is None else dtype)
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        norm = functools.partial(
            nnx.RMSNorm, epsilon=_LATENT_NORM_EPS, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        heads, use_bias = config.num_heads, config.attention_bias
        d_q = heads * (config.d_nope + config.d_rope)
        self.config = config
        self.prefill_fn = prefill_fn
        self.decode_fn = decode_fn

        if config.d_q_latent is None:
            self.q_proj = linear(config.d_model, d_q, use_bias=False)
        else:
            self.q_a_proj = linear(config.d_model, config.d_q_latent, use_bias=use_bias)
            self.q_a_norm = norm(config.d_q_latent)
            self.q_b_proj = linear(config.d_q_latent, d_q, use_bias=False)
        self.kv_a_proj = linear(config.d_model, config.d_latent + config.d_rope, use_bias=use_bias)
        self.kv_a_norm = norm(config.d_latent)
        # The two halves of kv_b_proj, apart and with the latent last, so that neither form has to
        # slice or transpose them in every step.
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=(0, 1))
        k_shape, v_shape = (
            (heads, config.d_nope, config.d_latent),
            (heads, config.d_v, config.d_latent),
        )
        self.w_uk = nnx.Param(init(rngs.params(), k_shape, dtype))
        self.w_uv = nnx.Param(init(rngs.params(), v_shape, dtype))
        self.o_proj = linear(heads * config.d_v, config.d_model, use_bias=use_bias)

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        *,
        lengths: Int[Array, " b"] | None = None,
        implementation: Implementation = None,
    ) -> Float[Array, "b t d_model"]:
        """Causal attention over whole sequences, from position 0 on.

        Args:
          x: normed residual stream, right-padded.
          lengths: int32 tokens of each sequence; None means all `t`. Outputs past them are
            meaningless.
          implementation: as in `mla_jax.mla_prefill`.

        Raises:
          ValueError: shapes that do not fit together.
          TypeError: `x` is not an array, or `lengths` not one of integers.
          NotImplementedError: no implementation of those named can serve the call.
        """
        _check_inputs(x, self.config, lengths)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        out = self._attend(
            self._expanded_queries(x, positions),
            *self.compress(x, positions),
            q_lens=lengths,
            kv_lens=lengths,
            implementation=implementation,
        )
        return self._project_out(out)

    def prefill(
        self,
        x: Float[Array, "b t d_model"],
        cache: LatentCache,
        block_table: Int[Array, "b max_pages"],
        seq_lens: Int[Array, " b"],
        *,
        lengths: Int[Array, " b"] | None = None,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "b t d_model"], LatentCache]:
        """Writes a chunk of each sequence to the cache, and attends to it and to what was before.

        Within the chunk, attention sees the latents as computed; the prefix, as the cache holds it.

        Args:
          x: normed residual stream of the chunk, right-padded.
          cache: donate it to have it updated in place.
          block_table: int32 pages of each sequence, enough for `seq_lens` tokens.
          seq_lens: int32 tokens in the cache once this chunk is written.
          lengths: int32 tokens of `x` that belong to each sequence, 0 for none; None means all `t`.
          implementation: as in `mla_jax.mla_prefill`.

        Returns:
          The output for the residual stream, and the cache with the chunk in it.

        Raises:
          ValueError: shapes that do not fit together.
          TypeError: pages or lengths that are not arrays of integers, or a cache whose arrays are
            not what its format declares.
          NotImplementedError: no implementation of those named can serve the call.
        """
        b, t = _check_inputs(x, self.config, lengths)
        check_cache(cache)
        block_table, seq_lens = check_table(block_table, seq_lens, b=b)
        lengths = jnp.full(b, t, jnp.int32) if lengths is None else lengths
        prefix_lens = seq_lens - lengths
        steps = jnp.arange(t)
        positions = prefix_lens[:, None] + steps
        latent, k_rope = self.compress(x, positions)
        slots = _slots(cache, block_table, positions, steps < lengths[:, None])
        cache = append(cache, _flat(latent), _flat(k_rope), slots)

        q = self._expanded_queries(x, positions)
        attend = functools.partial(
            self._attend, q, q_lens=lengths, return_lse=True, implementation=implementation
        )
        state = attend(latent, k_rope, kv_lens=lengths)
        return self._project_out(
            _attend_prefix(attend, state, cache, block_table, prefix_lens).astype(x.dtype)
        ), cache

    def decode(
        self,
        x: Float[Array, "b s d_model"],
        cache: LatentCache,
        block_table: Int[Array, "b max_pages"],
        seq_lens: Int[Array, " b"],
        *,
        plan: DecodePlan | None = None,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "b s d_model"], LatentCache]:
        """Writes `s` new tokens of each sequence to the cache and attends in absorbed form.

        Args:
          x: normed residual stream of the new tokens.
          cache: donate it to have it updated in place.
          block_table: int32 pages of each sequence, enough for `seq_lens` tokens.
          seq_lens: int32 tokens in the cache once the new ones are written; 0 for a row of the
            batch that is not in use.
          plan: from `mla_jax.plan_decode`, shared by all layers of the step.
          implementation: as in `mla_jax.mla_decode`.

        Returns:
          The output for the residual stream, and the cache with the new tokens in it.

        Raises:
          ValueError: shapes that do not fit together, or a plan for another `b`, `s`, number of
            heads or page size. That it was made from these `seq_lens` is not checked.
          TypeError, NotImplementedError: as `prefill`.
        """
        b, s = _check_inputs(x, self.config)
        check_cache(cache)
        block_table, seq_lens = check_table(block_table, seq_lens, b=b)
        positions = seq_lens[:, None] + jnp.arange(-s, 0)
        cos, sin = rope_tables(positions, self.config)
        cache = norm_rope_append(
            cache,
            _flat(self.kv_a_proj(x)),
            _slots(cache, block_table, positions, positions >= 0),
            norm_weight=self.kv_a_norm.scale[...],  # pyright: ignore[reportOptionalSubscript]
            norm_eps=_LATENT_NORM_EPS,
            cos=_flat(cos),
            sin=_flat(sin),
            rope_pairs=self.config.rope_pairs,
            rope_order=self.config.rope_order,
        )

        q_nope, q_rope = self._queries(x, positions)
        out = self.decode_fn(
            jnp.einsum("bshn,hnc->bshc", q_nope, self.w_uk[...]),
            q_rope,
            cache,
            block_table,
            seq_lens,
            scale=self.config.softmax_scale,
            plan=plan,
            implementation=implementation,
        )
        out = jnp.einsum("bshc,hvc->bshv", out, self.w_uv[...])
        return self._project_out(out), cache

    def compress(
        self, x: Float[Array, "b t d_model"], positions: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t d_latent"], Float[Array, "b t d_rope"]]:
        """What the cache holds of each token: the normed latent and the rotated rope key.

        Args:
          x: normed residual stream.
          positions: of each token in its sequence, from 0.

        Raises:
          ValueError, TypeError: from JAX, shapes that do not fit together.
        """
        latent, k_rope = jnp.split(self.kv_a_proj(x), [self.config.d_latent], axis=-1)
        return self.kv_a_norm(latent), apply_rope(k_rope, positions, self.config)

    def _queries(
        self, x: Float[Array, "b t d_model"], positions: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t h d_nope"], Float[Array, "b t h d_rope"]]:
        if self.config.d_q_latent is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:2], self.config.num_heads, -1)
        q_nope, q_rope = jnp.split(q, [self.config.d_nope], axis=-1)
        return q_nope, apply_rope(q_rope, positions, self.config)

    def _expanded_queries(
        self, x: Float[Array, "b t d_model"], positions: Int[Array, "b t"]
    ) -> Float[Array, "b t h d_qk"]:
        return jnp.concatenate(self._queries(x, positions), axis=-1)

    def _attend(
        self,
        q: Float[Array, "b t h d_qk"],
        latent: Float[Array, "b n d_latent"],
        k_rope: Float[Array, "b n d_rope"],
        **kwargs,
    ):
        """`prefill_fn` on the keys and values that `latent` and `k_rope` stand for."""
        k_nope = jnp.einsum("bnc,hkc->bnhk", latent, self.w_uk[...])
        v = jnp.einsum("bnc,hvc->bnhv", latent, self.w_uv[...])
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        return self.prefill_fn(q, k, v, scale=self.config.softmax_scale, **kwargs)

    def _project_out(self, out: Float[Array, "b t h d_v"]) -> Float[Array, "b t d_model"]:
        return self.o_proj(out.reshape(*out.shape[:2], -1))


def _check_inputs(
    x: Float[Array, "b t d_model"], config: MLAConfig, lengths: Int[Array, " b"] | None = None
) -> tuple[int, int]:
    """Check `x` and the lengths that go with it; return `b` and `t`."""
    b, t, _ = check_array("x", x, "b t d_model", d_model=config.d_model)
    if lengths is not None:
        check_array("lengths", lengths, "b", b=b)
        check_integer("lengths", lengths)
    return b, t


def _flat(x: Array) -> Array:
    """`[b, t, ...]` to `[b * t, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def _slots(
    cache: LatentCache,
    block_table: Int[Array, "b max_pages"],
    positions: Int[Array, "b t"],
    live: Bool[Array, "b t"],
) -> Int[Array, " bt"]:
    """Slots of the live tokens; -1 for the others, and for positions beyond the block table."""
    return _flat(jnp.where(live, slots_of(block_table, positions, cache), -1))


def _attend_prefix(
    attend: Callable,
    state: tuple[Float[Array, "b t h d_v"], Float[Array, "b h t"]],
    cache: LatentCache,
    block_table: Int[Array, "b max_pages"],
    prefix_lens: Int[Array, " b"],
) -> Float[Array, "b t h d_v"]:
    """Merges the attention to the first `prefix_lens` cached tokens into `state`, float32.

    A loop over pieces of the prefix, as many as the longest one has: keys and values per head
    never exist for more than `_PREFIX_CHUNK` tokens, or a page of each sequence.
    """
    dtype = state[0].dtype
    b, max_pages = block_table.shape
    chunk_pages = min(max(_PREFIX_CHUNK // (b * cache.page_size), 1), max_pages)
    chunk = chunk_pages * cache.page_size
    # Whole chunks of columns, for dynamic_slice clamps a start that would reach past the end.
    block_table = jnp.pad(block_table, ((0, 0), (0, -max_pages % chunk_pages)))

    def merge_chunk(i, state):
        table = jax.lax.dynamic_slice_in_dim(block_table, i * chunk_pages, chunk_pages, axis=1)
        lens = jnp.clip(prefix_lens - i * chunk, 0, chunk)
        out, lse = attend(*gather(cache, table, lens, dtype=dtype), kv_lens=lens, causal=False)
        outs = jnp.stack([state[0], out.astype(jnp.float32)])
        return merge_states(outs, jnp.stack([state[1], lse]))

    num_chunks = -(-jnp.max(prefix_lens) // chunk)
    state = (state[0].astype(jnp.float32), state[1])
    return jax.lax.fori_loop(0, num_chunks, merge_chunk, state)[0]
