"""`python -m bench.p_terms`: what a second e4m3 term of the probabilities costs and brings.

`p_terms` is a field of the e4m3 kernel's config, which the public function leaves at 1. So this
launches the attention kernel by itself, on shapes of which no sequence is split.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from bench import inputs, measure, options, records
from bench.progress import progress
from bench.shapes import Shape
from mla_jax.cli import console
from pallas_kernels import decode
from pallas_kernels.decode_e4m3.config import Config
from pallas_kernels.formats import E4M3_FORMATS
from pallas_kernels.hopper.plan import divide

ROWS = "128x4096x128,128x4096x64,128x4096x16"
TERMS = (1, 2)


def config_of(shape: Shape, format: str, p_terms: int) -> Config:
    """The variant of the kernel for queries in bfloat16."""
    return Config(
        cache_format=format,
        dtype="bfloat16",
        d_latent=inputs.D_LATENT,
        d_rope=inputs.D_ROPE,
        page_size=inputs.PAGE_SIZE,
        num_heads=shape.h,
        q_len=shape.s_q,
        causal=True,
        has_sink=False,
        scale=inputs.SCALE,
        p_terms=p_terms,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(config: Config, interpret: Any, args: inputs.Inputs, parts: jax.Array) -> jax.Array:
    """The attention kernel alone; the rows of sequences that are not split."""
    out, *_ = decode.launch(config, *args, parts, interpret=interpret)
    return out[:, : config.query_rows].reshape(args.q_latent.shape)


def measure_row(
    shape: Shape, format: str, p_terms: int, *, iterations: int, interpret: Any = None
) -> records.Row:
    """Error and time of one variant.

    Raises:
        console.UserError: the plan splits sequences of this shape, or the result is off.
    """
    config = config_of(shape, format, p_terms)
    args = inputs.make(shape, format)
    parts = divide(args.seq_lens, rows=config.rows, row_tile=config.row_tile)
    if bool((parts[:, 1] > 0).any()):
        console.fail(f"{shape}: sequences would be split, and their parts not put together")
    call = lambda: attend(config, interpret, args, parts)
    checked = inputs.contract_inputs(args)
    chosen, some = inputs.some_sequences(checked)
    found = attend(config, interpret, checked, parts)[chosen]
    comparison = inputs.compare(found, inputs.expected(*some), format)
    if fault := comparison.fault(found.dtype.name, format):
        console.fail(f"{shape} {format}, p_terms={p_terms}: {fault}")
    times = measure.kernel_times(call, iterations=iterations)
    return {
        "op": "decode_attention",
        "format": format,
        **dataclasses.asdict(shape),
        "topk": None,
        "us": round(times.total.median, 2),
        "us_quartiles": [round(times.total.low, 2), round(times.total.high, 2)],
        "implementation": f"mosaic, p_terms={p_terms}",
        "max_err": float(f"{comparison.max_err:.3g}"),
        "cos_err": float(f"{comparison.cos:.3g}"),
        "date": records.today(),
        "source": records.source_digest(),
    }


def run(
    shapes: Sequence[Shape], formats: Sequence[str], *, iterations: int, output: Path | None
) -> None:
    """Measure everything, print the table and record it."""
    measure.require_gpu()
    about = measure.about()
    output = options.results_file(output, about["device"])
    jobs = [(s, f, n) for f in formats for s in shapes for n in TERMS]
    rows = []
    with progress(len(jobs)) as begin:
        for shape, format, p_terms in jobs:
            say = begin(f"{shape} {format}, p_terms={p_terms}")
            row = measure_row(shape, format, p_terms, iterations=iterations)
            rows.append(row)
            records.add(output, about, [row])
            say(f"{row['us']:.1f} us", done=True)
    columns: tuple[console.Column, ...] = (
        ("shape (b x s_k x h x s_q)", "left"),
        ("format", "left"),
        ("kernel", "left"),
        ("us", "right"),
        ("cos err", "right"),
    )
    names = ("b", "s_k", "h", "s_q")
    console.table(
        columns,
        [
            (
                "x".join(str(row[name]) for name in names),
                row["format"],
                row["implementation"],
                f"{row['us']:.1f}",
                f"{row['cos_err']:.1e}",
            )
            for row in rows
        ],
    )
    console.say()
    console.say(
        "us: the attention kernel alone, L2 cleared before each call. cos err: of its output and "
        "attention in float32 over what the cache holds."
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    rows: Annotated[
        str, typer.Option(metavar="BxS_KxH[xS_Q],...", help="Measure these shapes.")
    ] = ROWS,
    formats: Annotated[
        str, typer.Option("--format", metavar="NAME,...", help="Cache formats to measure.")
    ] = ",".join(E4M3_FORMATS),
    iterations: Annotated[int, typer.Option(min=1, help="Measured calls.")] = 30,
    output: options.Output = None,
) -> None:
    """Time the e4m3 kernel with one and with two terms of the probabilities on a Hopper GPU."""
    try:
        chosen = options.names("--format", formats, E4M3_FORMATS)
        run(options.shapes(rows), chosen, iterations=iterations, output=output)
    except console.UserError as error:
        console.note(f"error: {error}")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    sys.exit(app())
