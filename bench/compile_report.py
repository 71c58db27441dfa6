"""`python -m bench.compile_report`: compile the kernels for Hopper, without a GPU, and report.

With `--check` it fails where ptxas serialised wgmma, ignored setmaxnreg, or spilled more than the
kernel's config declares, where shared memory is not what the config says, and where a kernel does
not compile at all.
"""

import concurrent.futures
import multiprocessing
import os
import sys
import time
import traceback
from typing import Annotated, NamedTuple

import typer

from bench import aot, variants
from bench.progress import progress
from mla_jax.cli import console
from pallas_kernels.hopper.limits import SMEM_ALIGN


class Outcome(NamedTuple):
    """What became of one variant."""

    kernels: list[aot.Kernel]
    faults: list[str]
    seconds: float


def compile_variant(variant: variants.Variant) -> Outcome:
    """Compile and judge one variant, in whatever process."""
    start = time.perf_counter()
    try:
        arguments = variant.arguments(aot.array)
        kernels, output = aot.compile_kernels(variant.function(), *arguments)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())[:300]
        fault = f"does not compile: {type(error).__name__}: {message} ({last.name})"
        return Outcome([], [fault], time.perf_counter() - start)
    return Outcome(kernels, judge(variant, kernels, output), time.perf_counter() - start)


def judge(variant: variants.Variant, kernels: list[aot.Kernel], output: str) -> list[str]:
    """What the gate holds against a variant."""
    declared = variant.declared()
    faults = []
    if "Pass pipeline failed" in output or len(kernels) != len(declared):
        said = [line for line in output.splitlines() if "error" in line or "failed" in line]
        faults.append(
            f"{len(kernels)} of {len(declared)} kernels compiled: {' '.join(said)[:300]}".rstrip(
                ": "
            )
        )
        return faults
    for kernel, limit in zip(kernels, declared, strict=True):
        fault = lambda text, name=limit.kernel: faults.append(f"{name}: {text}")
        for warning in kernel.warnings:
            fault(warning)
        if max(kernel.spill_stores, kernel.spill_loads) > limit.spill_bytes:
            fault(
                f"spills {kernel.spill_stores} + {kernel.spill_loads} bytes, "
                f"the config declares {limit.spill_bytes}"
            )
        if kernel.registers > limit.registers:
            fault(f"takes {kernel.registers} registers, the config allows {limit.registers}")
        scratch = max(limit.smem_bytes - SMEM_ALIGN, 0)
        if kernel.smem != scratch:
            fault(f"takes {kernel.smem} bytes of shared memory, the config says {scratch}")
        if kernel.barrier_bytes > SMEM_ALIGN:
            fault(f"barriers take {kernel.barrier_bytes} bytes, the config leaves {SMEM_ALIGN}")
    return faults


COLUMNS: tuple[console.Column, ...] = (
    ("kernel", "left"),
    ("variant", "left"),
    ("registers", "right"),
    ("spill bytes", "right"),
    ("SMEM", "right"),
    ("wgmma", "right"),
    ("s", "right"),
    ("verdict", "left"),
)


def cells(variant: variants.Variant, outcome: Outcome) -> list[tuple[str, ...]]:
    """The lines of a variant in the table, one a kernel."""
    names = [limit.kernel for limit in variant.declared()]
    lines = []
    for i, name in enumerate(names):
        faults = [f for f in outcome.faults if f.startswith(f"{name}: ")]
        seconds = f"{outcome.seconds:.1f}" if i == 0 else ""
        if i >= len(outcome.kernels):
            lines.append((name, str(variant), "", "", "", "", seconds, "not compiled"))
            continue
        kernel = outcome.kernels[i]
        lines.append(
            (
                name,
                str(variant),
                str(kernel.registers),
                f"{kernel.spill_stores} + {kernel.spill_loads}",
                str(kernel.smem + kernel.barrier_bytes),
                str(kernel.wgmma),
                seconds,
                "fault" if faults else "good",
            )
        )
    return lines


def run(chosen: list[variants.Variant], *, jobs: int) -> bool:
    """Compile, print the table and the faults; whether there are none."""
    aot.prepare()
    # Each in a process of its own kind: what the compilers print can be told apart then.
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    outcomes: dict[variants.Variant, Outcome] = {}
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(chosen)), context) as pool:
        futures = {pool.submit(compile_variant, variant): variant for variant in chosen}
        with progress(len(chosen)) as step:
            for future in concurrent.futures.as_completed(futures):
                variant = futures[future]
                try:
                    outcomes[variant] = future.result()
                except concurrent.futures.BrokenExecutor:
                    # It takes the others that were waiting with it.
                    outcomes[variant] = Outcome([], ["the compiler crashed, on it or another"], 0.0)
                step(f"{variant.kernel} {variant}")
    console.table(COLUMNS, [line for v in chosen for line in cells(v, outcomes[v])])
    faults = [f"{v.kernel} {v}: {f}" for v in chosen for f in outcomes[v].faults]
    console.say()
    for fault in faults:
        console.say(fault)
    console.say(
        f"{len(chosen)} variants in {time.perf_counter() - start:.0f} s, {len(faults)} faults; "
        f"{aot.compiler()}"
    )
    return not faults


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if there is a fault.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Compile every variant, not a choice of them.")
    ] = False,
    match: Annotated[
        str, typer.Option(metavar="TEXT", help="Only variants with TEXT in their name.")
    ] = "",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compile so many at a time. Default: 4 or the CPUs.", show_default=False
        ),
    ] = None,
) -> None:
    """Compile the kernels for Hopper on a machine without a GPU, and report on them."""
    if reason := aot.lacking():
        console.note(f"error: {reason}")
        raise typer.Exit(2)
    chosen = variants.every() if everything else variants.few()
    chosen = [v for v in chosen if match in f"{v.kernel} {v}"]
    if not chosen:
        console.note(f"error: --match: no variant has {match!r} in its name")
        raise typer.Exit(2)
    clean = run(chosen, jobs=jobs or min(4, os.cpu_count() or 1))
    raise typer.Exit(0 if clean or not check else 1)


if __name__ == "__main__":
    sys.exit(app())
