"""`python -m bench.append`: writing a step's tokens to the cache on a Hopper GPU.

`append` takes finished latents and rope keys, `norm_rope_append` what the kv_a projection gives.
Each is compared with the reference first, then timed, in a cache that is written in place.
bench/README.md has the protocol.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from bench import inputs, measure, options, records
from bench.progress import progress
from mla_jax import LatentCache, dispatch, init_cache
from mla_jax.cache import read
from mla_jax.cli import console
from pallas_kernels.formats import FORMATS

OPS = ("append", "norm_rope_append")
TOKENS = (1, 16, 128)
PAGES = 4096
IMPLEMENTATIONS = ("mosaic", "xla")

Tokens = dict[str, jax.Array]


def make(op: str, format: str, tokens: int) -> tuple[LatentCache, Tokens]:
    """An empty cache, and N(0,1) for tokens that go to slots all over it."""
    cache = init_cache(PAGES, page_size=inputs.PAGE_SIZE, format=format)
    rng = np.random.default_rng(0)
    dtype = "float16" if format == "f16" else "bfloat16"
    normal = lambda channels: jnp.asarray(rng.standard_normal((tokens, channels)), dtype)
    slots = jnp.asarray(rng.permutation(cache.num_slots)[:tokens], jnp.int32)
    c, r = cache.kv_lora_rank, cache.rope_dim
    if op == "append":
        return cache, {"latent": normal(c), "rope": normal(r), "slots": slots}
    angle = rng.uniform(0, 2 * np.pi, (tokens, r // 2))
    return cache, {
        "kv_a": normal(c + r),
        "slots": slots,
        "norm_weight": jnp.ones(c, dtype),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
    }


def make_step(op: str, implementation: str) -> Callable[[LatentCache, Tokens], LatentCache]:
    """The op as a program that is given the cache for good."""
    static = {}
    if op == "norm_rope_append":
        static = {"norm_eps": 1e-6, "rope_pairs": "interleaved", "rope_order": "halves"}

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=measure.NO_GRAPHS)
    def step(cache: LatentCache, tokens: Tokens) -> LatentCache:
        arrays = dict(tokens)
        positional = [arrays.pop(x) for x in ("latent", "rope", "kv_a", "slots") if x in arrays]
        return dispatch.call(op, implementation, cache, *positional, **arrays, **static)

    return step


def max_error(op: str, format: str, tokens: int, step: Callable) -> tuple[float, str]:
    """How far from the reference the tokens are that the cache then holds, and what is wrong."""
    stored = []
    for write in (step, make_step(op, "xla")):
        cache, arrays = make(op, format, tokens)
        latent, rope = read(write(cache, arrays), arrays["slots"])
        stored.append(jnp.concatenate([latent, rope], axis=1).astype(jnp.float32))
    found, wanted = stored
    error = jnp.abs(found - wanted)
    # After norm and rotation a last bit may differ, and then a step of the format.
    allowed = 0.0 if op == "append" else jnp.abs(wanted) / 8 + 1e-3
    bad = int(jnp.sum(~(error <= allowed)))
    worst = float(jnp.max(error))
    return worst, f"{bad} channels are off, by up to {worst:.3g}" if bad else ""


def measure_row(
    op: str, format: str, tokens: int, implementation: str, *, iterations: int, calls: int
) -> records.Row | str:
    """Check and time one implementation; or what is wrong with its result.

    Raises:
        NotImplementedError: it cannot serve the call.
    """
    step = make_step(op, implementation)
    worst, fault = max_error(op, format, tokens, step)
    if fault:
        return fault
    cache, arrays = make(op, format, tokens)

    def call() -> LatentCache:
        nonlocal cache
        cache = step(cache, arrays)
        return cache

    cold = measure.kernel_times(call, iterations=iterations)
    warm = measure.kernel_times(call, iterations=iterations, cold=False)
    host = measure.end_to_end(call, iterations=calls)
    return {
        "op": op,
        "format": format,
        "b": tokens,
        "s_k": None,
        "h": None,
        "s_q": None,
        "topk": None,
        "us": round(cold.total.median, 2),
        "us_end_to_end": round(host.median, 1),
        "implementation": implementation,
        "max_err": float(f"{worst:.3g}"),
        "date": records.today(),
        "us_quartiles": [round(cold.total.low, 2), round(cold.total.high, 2)],
        "us_warm": round(warm.total.median, 2),
        "us_end_to_end_quartiles": [round(host.low, 1), round(host.high, 1)],
        "kernels": {name: round(us, 2) for name, us in cold.kernels.items()},
        "source": records.source_digest(),
    }


COLUMNS: tuple[console.Column, ...] = (
    ("op", "left"),
    ("format", "left"),
    ("tokens", "right"),
    ("implementation", "left"),
    ("us", "right"),
    ("us warm", "right"),
    ("us end to end", "right"),
    ("kernels", "right"),
    ("max err", "right"),
)


def cells(row: records.Row) -> tuple[str, ...]:
    """The cells of a row of `COLUMNS`."""
    return (
        row["op"],
        row["format"],
        str(row["b"]),
        row["implementation"],
        f"{row['us']:.2f}",
        f"{row['us_warm']:.2f}",
        f"{row['us_end_to_end']:.1f}",
        str(len(row["kernels"])),
        f"{row['max_err']:.1e}",
    )


def run(
    tokens: Sequence[int],
    *,
    formats: Sequence[str],
    implementations: Sequence[str],
    iterations: int,
    calls: int,
    output: Path | None,
) -> int:
    """Measure everything, print the table; the exit code."""
    measure.require_gpu()
    about: dict[str, Any] = measure.about()
    output = options.results_file(output, about["device"])
    jobs = [(o, f, t, i) for o in OPS for f in formats for t in tokens for i in implementations]
    rows, wrong = [], False
    with progress(len(jobs)) as begin:
        for job in jobs:
            name = " ".join(map(str, job))
            say = begin(name)
            try:
                row = measure_row(*job, iterations=iterations, calls=calls)
            except NotImplementedError as refusal:
                console.note(f"{name}: left out: {refusal}")
                continue
            if isinstance(row, str):
                wrong = True
                console.note(f"{name}: wrong result, not timed: {row}")
                continue
            rows.append(row)
            records.add(output, about, [row])
            say(f"{row['us']:.2f} us", done=True)
    if rows:
        console.table(COLUMNS, [cells(row) for row in rows])
        console.say(f"{about['device']}, driver {about['driver']}, JAX {about['jax']}: {output}")
    return 1 if wrong else 0


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens of a step, 1 and up.")
    ] = ",".join(map(str, TOKENS)),
    formats: Annotated[
        str, typer.Option("--format", metavar="NAME,...", help="Cache formats to measure.")
    ] = ",".join(name for name in FORMATS if name != "f32"),
    implementations: Annotated[
        str, typer.Option("--implementation", metavar="NAME,...", help="What to measure.")
    ] = ",".join(IMPLEMENTATIONS),
    iterations: Annotated[int, typer.Option(min=2, help="Measured calls.")] = 30,
    output: options.Output = None,
) -> None:
    """Check and time writing to the cache on a Hopper GPU."""
    try:
        counts = [n.strip() for n in tokens.split(",")]
        if not all(n.isdecimal() and 0 < int(n) <= PAGES * inputs.PAGE_SIZE for n in counts):
            console.fail(f"--tokens: {tokens!r} must be numbers of 1 and up")
        code = run(
            [*map(int, counts)],
            formats=options.names("--format", formats, tuple(FORMATS)),
            implementations=options.names("--implementation", implementations, IMPLEMENTATIONS),
            iterations=iterations,
            calls=200,
            output=output,
        )
    except console.UserError as error:
        console.note(f"error: {error}")
        code = 2
    raise typer.Exit(code)


if __name__ == "__main__":
    sys.exit(app())
