"""`python -m bench.accuracy`: what each cache format costs in accuracy, by context length.

The error of a decode step from a cache of each format, against float64 attention over the values
before they were rounded for the cache. docs/accuracy.md says what the inputs are and what came out.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from bench import records
from bench.inputs import D_LATENT, D_ROPE, PAGE_SIZE, SCALE
from bench.progress import progress
from mla_jax import LatentCache, append, dispatch, init_cache, mla_decode
from mla_jax.cli import console

HEADS = 16
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
FORMATS = ("bf16", "f16", "fp8_ds_mla", "fp8_token", "fp8_full")
SCORE_STD = 2.0
"""Standard deviation, over the keys, of scores after scaling: half of it from each part."""
NEEDLE_SCORE = 14.0
"""About what all 131072 other keys weigh together: log(131072) + SCORE_STD**2 / 2 is 13.8."""
NEEDLE_SLOTS = 200 + 37 * np.arange(HEADS)

IDENTITY = ("op", "inputs", "context", "format", "implementation")
STYLES = {"xla": "-", "mosaic": "--", "mosaic_transposed": ":"}
"""Lines of the implementations in the picture."""


class Case(NamedTuple):
    """Queries of one step and the tokens that they see; float32, queries bfloat16 values."""

    q_latent: np.ndarray
    q_rope: np.ndarray
    latent: np.ndarray
    rope: np.ndarray


def normal(rng: np.random.Generator, tokens: int) -> Case:
    """N(0,1) everywhere."""
    return _with_queries(rng, _normal(rng, tokens, D_LATENT), _normal(rng, tokens, D_ROPE))


def realistic(rng: np.random.Generator, tokens: int) -> Case:
    """Latents within 10 with outlier channels; rope keys to 1e3, with a mean of their own."""
    spread = np.exp(0.5 * rng.standard_normal(D_LATENT))
    spread[rng.choice(D_LATENT, 8, replace=False)] *= 5
    latent = np.clip(_normal(rng, tokens, D_LATENT) * spread, -10, 10)
    spread = np.exp(rng.uniform(0, np.log(200), D_ROPE))
    mean = 2 * spread * rng.choice((-1, 1), D_ROPE)
    rope = np.clip(_normal(rng, tokens, D_ROPE) * spread + mean, -1000, 1000)
    return _with_queries(rng, latent.astype(np.float32), rope.astype(np.float32))


def needle(rng: np.random.Generator, tokens: int) -> Case:
    """The realistic keys, and for each head one that outweighs, or nearly, all others together."""
    case = realistic(rng, tokens)
    latent, rope = case.latent.copy(), case.rope.copy()
    for head, slot in enumerate(NEEDLE_SLOTS):
        for q, keys in ((case.q_latent, latent), (case.q_rope, rope)):
            mean = keys.mean(0)
            lift = (q[head] ** 2).sum() * SCALE
            keys[slot] = mean + q[head] * (NEEDLE_SCORE / 2 / lift)
    return case._replace(latent=latent, rope=rope)


INPUTS: dict[str, Callable[[np.random.Generator, int], Case]] = {
    "normal": normal,
    "realistic": realistic,
    "needle": needle,
}


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _with_queries(rng: np.random.Generator, latent: np.ndarray, rope: np.ndarray) -> Case:
    def queries(keys):
        q = _normal(rng, HEADS, keys.shape[1]) / keys.std(0)
        std = (keys[:4096] @ q.T * SCALE).std(0)
        q *= (SCORE_STD / np.sqrt(2) / std)[:, None]
        return np.asarray(jnp.asarray(q, jnp.bfloat16), np.float32)

    return Case(queries(latent), queries(rope), latent, rope)


def reference(case: Case, context: int) -> tuple[np.ndarray, np.ndarray]:
    """`(out, lse)` of the first `context` tokens, in float64."""
    latent = case.latent[:context].astype(np.float64)
    scores = case.q_latent.astype(np.float64) @ latent.T
    scores += case.q_rope.astype(np.float64) @ case.rope[:context].T.astype(np.float64)
    scores *= SCALE
    top = scores.max(1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(1, keepdims=True)
    return p @ latent / total, (top + np.log(total))[:, 0]


def fill(case: Case, format: str) -> LatentCache:
    """The tokens in a cache, in order."""
    tokens = len(case.latent)
    cache = init_cache(tokens // PAGE_SIZE, page_size=PAGE_SIZE, format=format)
    return jax.jit(append, donate_argnums=0)(
        cache, jnp.asarray(case.latent), jnp.asarray(case.rope), jnp.arange(tokens)
    )


@functools.partial(jax.jit, static_argnames="implementation")
def _decode(q_latent, q_rope, cache, table, seq_lens, implementation):
    return mla_decode(
        q_latent,
        q_rope,
        cache,
        table,
        seq_lens,
        scale=SCALE,
        return_lse=True,
        implementation=implementation,
    )


def errors(case: Case, cache: LatentCache, context: int, implementation: str) -> dict[str, float]:
    """How far the step over the first `context` tokens is from the reference."""
    dtype = cache.latent.dtype if cache.scale is None else jnp.bfloat16
    q = (jnp.asarray(x, dtype)[None, None] for x in (case.q_latent, case.q_rope))
    table = jnp.arange(cache.num_pages, dtype=jnp.int32)[None]
    lens = jnp.array([context], jnp.int32)
    found, lse = _decode(*q, cache, table, lens, implementation)
    found, lse = np.asarray(found, np.float64)[0, 0], np.asarray(lse, np.float64)[0, :, 0]
    wanted, wanted_lse = reference(case, context)
    square = lambda x: (x**2).sum()
    return {
        "rms_err": float(np.sqrt(square(found - wanted) / square(wanted))),
        "cos_err": float(square(found - wanted) / (square(found) + square(wanted))),
        "lse_err": float(np.abs(lse - wanted_lse).max()),
    }


def run(implementations: Sequence[str], contexts: Sequence[int], output: Path) -> None:
    """Measure every format on every input, print and record."""
    jobs = [(name, format) for name in INPUTS for format in FORMATS]
    rows: list[records.Row] = []
    device = jax.devices()[0].device_kind
    about = {"heads": HEADS, "score_std": SCORE_STD}
    with progress(len(jobs)) as step:
        for name, format in jobs:
            say = step(f"{name} {format}")
            case = _case(name, max(contexts))
            cache = fill(case, format)
            for implementation in implementations:
                for context in contexts:
                    try:
                        found = errors(case, cache, context, implementation)
                    except NotImplementedError as refusal:
                        say(f"{implementation}: left out: {refusal}", done=True)
                        break
                    rows.append(
                        {
                            "op": "accuracy",
                            "inputs": name,
                            "context": context,
                            "format": format,
                            "implementation": implementation,
                            **{key: float(f"{value:.3g}") for key, value in found.items()},
                            "device": device,
                            "date": records.today(),
                            "source": records.source_digest(),
                        }
                    )
            records.add(output, about, rows, identity=IDENTITY)
    show(rows)


@functools.lru_cache(maxsize=1)
def _case(name: str, tokens: int) -> Case:
    return INPUTS[name](np.random.default_rng(0), tokens)


def show(rows: Sequence[records.Row]) -> None:
    """Print the relative rms errors, a line for each input and format."""
    contexts = sorted({row["context"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        key = row["inputs"], row["format"], row["implementation"]
        lines.setdefault(key, {})[row["context"]] = row["rms_err"]
    columns: tuple[console.Column, ...] = (
        ("inputs", "left"),
        ("format", "left"),
        ("implementation", "left"),
        *((f"{context} tokens", "right") for context in contexts),
    )
    cell = lambda value: "" if value is None else f"{value:.1e}"
    console.table(
        columns, [(*key, *(cell(line.get(c)) for c in contexts)) for key, line in lines.items()]
    )
    console.say()
    console.say("Relative rms error of the output against float64 over the values before rounding.")


def plot(results: dict[str, Any], file: Path) -> None:
    """Error against context length, a panel for each input, a line for each format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(INPUTS), figsize=(12, 3.6), sharey=True)
    drawn = [name for name in STYLES if any(r["implementation"] == name for r in results["rows"])]
    colours = {format: f"C{index}" for index, format in enumerate(FORMATS)}
    for panel, name in zip(panels, INPUTS, strict=True):
        for format, implementation in itertools.product(FORMATS, drawn):
            points = sorted(
                (row["context"], row["rms_err"])
                for row in results["rows"]
                if (row["inputs"], row["format"], row["implementation"])
                == (name, format, implementation)
            )
            if points:
                line = {"color": colours[format], "marker": "."}
                panel.loglog(*zip(*points, strict=True), STYLES[implementation], **line)
        panel.set_title(name)
        panel.set_xlabel("tokens in the context")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("relative rms error")
    for format, colour in colours.items():
        panels[-1].plot([], [], color=colour, label=format)
    for name in drawn:
        panels[-1].plot([], [], STYLES[name], color="grey", label=name)
    figure.tight_layout()
    figure.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, bbox_inches="tight")
    plt.close(figure)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    implementations: Annotated[
        str, typer.Option("--implementation", metavar="NAME,...", help="What to measure.")
    ] = "xla",
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="N,...", help="Tokens, multiples of the page size.")
    ] = ",".join(map(str, CONTEXTS)),
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Merge the results into this file.")
    ] = records.RESULTS / "accuracy.json",
    picture: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw all results there.", show_default=False),
    ] = None,
) -> None:
    """Measure what each cache format costs in accuracy."""
    try:
        names = [name.strip() for name in implementations.split(",")]
        with console.input_errors():
            dispatch.names(names)
            lengths = [int(context) for context in contexts.split(",")]
            records.read(output)
        low = int(NEEDLE_SLOTS.max()) + 1
        if any(n % PAGE_SIZE or n < low for n in lengths):
            console.fail(f"--contexts: must be multiples of {PAGE_SIZE} from {low} tokens on")
        run(names, lengths, output)
        if picture is not None:
            plot(records.read(output), picture)
    except console.UserError as error:
        console.note(f"error: {error}")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    sys.exit(app())
