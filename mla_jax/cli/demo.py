"""`mla-jax demo`: the cache formats side by side on a small checkpoint."""

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mla_jax
from mla_jax import dispatch, models
from mla_jax.cli import console, generate
from pallas_kernels.formats import FORMATS

_CHECKPOINT = Path("tests", "data", "golden", "v2lite-tiny")
_PROMPT_LENS = (37, 64, 65, 100)
_PAGE_SIZE = 64
_UNQUANTISED = "f32"


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one cache format did."""

    tokens: np.ndarray  # [b, n], generated greedily
    rate: float  # tokens per second of all sequences, compiled already
    logits: np.ndarray  # [b, n, vocab], given the text that the unquantised cache generated
    served: tuple[dispatch.Availability, ...]

    @property
    def implementation(self) -> str:
        return next((answer.name for answer in self.served if answer.available), "none")


def run(
    checkpoint: Path | None, max_new_tokens: int, implementation: tuple[str, ...] | None
) -> None:
    """Generate with every format and print the table."""
    generate.check_implementations(implementation)
    if checkpoint is None:
        checkpoint = Path(mla_jax.__file__).parents[1] / _CHECKPOINT
        if not checkpoint.is_dir():
            console.fail(
                f"there is no {checkpoint}: the demo's checkpoint is in the repository, not in "
                "the installed package; run it in a clone, or name one with --checkpoint"
            )
    elif not checkpoint.is_dir():
        console.fail(f"--checkpoint: no directory {str(checkpoint)!r}")
    with console.input_errors(), console.loading(checkpoint.name) as progress:
        model = models.load(checkpoint, progress=progress)

    config = model.config
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, config.vocab_size, n).tolist() for n in _PROMPT_LENS]
    names = [_UNQUANTISED, *(name for name in FORMATS if name != _UNQUANTISED)]
    runs: dict[str, _Run] = {}
    for i, name in enumerate(names, 1):
        with (
            console.input_errors(),
            console.working(f"[{i}/{len(names)}] {name}: compiling, then generating"),
        ):
            text = runs[_UNQUANTISED].tokens if runs else None
            runs[name] = _run(model, prompts, name, max_new_tokens, implementation, text)

    reference = runs[_UNQUANTISED]
    device = jax.devices()[0]
    console.say(
        f"{checkpoint.name}: {config.num_layers} layers, {config.num_heads} heads, latent "
        f"{config.d_latent} + rope {config.d_rope}, {model.dtype.name}, on {device.device_kind}"
    )
    console.say(
        f"{len(prompts)} prompts of {', '.join(map(str, _PROMPT_LENS))} tokens, "
        f"{max_new_tokens} new tokens each, greedy"
    )
    console.say(f"first new tokens: {' '.join(map(str, reference.tokens[0, :12]))} ...")
    console.say()
    console.table(
        [
            ("cache", "left"),
            ("bytes/token", "right"),
            ("tokens/s", "right"),
            ("same token", "right"),
            ("logit error", "right"),
            ("diverges", "right"),
            ("ran on", "left"),
        ],
        [
            (
                name,
                str(FORMATS[name].bytes_per_token(config.d_latent, config.d_rope)),
                f"{run.rate:.0f}",
                f"{_same_choice(run, reference):.1%}",
                f"{_logit_error(run, reference):.2g}",
                _divergence(run, reference),
                run.implementation,
            )
            for name, run in runs.items()
        ],
    )
    console.say()
    console.say(
        f"bytes/token: of one layer. Standard deviation of the logits: "
        f"{reference.logits.std():.2g}."
    )
    console.say(f"same token, logit error: against {_UNQUANTISED}, both given what it generated.")
    console.say("diverges: the first new token that differs, each going on from its own.")
    for line in _reasons(runs):
        console.say(line)


def _run(
    model: models.DeepseekModel,
    prompts: list[list[int]],
    cache_format: str,
    max_new_tokens: int,
    implementation: tuple[str, ...] | None,
    text: np.ndarray | None,
) -> _Run:
    def tokens() -> np.ndarray:
        ids = models.generate(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            cache_format=cache_format,
            page_size=_PAGE_SIZE,
            implementation=implementation,
        )
        return np.asarray(ids)

    tokens()  # compiles
    start = time.perf_counter()
    generated = tokens()
    seconds = time.perf_counter() - start
    text = generated if text is None else text
    return _Run(
        tokens=generated,
        rate=generated.size / seconds,
        logits=_logits(model, prompts, text, cache_format, implementation),
        served=_served(model, len(prompts), cache_format, implementation),
    )


def _logits(
    model: models.DeepseekModel,
    prompts: list[list[int]],
    text: np.ndarray,
    cache_format: str,
    implementation: tuple[str, ...] | None,
) -> np.ndarray:
    """Logits for each token of `text` after the prompts, fed token by token through the cache.

    The rows end together: a shorter one starts later and is not in use (length 0) before.
    """
    rows = [[*prompt, *new[:-1]] for prompt, new in zip(prompts, text.tolist(), strict=True)]
    steps = max(map(len, rows))
    ids = np.array([[0] * (steps - len(row)) + row for row in rows], np.int32)
    lens = np.array([len(row) for row in rows], np.int32)
    max_pages = -(-steps // _PAGE_SIZE)
    caches = model.init_caches(
        len(rows) * max_pages, page_size=_PAGE_SIZE, cache_format=cache_format
    )
    table = jnp.arange(len(rows) * max_pages).reshape(len(rows), max_pages)
    graphdef, state = nnx.split(model)

    @jax.jit
    def feed(state, ids, lens, caches):
        def step(carry, x):
            i, token = x
            seq_lens = jnp.maximum(lens - (steps - 1 - i), 0)
            logits, caches = nnx.merge(graphdef, state).decode(
                token[:, None], carry, table, seq_lens, implementation=implementation
            )
            return caches, logits[:, 0]

        return jax.lax.scan(step, caches, (jnp.arange(steps), ids.T))[1]

    logits = feed(state, ids, lens, caches)
    return np.asarray(logits[-text.shape[1] :]).swapaxes(0, 1)


def _served(
    model: models.DeepseekModel,
    batch: int,
    cache_format: str,
    implementation: tuple[str, ...] | None,
) -> tuple[dispatch.Availability, ...]:
    """Which implementations can serve the decode step, those asked for first."""
    config = model.config
    queries = lambda channels: jnp.zeros((batch, 1, config.num_heads, channels), model.dtype)
    lens = jnp.ones(batch, jnp.int32)
    answers = dispatch.explain(
        "mla_decode",
        queries(config.d_latent),
        queries(config.d_rope),
        model.init_caches(1, page_size=_PAGE_SIZE, cache_format=cache_format)[0],
        jnp.zeros((batch, 1), jnp.int32),
        lens,
        scale=config.softmax_scale,
        causal=True,
        attn_sink=None,
        plan=mla_jax.plan_decode(
            lens,
            num_heads=config.num_heads,
            page_size=_PAGE_SIZE,
            cache_format=cache_format,
        ),
        return_lse=False,
    )
    wanted = implementation or dispatch.IMPLEMENTATIONS
    return tuple(sorted((a for a in answers if a.name in wanted), key=lambda a: wanted.index(a[0])))


def _same_choice(run: _Run, reference: _Run) -> float:
    return float((run.logits.argmax(-1) == reference.logits.argmax(-1)).mean())


def _logit_error(run: _Run, reference: _Run) -> float:
    """The median over tokens: one token for which an expert is swapped would decide the maximum."""
    return float(np.median(np.abs(run.logits - reference.logits).max(axis=-1)))


def _divergence(run: _Run, reference: _Run) -> str:
    different = (run.tokens != reference.tokens).any(axis=0)
    return str(different.argmax() + 1) if different.any() else "never"


def _reasons(runs: dict[str, _Run]) -> list[str]:
    """Why the other implementations did not run, each reason once with the formats it is about."""
    about: dict[tuple[str, str], list[str]] = {}
    for name, run in runs.items():
        for answer in run.served:
            if not answer.available:
                about.setdefault((answer.name, answer.reason), []).append(name)
    return [
        f"{implementation} did not run"
        f"{'' if len(names) == len(runs) else ' for ' + ', '.join(names)}: {reason}"
        for (implementation, reason), names in about.items()
    ]
