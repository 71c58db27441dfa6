"""Multi-head latent attention for JAX: paged latent caches, Hopper kernels, DeepSeek models."""

from mla_jax import flash_mla as flash_mla
from mla_jax import models as models
from mla_jax import nn as nn
from mla_jax.cache import LatentCache as LatentCache
from mla_jax.cache import gather as gather
from mla_jax.cache import init_cache as init_cache
from mla_jax.cache import pack_fp8_ds_mla as pack_fp8_ds_mla
from mla_jax.cache import unpack_fp8_ds_mla as unpack_fp8_ds_mla
from mla_jax.ops import append as append
from mla_jax.ops import merge_states as merge_states
from mla_jax.ops import mla_decode as mla_decode
from mla_jax.ops import mla_prefill as mla_prefill
from mla_jax.ops import mla_sparse_decode as mla_sparse_decode
from mla_jax.ops import mla_sparse_prefill as mla_sparse_prefill
from mla_jax.ops import norm_rope_append as norm_rope_append
from mla_jax.plan import DecodePlan as DecodePlan
from mla_jax.plan import plan_decode as plan_decode
from pallas_kernels.errors import Unsupported as Unsupported
