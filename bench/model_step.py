"""`python -m bench.model_step`: a decode step of a whole model, and attention's share of it.

The model has the sizes of DeepSeek-V2-Lite and random weights. Attention's share is the difference
to the same step with attention left out: every layer then goes on with its absorbed queries in the
place of attention's output, and everything else (projections, cache writes, experts) stays. So the
plan counts as attention where an implementation needs one. This asks the same of every
implementation, whatever its kernels are called or fused with.
"""

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from flax import nnx

from bench import measure, options, records
from bench.progress import Say, progress, watchdog
from mla_jax import LatentCache, models
from mla_jax.cli import console
from mla_jax.config import MLAConfig, MoEConfig, YarnConfig

PAGE_SIZE = 64
WITHOUT = "without attention"
IMPLEMENTATIONS = ("xla", "mosaic", "mosaic_transposed")
LIMIT_S = 300.0
"""Longest time for one implementation."""

V2_LITE = MLAConfig(
    model_type="deepseek_v2",
    vocab_size=102400,
    d_model=2048,
    num_layers=27,
    num_heads=16,
    d_latent=512,
    d_nope=128,
    d_rope=64,
    d_v=128,
    d_ff=10944,
    max_positions=163840,
    yarn=YarnConfig(factor=40.0, original_max_positions=4096, mscale=0.707, mscale_all_dim=0.707),
    moe=MoEConfig(
        num_experts=64,
        num_experts_per_token=6,
        num_shared_experts=2,
        d_expert=1408,
        scoring="softmax",
        first_layer=1,
    ),
    dtype="bfloat16",
)

Step = Callable[..., tuple[jax.Array, Any]]


class StepTimes(NamedTuple):
    """Microseconds of one step."""

    kernels: float
    """All kernels, by CUPTI."""
    host: measure.Spread
    """By the host's clock, steps in a row, each taking in the token of the one before."""
    longest: dict[str, float]
    """The kernels that take longest, all launches of a step together."""


class State(NamedTuple):
    """What a step takes, apart from the caches, which it is given to write in place."""

    params: list[jax.Array]
    block_table: jax.Array
    seq_lens: jax.Array


def make_step(
    config: MLAConfig, implementation: str, compiler_options: dict[str, str] | None = None
) -> Step:
    """The jitted step `(params, caches, tokens, block_table, seq_lens) -> (tokens, caches)`."""
    options = {}
    if implementation == WITHOUT:
        options["decode_fn"] = lambda q_latent, *args, **kwargs: q_latent
        implementation = "xla"
    build = lambda: models.DeepseekModel(config, rngs=nnx.Rngs(0), **options)
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    treedef = jax.tree.structure(abstract)

    @functools.partial(jax.jit, donate_argnames="caches", compiler_options=compiler_options)
    def step(params, caches, tokens, block_table, seq_lens):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        logits, caches = model.decode(
            tokens[:, None], caches, block_table, seq_lens, implementation=implementation
        )
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), caches

    return step


