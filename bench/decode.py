"""`python -m bench.decode`: dense decode on a Hopper GPU: correctness, then times.

bench/README.md has the protocol.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from bench import baselines, inputs, measure, options, records, report
from bench.progress import progress, watchdog
from bench.shapes import GOALS, SETS, Shape
from mla_jax import mla_decode, plan_decode
from mla_jax.cli import console
from pallas_kernels.formats import FORMATS

OURS = ("mosaic", "mosaic_transposed")
BASELINES = ("xla", baselines.NAME)


class WrongResult(Exception):
    """An implementation fails the check, and is not timed."""


def measure_row(
    shape: Shape,
    format: str,
    implementation: str,
    *,
    iterations: int,
    calls: int,
    memory: bool = True,
    compiled: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> records.Row:
    """Check and time one implementation on one shape, `compiled` if that is done already.

    Raises:
        WrongResult: its output is off.
        NotImplementedError: it cannot serve the shape.
    """
    say("making inputs")
    args = inputs.make(shape, format)
    if implementation == baselines.NAME:
        function, arguments, compare = _expanded(shape, args)
    else:
        function, arguments, compare = _absorbed(shape, args, implementation)
    if compiled is None:
        say("compiling")
        compiled = function.lower(*arguments).compile()
    say("checking")
    comparison, dtype = compare(compiled)
    call = lambda: compiled(*arguments)
    # The expanded form rounds keys and values per head to 16 bits: other limits hold for it.
    fault = comparison.fault(dtype, format) if implementation != baselines.NAME else ""
    if comparison.max_err != comparison.max_err or comparison.cos > 1e-3:
        fault = fault or f"the cosine term is {comparison.cos:.3g}"
    if fault:
        raise WrongResult(fault)
    say("timing")
    # Our two kernels are too few for a graph; compiling them again would take seconds.
    traced = compiled if implementation in OURS else measure.traceable(function)
    traced_call = lambda: traced(*arguments)
    cold = measure.kernel_times(traced_call, iterations=iterations)
    warm = measure.kernel_times(traced_call, iterations=iterations, cold=False)
    us = cold.total.median
    # Of what takes long no more than a second, but ten calls.
    host = measure.end_to_end(call, iterations=min(calls, max(10, int(1e6 / us))))
    return {
        "op": "decode",
        "format": format,
        **dataclasses.asdict(shape),
        "topk": None,
        "us": round(us, 2),
        "us_end_to_end": round(host.median, 1),
        "tflops": round(shape.flops / us / 1e6, 1),
        "gbs": round(shape.bytes_moved(format) / us / 1e3, 1),
        "implementation": implementation,
        "max_err": float(f"{comparison.max_err:.3g}"),
        "date": records.today(),
        "us_quartiles": [round(cold.total.low, 2), round(cold.total.high, 2)],
        "us_warm": round(warm.total.median, 2),
        "us_end_to_end_quartiles": [round(host.low, 1), round(host.high, 1)],
        "cos_err": float(f"{comparison.cos:.3g}"),
        **({"temp_bytes": measure.temp_bytes(compiled)} if memory else {}),
        "kernels": _short({name: round(value, 2) for name, value in cold.kernels.items()}),
        "source": records.source_digest(),
    }


def compile_step(shape: Shape, format: str, implementation: str) -> Any:
    """The step of one of our implementations, compiled.

    Raises:
        NotImplementedError: it cannot serve the shape.
    """
    args = inputs.abstract(shape, format)
    plan = jax.eval_shape(_plan(shape, format), args.seq_lens)
    return _decode(implementation).lower(args, plan).compile()


def _plan(shape: Shape, format: str):
    return jax.jit(
        functools.partial(plan_decode, num_heads=shape.h, q_len=shape.s_q, cache_format=format)
    )


def _decode(implementation: str):
    return jax.jit(
        lambda args, plan: mla_decode(
            *args, scale=inputs.SCALE, plan=plan, implementation=implementation
        )
    )


def _absorbed(shape: Shape, args: inputs.Inputs, implementation: str):
    """The jitted step, its arguments, and what compares what it gives, compiled, with what it
    must."""
    plan = _plan(shape, args.cache.format)(args.seq_lens)

    def compare(compiled):
        checked = inputs.contract_inputs(args)
        found = jax.block_until_ready(compiled(checked, plan))
        chosen, some = inputs.some_sequences(checked)
        wanted = inputs.expected(*some)
        return inputs.compare(found[chosen], wanted, args.cache.format), found.dtype.name

    return _decode(implementation), (args, plan), compare


def _expanded(shape: Shape, args: inputs.Inputs):
    """The same of the baseline."""
    if reason := baselines.why_not(shape):
        raise NotImplementedError(reason)
    w_uk, w_uv = baselines.weights(shape.h)
    q = baselines.queries(shape)
    arguments = (q, *args[2:], w_uk, w_uv)

    def compare(compiled):
        wanted = inputs.expected(*baselines.absorb(q, args, w_uk), causal=False)
        wanted = jnp.einsum("bshc,hdc->bshd", wanted, w_uv.astype(jnp.float32))
        found = compiled(*arguments)
        return inputs.compare(found, wanted), found.dtype.name

    return baselines.attend, arguments, compare


def _short(kernels: dict[str, float], most: int = 12) -> dict[str, float]:
    """The longest kernels, and the rest in one."""
    longest = sorted(kernels, key=lambda name: -kernels[name])[:most]
    rest = sum(us for name, us in kernels.items() if name not in longest)
    return {**{n: kernels[n] for n in longest}, **({"others": round(rest, 2)} if rest else {})}


def run(
    steps: Sequence[tuple[Shape, str]],
    *,
    implementations: Sequence[str],
    iterations: int,
    calls: int,
    memory: bool,
    output: Path | None,
    picture: Path | None = None,
    limit_s: float,
) -> int:
    """Measure all steps, each a shape and a cache format, print the table; the exit code."""
    measure.require_gpu()
    about = {**measure.about(), "protocol": _protocol()}
    output = options.results_file(output, about["device"])
    jobs = [(*step, implementation) for step in steps for implementation in implementations]
    rows, faults = [], []
    ours = [job for job in jobs if job[2] in OURS]
    with progress(len(jobs) + 2) as begin, ThreadPoolExecutor(os.cpu_count()) as pool:
        # All at once, for it takes longer than to measure them; and before, for it would disturb.
        begin(f"compiling {len(ours)} steps")
        compiled = {job: pool.submit(compile_step, *job) for job in ours}
        wait(compiled.values())
        begin("ceilings")
        with watchdog("measuring the ceilings", limit_s):
            ceilings = measure.ceilings()
        about["ceilings"] = {
            "bf16_tflops": round(ceilings.tflops_16, 1),
            "memory_tbs": round(ceilings.tbs, 3),
        }
        for job in jobs:
            shape, format, implementation = job
            name = f"{shape} {format} {implementation}"
            say = begin(name)
            start = time.perf_counter()
            try:
                with watchdog(name, limit_s):
                    row = measure_row(
                        shape,
                        format,
                        implementation,
                        iterations=iterations,
                        calls=calls,
                        memory=memory,
                        compiled=compiled[job].result() if job in compiled else None,
                        say=say,
                    )
            except NotImplementedError as refusal:
                faults.append((False, f"{name}: left out: {refusal}"))
            except WrongResult as wrong:
                faults.append((True, f"{name}: wrong result, not timed: {wrong}"))
            except measure.MeasurementError as error:
                faults.append((True, f"{name}: {error}"))
            except jax.errors.JaxRuntimeError as error:
                # Out of memory is an answer for a baseline and a fault of ours.
                fatal = implementation in OURS
                faults.append((fatal, f"{name}: {str(error).splitlines()[0][:200]}"))
            else:
                rows.append(row)
                records.add(output, about, [row])
                say(f"{row['us']:.1f} us ({time.perf_counter() - start:.1f} s)", done=True)
    if rows:
        report.show(rows, ceilings)
        if len({shape.s_k for shape, _ in steps}) > 2:
            report.show_by_length(rows)
        if picture is not None:
            report.plot_by_length(rows, picture)
        console.say(f"{about['device']}, driver {about['driver']}, JAX {about['jax']}: {output}")
    for _, fault in faults:
        console.note(fault)
    return 1 if any(fatal for fatal, _ in faults) else 0


def _protocol() -> dict[str, Any]:
    return {
        "us": "CUPTI time of all kernels of the op, median; plan excluded",
        "us_warm": "the same, calls back to back",
        "us_end_to_end": "host clock, one call, from Python until its result is there, median",
        "l2": measure.L2_POLICY,
        "inputs": inputs.DISTRIBUTION,
        "page_size": inputs.PAGE_SIZE,
    }


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only rows with a goal, few calls, no baselines."),
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(metavar="BxS_KxH[xS_Q],...", help="Measure these shapes.", show_default=False),
    ] = None,
    chosen: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="NAME",
            help=f"Measure a set of shapes: {', '.join(SETS)}. Default: full; goals with --quick.",
            show_default=False,
        ),
    ] = None,
    implementations: Annotated[
        str,
        typer.Option("--implementation", metavar="NAME,...", help="What to measure."),
    ] = OURS[0],
    formats: Annotated[
        str, typer.Option("--format", metavar="NAME,...", help="Cache formats to measure.")
    ] = "bf16",
    with_baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            help=f"Measure {' and '.join(BASELINES)} too. Default: unless --quick.",
            show_default=False,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Measured calls. Default: 30, or 10.", show_default=False),
    ] = None,
    output: options.Output = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw TFLOPS against context length there.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time for a row.")] = 120,
) -> None:
    """Check and time dense decode on a Hopper GPU."""
    if with_baselines if with_baselines is not None else not quick:
        implementations = ",".join([implementations, *BASELINES])
    try:
        code = run(
            _steps(
                rows,
                chosen or ("goals" if quick else "full"),
                options.names("--format", formats, tuple(FORMATS)),
            ),
            implementations=options.names("--implementation", implementations, (*OURS, *BASELINES)),
            iterations=iterations or (10 if quick else 30),
            calls=50 if quick else 200,
            memory=not quick,
            output=output,
            picture=picture,
            limit_s=limit,
        )
    except console.UserError as error:
        console.note(f"error: {error}")
        code = 2
    raise typer.Exit(code)


def _steps(rows: str | None, chosen: str, formats: Sequence[str]) -> list[tuple[Shape, str]]:
    if rows is not None:
        shapes = options.shapes(rows)
    else:
        (name,) = options.names("--set", chosen, tuple(SETS))
        if name == "goals":
            return [(shape, format) for format in formats for shape in GOALS.get(format, {})]
        shapes = SETS[name]
    return [(shape, format) for shape in shapes for format in formats]


if __name__ == "__main__":
    sys.exit(app())
