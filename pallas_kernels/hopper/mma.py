"""Every wgmma of the kernels goes through here, so that each trick is told once.

On the simulated GPU (`interpret`) the same functions read their operands with ordinary loads and
multiply them with `jnp.dot`: the simulator then sees, and race-checks, what wgmma reads. A wgmma in
flight while other things are done reads at any time between issue and wait: it is simulated by
reading at both ends, and is NaN where they differ.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
Operand = Any
"""A shared-memory ref, or (left operand only) an array in registers."""
Operands = Sequence[Sequence[tuple[Operand, Operand]]]
"""Pairs of factors, for each of several accumulators."""


def opaque_zero(non_negative: jax.Array) -> jax.Array:
    """0, in a way that the compiler cannot see.

    Indexing a loop-invariant operand by it keeps LLVM from hoisting that operand's wgmma
    descriptors, some 70 of them, out of the loop, where they would not fit the registers.
    """
    return lax.shift_right_logical(non_negative, 31)


def dot(
    operands: Iterable[tuple[Operand, Operand]],
    shape: tuple[int, int],
    *,
    interpret: bool,
) -> jax.Array:
    """Sum of `a @ b` over the operand pairs, all in shared memory; float32, waited for."""
    if interpret:
        return functools.reduce(jnp.add, (_plain(a, b) for a, b in operands))

    def issue(acc):
        for a, b in operands:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(issue, Accumulator(shape, jnp.float32))


def dots[Result](
    operands: Operands,
    shape: tuple[int, int],
    meanwhile: Callable[[], Result],
    *,
    interpret: bool,
) -> tuple[list[jax.Array], Result]:
    """`dot` of each of several sequences of operand pairs, issued together; and what `meanwhile`
    gives, which runs while the tensor cores work on them."""
    if interpret:
        return _in_flight(lambda: [dot(x, shape, interpret=True) for x in operands], meanwhile)

    def issue(*accs):
        for acc, pairs in zip(accs, operands, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        result = meanwhile()
        return [acc[...] for acc in accs], result

    return pl.run_scoped(issue, *[Accumulator(shape, jnp.float32)] * len(operands))


def dot_after[Result](
    first: tuple[Operand, Operand],
    then: tuple[Operand, Operand],
    shape: tuple[int, int],
    use_first: Callable[[jax.Array], Result],
    *,
    interpret: bool,
) -> tuple[Result, jax.Array]:
    """`use_first(a @ b)` of the first pair, computed while the tensor cores work on the product of
    the other; and that one."""
    if interpret:
        return use_first(_plain(*first)), _plain(*then)

    def issue(first_acc, then_acc):
        plgpu.wgmma(first_acc, *first)
        plgpu.wgmma(then_acc, *then)
        used = use_first(plgpu.wgmma_accumulator_load(first_acc, wait_n=1))
        return used, then_acc[...]

    return pl.run_scoped(issue, *[Accumulator(shape, jnp.float32)] * 2)


def add_dots(
    accs: tuple[jax.Array, ...],
    operands: Operands,
    *,
    interpret: bool,
    between: Callable[[], Operands] | None = None,
    after_issue: Callable[[], None] | None = None,
) -> tuple[jax.Array, ...]:
    """Each of `accs` plus the sum of `a @ b` over its operand pairs, waiting for the results.

    All are issued before any is waited for, the accumulators by turns: with `a` in registers, none
    of those registers may be made in between (C7513). So `between`, which runs while the tensor
    cores work on these, gives operands that are multiplied when they are done. If there are fewer
    operands than `accs`, these are of the first ones, those of `between` of the last. `after_issue`
    runs while the tensor cores work on the last.
    """
    if interpret:
        rows, columns = accs[0].shape
        multiply = lambda operands: [
            dot(pairs, (rows, columns), interpret=True) for pairs in operands
        ]
        first = 0
        if between is not None:
            products, more = _in_flight(lambda: multiply(operands), between)
            accs = (*map(jnp.add, accs, products), *accs[len(products) :])
            operands, first = more, len(accs) - len(more)
        products, _ = _in_flight(lambda: multiply(operands), after_issue)
        return (*accs[:first], *map(jnp.add, accs[first:], products))

    def issue(acc_refs):
        def multiply(acc_refs, operands):
            for pairs in zip(*operands, strict=True):
                for acc_ref, (a, b) in zip(acc_refs, pairs, strict=True):
                    plgpu.wgmma(acc_ref, a, b)

        multiply(acc_refs[: len(operands)], operands)
        if between is not None:
            more = between()
            plgpu.wgmma_wait(0)
            multiply(acc_refs[-len(more) :], more)
        if after_issue is not None:
            after_issue()

    return pl.run_state(issue)(tuple(Accumulator.init(acc) for acc in accs))


def add_dot(
    acc: jax.Array,
    a: Operand,
    b: Operand,
    *,
    interpret: bool,
    after_issue: Callable[[], None] | None = None,
) -> jax.Array:
    """`acc + a @ b`, waiting for the result; `after_issue` runs while the tensor cores work.

    With `a` in registers no other wgmma may be in flight when this one starts to read them: ptxas
    would serialise the kernel (C7513).
    """
    if interpret:
        (product,), _ = _in_flight(lambda: [_plain(a, b)], after_issue)
        return acc + product

    def issue(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        if after_issue is not None:
            after_issue()

    return pl.run_state(issue)(Accumulator.init(acc))


def _in_flight(
    products: Callable[[], list[jax.Array]], meanwhile: Callable[[], Any] | None
) -> tuple[list[jax.Array], Any]:
    issued = products()
    if meanwhile is None:
        return issued, None
    result = meanwhile()
    read_again = zip(issued, products(), strict=True)
    return [jnp.where(a == b, b, jnp.nan) for a, b in read_again], result


def _plain(a: Operand, b: Operand) -> jax.Array:
    a, b = a[...], b[...]
    if a.dtype.itemsize == 1:  # which XLA does not multiply on every CPU
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
