"""Layers of DeepSeek models as flax nnx modules."""

from mla_jax.nn.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from mla_jax.nn.moe import MLP as MLP
from mla_jax.nn.moe import MoE as MoE
from mla_jax.nn.moe import Router as Router
from mla_jax.nn.moe import select_experts as select_experts
from mla_jax.nn.rope import apply_rope as apply_rope