def make_state(config: MLAConfig, *, batch: int, context: int) -> State:
    """Random weights; every sequence has `context` tokens once the step's own is written."""
    params = jax.tree.leaves(nnx.state(models.init(config)))
    max_pages = -(-context // PAGE_SIZE)
    pages = jax.random.permutation(jax.random.key(1), batch * max_pages)
    return State(
        params,
        pages.reshape(batch, max_pages).astype(jnp.int32),
        jnp.full(batch, context, jnp.int32),
    )


def make_caches(config: MLAConfig, *, batch: int, context: int) -> tuple[LatentCache, ...]:
    """Caches of N(0,1), one per layer."""
    num_pages = batch * -(-context // PAGE_SIZE)

    @jax.jit
    def make(key):
        fill = lambda key, d: jax.random.normal(key, (num_pages, PAGE_SIZE, d), config.dtype)
        latent_key, rope_key = jax.random.split(key)
        return fill(latent_key, config.d_latent), fill(rope_key, config.d_rope)

    keys = jax.random.split(jax.random.key(2), config.num_layers)
    return tuple(
        LatentCache(latent=latent, rope=rope, scale=None, format="bf16")
        for latent, rope in map(make, keys)
    )


def time_step(
    step: Step, traceable: Step, state: State, caches: Any, *, steps: int
) -> tuple[StepTimes, Any]:
    """Time `step`, and the kernels of `traceable`, the same step as the profiler needs it.

    Returns the caches too, for they are donated.
    """
    tokens = jnp.zeros(state.seq_lens.shape, jnp.int32)
    carry = [tokens, caches]

    def run(count: int, step: Step = step) -> jax.Array:
        for _ in range(count):
            tokens, caches = step(
                state.params, carry[1], carry[0], state.block_table, state.seq_lens
            )
            carry[:] = [tokens, caches]
        return carry[0]

    jax.block_until_ready(run(3))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(steps))
        rounds.append(1e6 * (time.perf_counter() - start) / steps)
    kernels: dict[str, float] = {}
    jax.block_until_ready(run(1, traceable))
    for name, us in measure.trace(lambda: run(steps, traceable)):
        kernels[name] = kernels.get(name, 0.0) + us / steps
    longest = sorted(kernels, key=lambda name: -kernels[name])[:8]
    times = StepTimes(
        sum(kernels.values()),
        measure.Spread.of(rounds),
        {name: round(kernels[name], 1) for name in longest},
    )
    return times, carry[1]


def row(config: MLAConfig, state: State, name: str, whole: StepTimes, rest: StepTimes) -> dict:
    """The row of one implementation in the results."""
    attention = whole.kernels - rest.kernels
    return {
        "op": "model_step",
        "format": "bf16",
        "b": state.seq_lens.shape[0],
        "s_k": int(state.seq_lens[0]),
        "h": config.num_heads,
        "s_q": 1,
        "topk": None,
        "us": round(whole.kernels, 1),
        "us_end_to_end": round(whole.host.median, 1),
        "us_end_to_end_quartiles": [round(whole.host.low, 1), round(whole.host.high, 1)],
        "attention_us": round(attention, 1),
        "attention_share": round(attention / whole.kernels, 4),
        "us_without_attention": round(rest.kernels, 1),
        "us_end_to_end_without_attention": round(rest.host.median, 1),
        "implementation": name,
        "model": f"{config.num_layers} layers, d_model {config.d_model}, random weights",
        "kernels": whole.longest,
        "date": records.today(),
        "source": records.source_digest(),
    }


COLUMNS: tuple[console.Column, ...] = (
    ("implementation", "left"),
    ("us end to end", "right"),
    ("spread", "right"),
    ("tokens/s", "right"),
    ("us kernels", "right"),
    ("us attention", "right"),
    ("share", "right"),
    ("us attention, layer", "right"),
)


def show(config: MLAConfig, rows: Sequence[dict]) -> None:
    """Print the table and what its columns are."""
    lines = []
    for r in rows:
        low, high = r["us_end_to_end_quartiles"]
        lines.append(
            (
                r["implementation"],
                f"{r['us_end_to_end']:.0f}",
                f"{100 * (high - low) / r['us_end_to_end']:.1f} %",
                f"{1e6 * r['b'] / r['us_end_to_end']:.0f}",
                f"{r['us']:.0f}",
                f"{r['attention_us']:.0f}",
                f"{100 * r['attention_share']:.1f} %",
                f"{r['attention_us'] / config.num_layers:.1f}",
            )
        )
    console.table(COLUMNS, lines)
    console.say()
    first = rows[0]
    console.say(
        f"{first['model']}; {first['b']} sequences of {first['s_k']} tokens. us end to end: host "
        "clock, steps in a row. us kernels: CUPTI time of all kernels of a step. us attention: "
        f"that less the same with attention left out, {first['us_without_attention']:.0f} us "
        f"({first['us_end_to_end_without_attention']:.0f} end to end)."
    )


def run(
    config: MLAConfig,
    *,
    batch: int,
    context: int,
    implementations: Sequence[str],
    steps: int,
    output: Path | None,
) -> None:
    """Measure, print and record."""
    about = measure.about()
    output = options.results_file(output, about["device"])
    rows, first_tokens = [], {}
    with progress(len(implementations) + 2) as begin:
        say: Say = begin("making the model")
        state = make_state(config, batch=batch, context=context)
        caches = make_caches(config, batch=batch, context=context)
        say(f"{sum(x.nbytes for x in jax.tree.leaves((state, caches))) / 2**30:.1f} GiB", done=True)
        rest = None
        for name in (WITHOUT, *implementations):
            say = begin(name)
            step = make_step(config, name)
            tokens = jnp.zeros(batch, jnp.int32)
            args = (state.block_table, state.seq_lens)
            traceable = make_step(config, name, measure.NO_GRAPHS)
            with watchdog(name, LIMIT_S):
                first_tokens[name], caches = step(state.params, caches, tokens, *args)
                times, caches = time_step(step, traceable, state, caches, steps=steps)
            say(f"{times.host.median:.0f} us a step, {times.kernels:.0f} us of kernels", done=True)
            if rest is None:
                rest = times
                continue
            rows.append(row(config, state, name, times, rest))
            records.add(output, about, rows[-1:])
            del step, traceable
            gc.collect()
    show(config, rows)
    same = statistics.mean(
        float((first_tokens[name] == first_tokens[implementations[0]]).mean())
        for name in implementations
    )
    if len(implementations) > 1:
        console.say(
            f"The first step chooses the same token in {100 * same:.0f} % of the sequences."
        )
    console.say(f"{about['device']}, driver {about['driver']}, JAX {about['jax']}: {output}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences.")] = 64,
    context: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of each.")] = 8192,
    implementations: Annotated[
        str, typer.Option("--implementation", metavar="NAME,...", help="What to measure.")
    ] = "xla,mosaic_transposed",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps in a row.")] = 20,
    output: options.Output = None,
) -> None:
    """Time a decode step of a model of DeepSeek-V2-Lite's sizes on a Hopper GPU."""
    try:
        names = options.names("--implementation", implementations, IMPLEMENTATIONS)
        measure.require_gpu()
        run(
            V2_LITE,
            batch=batch,
            context=context,
            implementations=names,
            steps=steps,
            output=output,
        )
    except console.UserError as error:
        console.note(f"error: {error}")
        raise typer.Exit(2) from None


if __name__ == "__main__":
    sys.exit(app())
