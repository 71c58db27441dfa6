"""The implementations that are built, as pytest parameters: what needs a GPU is marked so."""

import pytest

from mla_jax import dispatch


def implementations(op):
    names = [name for name in dispatch.IMPLEMENTATIONS if name in dispatch.TABLE[op]]
    marks = {name: () if name == "xla" else pytest.mark.hopper for name in names}
    return pytest.mark.parametrize(
        "implementation", [pytest.param(name, marks=marks[name]) for name in names]
    )
