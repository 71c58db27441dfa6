"""DeepSeek models: load a checkpoint, run it, generate."""

from mla_jax.models.checkpoint import load as load
from mla_jax.models.deepseek import DeepseekModel as DeepseekModel
from mla_jax.models.deepseek import init as init
from mla_jax.models.generate import generate as generate
from mla_jax.models.generate import stream as stream
from mla_jax.models.pages import PageTable as PageTable
