"""Which implementation serves a call: the table, the order of preference, reasons for refusal."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.decode_dense import cost
from pallas_kernels.errors import Unsupported
from pallas_kernels.hopper.device import gpu

IMPLEMENTATIONS = ("mosaic", "mosaic_transposed", "triton", "xla")
"""Every name that the `implementation` argument takes, the one to prefer first."""

TABLE: dict[str, dict[str, str]] = {
    "mla_decode": {
        "mosaic": "pallas_kernels.decode",
        "mosaic_transposed": "pallas_kernels.decode",
        "xla": "mla_jax.reference.decode_dense",
    },
    "mla_sparse_decode": {"xla": "mla_jax.reference.decode_sparse"},
    "mla_sparse_prefill": {"xla": "mla_jax.reference.prefill_sparse"},
    "mla_prefill": {"xla": "mla_jax.reference.prefill_dense"},
    "append": {
        "mosaic": "pallas_kernels.cache_append.entry",
        "xla": "mla_jax.reference.cache_append",
    },
    "norm_rope_append": {
        "mosaic": "pallas_kernels.cache_append.entry",
        "xla": "mla_jax.reference.cache_append",
    },
}
"""The module of each implementation that is built. It holds a function named as the op, with the
arguments of the public one less `implementation`; a kernel's raises `Unsupported` for a call that
it cannot serve, before it traces device code."""

ARGUMENTS: Mapping[str, dict[str, Any]] = {"mosaic_transposed": {"transposed": True}}
"""What an implementation's function is given besides, where one serves several of them."""

OPS = tuple(TABLE)
"""The ops that have several implementations; all but `append` take `implementation`."""


class Availability(NamedTuple):
    """Whether an implementation can be used, and why not (empty where it can)."""

    name: str
    available: bool
    reason: str


def call(op: str, implementation: str | Sequence[str] | None, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the first of the implementations asked for that can serve the call.

    Raises:
        Unsupported: none of those named can; the message has each one's reason.
        ValueError: an unknown name, or an empty sequence.
        TypeError: neither None, nor a name, nor a sequence of names.
    """
    order = names(implementation)
    if implementation is None and op == "mla_decode":
        order = _decode_order(*args[:3])
    refusals = {}
    for name in order:
        try:
            return _load(op, name)(*args, **kwargs)
        except Unsupported as refusal:
            refusals[name] = str(refusal)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise Unsupported(
        f"`implementation` is {implementation!r}: cannot serve this {op} call ({reasons}); "
        "use implementation=None for the best that can"
    )


def explain(op: str, *args: Any, **kwargs: Any) -> tuple[Availability, ...]:
    """Say for every implementation of `op` whether it can be used; nothing is run.

    Without further arguments the answer is about this process: what is built and which device it
    has. With the arguments of a call (all of them, as an implementation takes them) it is about
    that call.
    """

    def refusal(name: str) -> str:
        try:
            function = _load(op, name)
            if args or kwargs:
                jax.eval_shape(lambda: function(*args, **kwargs))
        except Unsupported as error:
            return str(error)
        return ""

    reasons = {name: refusal(name) for name in IMPLEMENTATIONS}
    return tuple(Availability(name, not reason, reason) for name, reason in reasons.items())


def availability() -> dict[str, tuple[Availability, ...]]:
    """`explain` of every op in this process."""
    return {op: explain(op) for op in OPS}


def names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that an `implementation` argument stands for, in order; errors as in `call`."""
    if implementation is None:
        return IMPLEMENTATIONS
    if isinstance(implementation, str):
        found = (implementation,)
    elif isinstance(implementation, Sequence):
        found = tuple(implementation)
    else:
        raise TypeError(
            f"`implementation` is {implementation!r}: must be None, a name or a sequence of names"
        )
    if not found or not all(name in IMPLEMENTATIONS for name in found):
        raise ValueError(
            f"`implementation` is {implementation!r}: must be None, or one or several of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    return found


def _decode_order(q_latent: jax.Array, q_rope: jax.Array, cache: Any) -> tuple[str, ...]:
    """`IMPLEMENTATIONS`, the transposed schedule first where it is predicted to be the faster."""
    del q_rope
    _, s_q, h, _ = q_latent.shape
    if not cost.transposed_is_faster(gpu(), s_q=s_q, h=h, format=cache.format):
        return IMPLEMENTATIONS
    first = "mosaic_transposed"
    return (first, *(name for name in IMPLEMENTATIONS if name != first))


def _load(op: str, name: str) -> Callable[..., Any]:
    """The function of an implementation; `Unsupported` if this process cannot have it."""
    if name not in TABLE[op]:
        raise Unsupported(f"not built yet for {op}")
    if missing := _REQUIREMENTS[name]():
        raise Unsupported(missing)
    function = getattr(importlib.import_module(TABLE[op][name]), op)
    return functools.partial(function, **ARGUMENTS.get(name, {}))


def _lacks_hopper() -> str:
    device = jax.devices()[0]
    found = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and found == "9.0":
        return ""
    has = f"{device.device_kind} ({found})" if found else device.platform
    return f"needs an NVIDIA Hopper GPU (compute capability 9.0), this process has: {has}"


def _lacks_triton() -> str:
    if importlib.util.find_spec("jax_triton") is None:
        return "needs the package jax-triton: pip install 'mla-jax[triton]'"
    platform = jax.devices()[0].platform
    return "" if platform == "gpu" else f"needs an NVIDIA GPU, this process has: {platform}"


_REQUIREMENTS: Mapping[str, Callable[[], str]] = {
    "mosaic": _lacks_hopper,
    "mosaic_transposed": _lacks_hopper,
    "triton": _lacks_triton,
    "xla": lambda: "",
}
"""What this process lacks for an implementation, in words; empty if nothing."""
