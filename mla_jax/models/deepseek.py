"""DeepSeek-V2 and -V3 as a flax nnx module."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mla_jax.cache import LatentCache, init_cache
from mla_jax.checks import check_array, check_dtype, check_integer
from mla_jax.config import MLAConfig
from mla_jax.nn import MLP, MoE, MultiHeadLatentAttention
from mla_jax.ops import Implementation, mla_decode, mla_prefill
from mla_jax.plan import plan_decode
from pallas_kernels.formats import unscaled_format

Caches = tuple[LatentCache, ...]


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then a dense or a mixture-of-experts feed-forward."""

    def __init__(
        self,
        config: MLAConfig,
        layer: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        prefill_fn: Callable,
        decode_fn: Callable,
    ):
        """Random parameters.

        Args:
          config: sizes and conventions.
          layer: number of the layer, from 0; `config.is_moe_layer` decides by it.
          dtype: of parameters and activations.
          rngs: for the parameters.
          prefill_fn: attention in MHA form, called as `mla_jax.mla_prefill`.
          decode_fn: attention in absorbed form, called as `mla_jax.mla_decode`.

        Raises:
          TypeError: `dtype` is not bfloat16, float16 or float32.
        """
        norm = functools.partial(
            nnx.RMSNorm,
            config.d_model,
            epsilon=config.norm_eps,
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.input_norm = norm()
        self.attention = MultiHeadLatentAttention(
            config, dtype=dtype, rngs=rngs, prefill_fn=prefill_fn, decode_fn=decode_fn
        )
        self.post_attention_norm = norm()
        if config.is_moe_layer(layer):
            self.mlp = MoE(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MLP(config.d_model, config.d_ff, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        *,
        lengths: Int[Array, " b"] | None = None,
        implementation: Implementation = None,
    ) -> Float[Array, "b t d_model"]:
        """The residual stream after this layer, of whole sequences without a cache.

        Args:
          x: residual stream, right-padded, in the dtype of the layer.
          lengths: int32 tokens of each sequence; None means all `t`.
          implementation: as in `mla_jax.mla_prefill`.

        Raises:
          ValueError, TypeError, NotImplementedError: as `MultiHeadLatentAttention.__call__`.
        """
        y = self.attention(self.input_norm(x), lengths=lengths, implementation=implementation)
        return self._feed_forward(x + y)

    def prefill(
        self, x: Float[Array, "b t d_model"], cache: LatentCache, *args, **kwargs
    ) -> tuple[Float[Array, "b t d_model"], LatentCache]:
        """The residual stream of the next chunk after this layer, and the cache with the chunk.

        Args:
          x: residual stream of the chunk, right-padded, in the dtype of the layer.
          cache: of this layer.
          *args, **kwargs: as in `MultiHeadLatentAttention.prefill`.

        Raises:
          ValueError, TypeError, NotImplementedError: as `MultiHeadLatentAttention.prefill`.
        """
        y, cache = self.attention.prefill(self.input_norm(x), cache, *args, **kwargs)
        return self._feed_forward(x + y), cache

    def decode(
        self, x: Float[Array, "b s d_model"], cache: LatentCache, *args, **kwargs
    ) -> tuple[Float[Array, "b s d_model"], LatentCache]:
        """The residual stream of the new tokens after this layer, and the cache with them.

        Args:
          x: residual stream of the new tokens, in the dtype of the layer.
          cache: of this layer.
          *args, **kwargs: as in `MultiHeadLatentAttention.decode`.

        Raises:
          ValueError, TypeError, NotImplementedError: as `MultiHeadLatentAttention.decode`.
        """
        y, cache = self.attention.decode(self.input_norm(x), cache, *args, **kwargs)
        return self._feed_forward(x + y), cache

    def _feed_forward(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t d_model"]:
        return x + self.mlp(self.post_attention_norm(x))


class DeepseekModel(nnx.Module):
    """A causal language model: DeepSeek-V2 (arXiv:2405.04434) or -V3 (arXiv:2412.19437).

    `model(input_ids)` gives the logits of whole sequences. `prefill` and `decode` do the same step
    by step, with one paged latent cache per layer; `mla_jax.models.generate` drives them.
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
        """Random parameters; `mla_jax.models.load` gives a model with those of a checkpoint.

        Args:
          config: sizes and conventions.
          rngs: for the parameters.
          dtype: of the whole model; this, `prefill_fn` and `decode_fn` are what every layer's
            `mla_jax.nn.MultiHeadLatentAttention` is given, which also says what they may be.

        Raises:
          TypeError: `dtype` is not bfloat16, float16 or float32.
        """
        dtype = check_dtype("dtype", config.dtype if dtype is None else dtype)
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.config = config
        self.dtype = dtype
        self.embed = nnx.Embed(config.vocab_size, config.d_model, **kwargs)
        self.layers = nnx.List(
            DecoderLayer(
                config, i, dtype=dtype, rngs=rngs, prefill_fn=prefill_fn, decode_fn=decode_fn
            )
            for i in range(config.num_layers)
        )
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, **kwargs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, **kwargs)

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        *,
        lengths: Int[Array, " b"] | None = None,
        implementation: Implementation = None,
    ) -> Float[Array, "b t vocab"]:
        """Logits of whole sequences, without a cache.

        Args:
          input_ids: int32 token ids, right-padded; an id past the vocabulary gives NaN.
          lengths: int32 tokens of each sequence; None means all `t`. Logits past them are
            meaningless.
          implementation: as in `mla_jax.mla_prefill`.

        Returns:
          float32 logits: those at `[:, i]` are for the token after `input_ids[:, i]`.

        Raises:
          ValueError: shapes that do not fit together.
          TypeError: ids or lengths that are not arrays of integers.
          NotImplementedError: no implementation of those named can serve the call.
        """
        x = self._embed(input_ids)
        for layer in self.layers:
            x = layer(x, lengths=lengths, implementation=implementation)
        return self.logits(x)

    def prefill(
        self,
        input_ids: Int[Array, "b t"],
        caches: Caches,
        block_table: Int[Array, "b max_pages"],
        seq_lens: Int[Array, " b"],
        *,
        lengths: Int[Array, " b"] | None = None,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "b vocab"], Caches]:
        """Takes in the next chunk of each prompt; logits of the last token of each chunk.

        Args:
          input_ids: int32 token ids of the chunk, right-padded.
          caches: one per layer; donate them to have them updated in place.
          block_table: int32 pages of each sequence, enough for `seq_lens` tokens.
          seq_lens: int32 tokens in the cache once this chunk is written.
          lengths: int32 tokens of the chunk that belong to each sequence; None means all `t`.
            Where it is 0 the sequence does not change, and its logits are meaningless.
          implementation: as in `mla_jax.mla_prefill`.

        Returns:
          float32 logits for the token after the chunk, and the caches with the chunk in them.

        Raises:
          ValueError: shapes that do not fit together, or not one cache for each layer.
          TypeError: ids, pages or lengths that are not arrays of integers, or a cache whose arrays
            are not what its format declares.
          NotImplementedError: no implementation of those named can serve the call.
        """
        x, new_caches = self._embed(input_ids), []
        self._check_caches(caches)
        b, t = input_ids.shape
        lengths = jnp.full(b, t, jnp.int32) if lengths is None else lengths
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.prefill(
                x, cache, block_table, seq_lens, lengths=lengths, implementation=implementation
            )
            new_caches.append(cache)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        return self.logits(last)[:, 0], tuple(new_caches)

    def decode(
        self,
        input_ids: Int[Array, "b s"],
        caches: Caches,
        block_table: Int[Array, "b max_pages"],
        seq_lens: Int[Array, " b"],
        *,
        implementation: Implementation = None,
    ) -> tuple[Float[Array, "b s vocab"], Caches]:
        """Takes in `s` new tokens per sequence, 1 or a few; logits of each of them.

        Args:
          input_ids: int32 ids of the new tokens.
          caches: one per layer; donate them to have them updated in place.
          block_table: int32 pages of each sequence, enough for `seq_lens` tokens.
          seq_lens: int32 tokens in the cache once the new ones are written; 0 for a row of the
            batch that is not in use.
          implementation: as in `mla_jax.mla_decode`.

        Returns:
          float32 logits, those at `[:, i]` for the token after `input_ids[:, i]`, and the caches
          with the new tokens in them.

        Raises:
          ValueError, TypeError, NotImplementedError: as `prefill`.
        """
        x, new_caches = self._embed(input_ids), []
        self._check_caches(caches)
        plan = plan_decode(
            seq_lens,
            num_heads=self.config.num_heads,
            q_len=input_ids.shape[1],
            page_size=caches[0].page_size,
            cache_format=caches[0].format,
        )
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.decode(
                x, cache, block_table, seq_lens, plan=plan, implementation=implementation
            )
            new_caches.append(cache)
        return self.logits(x), tuple(new_caches)

    def logits(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t vocab"]:
        """float32 logits from the residual stream after the last layer, its norm included.

        Raises:
          ValueError, TypeError: from JAX, rows that are not `d_model` wide.
        """
        head = (
            self.embed.embedding[...].T if self.config.tie_embeddings else self.lm_head.kernel[...]
        )
        return jnp.dot(self.norm(x), head, preferred_element_type=jnp.float32)

    def _embed(self, input_ids: Int[Array, "b t"]) -> Float[Array, "b t d_model"]:
        check_array("input_ids", input_ids, "b t")
        check_integer("input_ids", input_ids)
        return self.embed(input_ids)

    def _check_caches(self, caches: Caches) -> None:
        if len(caches) != len(self.layers):
            raise ValueError(
                f"`caches` holds {len(caches)}: must hold one for each of {len(self.layers)} layers"
            )

    def init_caches(
        self, num_pages: int, *, page_size: int = 64, cache_format: str | None = None
    ) -> Caches:
        """Empty caches, one per layer; `cache_format=None` follows the dtype of the model.

        Args:
          num_pages: pages of each cache, shared by all sequences.
          page_size: tokens in a page.
          cache_format: one of those of `mla_jax.init_cache`.

        Raises:
          ValueError, TypeError: as `mla_jax.init_cache`.
        """
        make = functools.partial(
            init_cache,
            num_pages,
            page_size=page_size,
            kv_lora_rank=self.config.d_latent,
            rope_dim=self.config.d_rope,
            format=cache_format or unscaled_format(self.dtype.name).name,
        )
        return tuple(make() for _ in self.layers)


def init(config: MLAConfig, *, seed: int = 0, dtype: DTypeLike | None = None) -> DeepseekModel:
    """A model with random weights, for benchmarks and tests.

    Args:
      config: sizes and conventions.
      seed: of the weights.
      dtype: of parameters and activations, `config.dtype` by default.

    Raises:
      TypeError: `dtype` is not bfloat16, float16 or float32.
    """
    return DeepseekModel(config, dtype=dtype, rngs=nnx.Rngs(seed))
