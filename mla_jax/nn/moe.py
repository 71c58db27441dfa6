"""Feed-forward layers: the dense one, and mixtures of experts with both routings of DeepSeek."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mla_jax.config import MLAConfig, MoEConfig


class MLP(nnx.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, hidden width `d_ff`."""

    def __init__(self, d_model: int, d_ff: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Random weights, LeCun normal, without biases.

        Args:
          d_model: width of the residual stream.
          d_ff: hidden width.
          dtype: of parameters and activations.
          rngs: for the parameters.
        """
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.gate_proj = linear(d_model, d_ff)
        self.up_proj = linear(d_model, d_ff)
        self.down_proj = linear(d_ff, d_model)

    def __call__(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        """SwiGLU (arXiv:2002.05202) of each row, in the dtype of the layer.

        Args:
          x: normed residual stream, cast to the dtype of the layer.

        Raises:
          TypeError: rows that are not `d_model` wide.
        """
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


def select_experts(
    logits: Float[Array, "n num_experts"],
    bias: Float[Array, " num_experts"] | None,
    moe: MoEConfig,
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Chooses `num_experts_per_token` experts for each token, and their weights (float32).

    "softmax" scores are a distribution over all experts; a group is as good as its best expert
    (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.2). "sigmoid" scores are independent; experts are chosen
    by score + `bias` and a group by the sum of its two best, while the weight is the score without
    the bias (DeepSeek-V3, arXiv:2412.19437 sec. 2.1.2).

    Args:
      logits: router outputs, float32.
      bias: float32 correction for the choice, given exactly with sigmoid scores.
      moe: how many experts and groups, and how weights are normalised and scaled.

    Returns:
      Numbers of the experts, int32, best first, and their weights, float32.

    Raises:
      ValueError, TypeError: from JAX, where shapes do not fit `moe`; values are not checked.
    """
    if bias is None:
        scores = jax.nn.softmax(logits)
        choice, excluded = scores, 0.0
    else:
        scores = jax.nn.sigmoid(logits)
        choice, excluded = scores + bias, -jnp.inf

    if moe.num_groups > 1:
        groups = choice.reshape(-1, moe.num_groups, moe.num_experts // moe.num_groups)
        num_best = 1 if bias is None else min(2, groups.shape[-1])
        group_score = jax.lax.top_k(groups, num_best)[0].sum(-1)
        kept = jax.lax.top_k(group_score, moe.num_groups_kept)[1]
        keep = jax.nn.one_hot(kept, moe.num_groups, dtype=bool).any(1)
        choice = jnp.where(keep[..., None], groups, excluded).reshape(choice.shape)

    experts = jax.lax.top_k(choice, moe.num_experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.normalize:
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return experts, weights * moe.routed_scale


class Router(nnx.Module):
    """Scores the experts for each token, in float32 whatever the dtype of the model."""

    def __init__(self, config: MLAConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Random weights, LeCun normal; the bias of sigmoid scores begins at 0.

        Args:
          config: sizes and routing rule.
          dtype: of the weights.
          rngs: for the parameters.

        Raises:
          AssertionError: `config.moe` is None.
        """
        assert config.moe is not None
        self.moe = config.moe
        shape = (config.d_model, config.moe.num_experts)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape, dtype))
        # Balances the load while training; it is not learned by gradient, hence no nnx.Param.
        bias = jnp.zeros(shape[1]) if config.moe.scoring == "sigmoid" else None
        self.bias = nnx.data(None if bias is None else nnx.Variable(bias))

    def logits(self, x: Float[Array, "n d_model"]) -> Float[Array, "n num_experts"]:
        """`x @ kernel` as float32 products: the scores before softmax or sigmoid.

        Args:
          x: tokens, of any float dtype.

        Raises:
          TypeError: rows that are not `d_model` wide.
        """
        kernel = self.kernel[...].astype(jnp.float32)
        return jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)

    def __call__(
        self, x: Float[Array, "n d_model"]
    ) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """The experts of each token and their weights, see `select_experts`.

        Args:
          x: tokens, of any float dtype.

        Raises:
          TypeError: rows that are not `d_model` wide.
        """
        return select_experts(
            self.logits(x), None if self.bias is None else self.bias[...], self.moe
        )


class MoE(nnx.Module):
    """Routed experts, weighted by the router, plus shared experts that see every token.

    Rows are sorted by expert, so that two `jax.lax.ragged_dot` serve all experts. `gate_up` holds
    the gate and the up projection of each expert side by side.
    """

    def __init__(self, config: MLAConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Random weights, LeCun normal within each expert.

        Args:
          config: sizes and routing rule.
          dtype: of parameters and activations.
          rngs: for the parameters.

        Raises:
          AssertionError: `config.moe` is None.
        """
        assert config.moe is not None
        moe, d_model = config.moe, config.d_model
        init = nnx.initializers.lecun_normal(batch_axis=0)
        gate_up_shape = (moe.num_experts, d_model, 2 * moe.d_expert)
        down_shape = (moe.num_experts, moe.d_expert, d_model)
        self.router = Router(config, dtype=dtype, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), gate_up_shape, dtype))
        self.down = nnx.Param(init(rngs.params(), down_shape, dtype))
        self.shared = nnx.data(
            MLP(d_model, moe.num_shared_experts * moe.d_expert, dtype=dtype, rngs=rngs)
            if moe.num_shared_experts
            else None
        )

    def __call__(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t d_model"]:
        """`sum_k weight_k * expert_k(x) + shared(x)` of each token, in the dtype of `x`.

        (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.1.) No token is dropped, however many choose one
        expert. The weighted sum is float32.

        Args:
          x: normed residual stream, in the dtype of the layer.

        Raises:
          TypeError: rows that are not `d_model` wide.
        """
        tokens = x.reshape(-1, x.shape[-1])
        out = self._routed(tokens, *self.router(tokens)).reshape(x.shape)
        return out if self.shared is None else out + self.shared(x)

    def _routed(
        self,
        tokens: Float[Array, "n d_model"],
        experts: Int[Array, "n k"],
        weights: Float[Array, "n k"],
    ) -> Float[Array, "n d_model"]:
        num_experts = self.gate_up.shape[0]
        expert_of_row = experts.reshape(-1)
        order = jnp.argsort(expert_of_row)
        rows_per_expert = jnp.bincount(expert_of_row, length=num_experts)

        rows = tokens[order // experts.shape[1]]
        gate, up = jnp.split(jax.lax.ragged_dot(rows, self.gate_up[...], rows_per_expert), 2, -1)
        rows = jax.lax.ragged_dot(nnx.silu(gate) * up, self.down[...], rows_per_expert)

        rows = rows[jnp.argsort(order)].reshape(*experts.shape, -1)
        return jnp.einsum("nkd,nk->nd", rows.astype(jnp.float32), weights).astype(tokens.dtype)
