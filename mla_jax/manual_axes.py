"""Loop carries under `jax.shard_map`."""

from typing import Any

import jax
from jax import lax


def vary_like[T](tree: T, *others: Any) -> T:
    """Return `tree` marked as varying over every manual mesh axis that an array of `others` does.

    A loop's carry keeps one type, so what it starts from (zeros) must vary over the axes that the
    loop's inputs vary over. Outside `jax.shard_map` this does nothing.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves((tree, others))))

    def vary(x):
        missing = tuple(sorted(axes - varying(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
