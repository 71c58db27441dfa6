"""The division of one decode step's work: made on the device, once, for all layers."""

import dataclasses

import jax
from jaxtyping import Array, Int

from mla_jax.checks import as_int32, check_array, check_choice, check_integer, check_size
from pallas_kernels.formats import FORMATS
from pallas_kernels.hopper.plan import divide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How one decode step is divided; made by `plan_decode`, read by the kernels.

    `parts` is described at `pallas_kernels.hopper.plan.divide`.
    """

    parts: Int[Array, "parts 8"]
    batch: int = dataclasses.field(metadata={"static": True})
    num_heads: int = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_parts(self) -> int:
        """Parts, the ones with nothing to do included."""
        return self.parts.shape[0]

    def check(self, *, batch: int, num_heads: int, q_len: int, page_size: int) -> None:
        """Raise `ValueError` unless the plan was made for a call of these sizes."""
        call = {"batch": batch, "num_heads": num_heads, "q_len": q_len, "page_size": page_size}
        for name, size in call.items():
            planned = getattr(self, name)
            if planned != size:
                raise ValueError(
                    f"`plan` was made for {name}={planned}, this call has {name}={size}; "
                    "call plan_decode with the sizes of this step"
                )


def plan_decode(
    seq_lens: Int[Array, " b"],
    *,
    num_heads: int,
    q_len: int = 1,
    page_size: int = 64,
    cache_format: str | None = None,
) -> DecodePlan:
    """Divide a decode step over the SMs of the GPU.

    Pure jnp: it runs on the device and under `jax.jit`, and copies nothing to the host.

    Args:
        seq_lens: tokens in the cache of each sequence, the new ones included; 0 is legal.
        num_heads: query heads on this device.
        q_len: query tokens per sequence in this step.
        page_size: tokens per cache page.
        cache_format: that of the caches (`LatentCache.format`). A plan is valid for any; where few
            and short sequences are divided, the smallest share depends on it. None: the one that
            suits all, that of e4m3.

    Returns:
        A `DecodePlan`, valid for every layer of the step and for any implementation (those that
        need none ignore it).

    Raises:
        ValueError: `seq_lens` is not `[B]`, a size is not positive, or the format is unknown.
        TypeError: `seq_lens` is not an array of integers, or a size is not an int.
    """
    (batch,) = check_array("seq_lens", seq_lens, "b")
    check_integer("seq_lens", seq_lens)
    if batch == 0:
        raise ValueError(f"`seq_lens` has shape {seq_lens.shape}: must hold a sequence at least")
    for name, size in (("num_heads", num_heads), ("q_len", q_len), ("page_size", page_size)):
        check_size(name, size)
    if cache_format is not None:
        check_choice("cache_format", cache_format, tuple(FORMATS))
    return DecodePlan(
        parts=divide(as_int32(seq_lens), rows=num_heads * q_len, cache_format=cache_format),
        batch=batch,
        num_heads=num_heads,
        q_len=q_len,
        page_size=page_size,
    )
