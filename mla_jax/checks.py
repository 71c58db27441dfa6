"""Argument checks shared by the public functions: shapes, dtypes and kinds, never values.

They run on tracers as on arrays, before anything is compiled. A message names the argument, says
what it was and what it must be.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

type Scale = float | Float[Array, ""]
"""What `scale` arguments take."""

FLOATS = ("bfloat16", "float16", "float32")
"""The dtypes of activations."""


def check_array(name: str, x: Any, layout: str, **sizes: int) -> tuple[int, ...]:
    """Check the rank of `x` and its named sizes; return its shape.

    `layout` names the axes, as in `"b s_q h_q c"`; `sizes` fixes some of them.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"`{name}` is of type {type(x).__name__}: must be an array [{layout}]")
    axes = layout.split()
    if x.ndim != len(axes):
        raise ValueError(
            f"`{name}` has shape {x.shape}: must have {len(axes)} axes, [{', '.join(axes)}]"
        )
    for axis, size in zip(axes, x.shape, strict=True):
        if axis in sizes and size != sizes[axis]:
            raise ValueError(
                f"`{name}` has shape {x.shape}: must be [{', '.join(axes)}] with "
                f"{axis}={sizes[axis]}"
            )
    return x.shape


def check_dtype(name: str, dtype: Any) -> np.dtype:
    """Check that `dtype` is one of activations; return it as a numpy dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in FLOATS:
        raise TypeError(f"`{name}` is {found or repr(dtype)}: must be bfloat16, float16 or float32")
    return found


def check_float(name: str, x: Any) -> None:
    """Check that the array `x` holds activations: bfloat16, float16 or float32."""
    if x.dtype.name not in FLOATS:
        raise TypeError(f"`{name}` is {x.dtype}: must be bfloat16, float16 or float32")


def check_same_dtype(name: str, x: Any, other_name: str, other: Any) -> None:
    """Check that two arrays have one dtype."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"`{name}` is {x.dtype}: must be {other.dtype} as `{other_name}`, cast one of them"
        )


def check_integer(name: str, x: Any) -> None:
    """Check that the array `x` holds integers."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"`{name}` is {x.dtype}: must be int32")


def check_scale(name: str, scale: Any) -> None:
    """Check that `scale` is a real number or a floating array of no axes."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | jax.Array | np.ndarray):
        raise TypeError(f"`{name}` is {scale!r}: must be a real number")
    if isinstance(scale, numbers.Real):
        if not math.isfinite(scale):
            raise ValueError(f"`{name}` is {scale}: must be finite")
        return
    check_array(name, scale, "")
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"`{name}` is {scale.dtype}: an array must be of a floating dtype, cast it to float32"
        )


def as_int32(x: Any) -> Int[Array, "*axes"]:
    """The integers of the array `x` as int32, one beyond it as the nearest: it does not wrap."""
    info = jnp.iinfo(jnp.int32)
    if jnp.iinfo(x.dtype).max > info.max:
        xp = np if isinstance(x, np.ndarray) else jnp
        x = xp.minimum(x, info.max)
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            x = xp.maximum(x, info.min)
    return jnp.asarray(x, jnp.int32)


def check_int(name: str, value: Any) -> None:
    """Check that `value` is an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` is {value!r}: must be an int")


def check_size(name: str, value: Any) -> None:
    """Check that `value` is a positive int."""
    check_int(name, value)
    if value < 1:
        raise ValueError(f"`{name}` is {value}: must be at least 1")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` is {value!r}: must be one of {', '.join(map(repr, choices))}")
