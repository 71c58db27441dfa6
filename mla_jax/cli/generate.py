"""`mla-jax generate`: continue one prompt."""

import dataclasses
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np

from mla_jax import dispatch, models
from mla_jax.cli import console, text
from mla_jax.config import MLAConfig
from pallas_kernels.formats import FORMATS

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command."""

    checkpoint: Path
    prompt: str | None
    prompt_ids: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    cache_format: str | None
    implementation: tuple[str, ...] | None
    dtype: str | None
    page_size: int
    ignore_eos: bool


def run(request: Request) -> None:
    """Check all that can be checked, load, then print tokens as they come."""
    _check(request)
    tokenizer = None
    with console.input_errors():
        config = MLAConfig.from_pretrained(request.checkpoint)
        if request.prompt is not None:
            tokenizer = text.load_tokenizer(request.checkpoint)
            prompt = text.encode(tokenizer, request.checkpoint, request.prompt)
        else:
            prompt = _parse_ids(request.prompt_ids or "")
        end_ids = set() if request.ignore_eos else _end_ids(request.checkpoint, config)
    _check_prompt(prompt, config, request)

    with console.input_errors(), console.loading(str(request.checkpoint)) as progress:
        model = models.load(request.checkpoint, dtype=request.dtype, progress=progress)
    with console.input_errors():
        tokens = models.stream(
            model,
            [prompt],
            max_new_tokens=request.max_new_tokens,
            cache_format=request.cache_format,
            page_size=request.page_size,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            implementation=request.implementation,
        )

    write = _write_ids() if tokenizer is None else _write_text(text.TextStream(tokenizer, prompt))
    next(write)
    count, first, last = 0, 0.0, 0.0
    with console.working("compiling the model, then taking in the prompt") as stop:
        for token in (int(np.asarray(row)[0]) for row in tokens):
            stop()
            last = time.perf_counter()
            first = first or last
            if token in end_ids:
                break
            write.send(token)
            count += 1
    write.close()
    rate = f", {(count - 1) / (last - first):.1f} tokens/s" if count > 1 and last > first else ""
    console.note(f"{count} tokens{rate}")


def _check(request: Request) -> None:
    """Refuse options that cannot be meant, before anything is read."""
    if (request.prompt is None) == (request.prompt_ids is None):
        console.fail("give either --prompt or --prompt-ids")
    if not 0 < request.top_p <= 1:
        console.fail(f"--top-p is {request.top_p}: must be above 0 and at most 1")
    for option, value, known in (
        ("--cache-format", request.cache_format, FORMATS),
        ("--dtype", request.dtype, DTYPES),
    ):
        if value is not None and value not in known:
            console.fail(f"{option} is {value!r}: must be one of {', '.join(known)}")
    if not request.checkpoint.is_dir():
        console.fail(f"--checkpoint: no directory {str(request.checkpoint)!r}")
    check_implementations(request.implementation)


def check_implementations(names: tuple[str, ...] | None) -> None:
    """Refuse names of which none is available here, with the reason of each."""
    if names is None:
        return
    answers = {answer.name: answer for answer in dispatch.explain("mla_decode")}
    if not any(answers[name].available for name in names):
        reasons = "; ".join(f"{name}: {answers[name].reason}" for name in names)
        console.fail(f"--implementation: {reasons}")


def _check_prompt(prompt: list[int], config: MLAConfig, request: Request) -> None:
    if not prompt:
        console.fail("the prompt is empty: must hold at least one token")
    wrong = [i for i in prompt if not 0 <= i < config.vocab_size]
    if wrong:
        console.fail(f"token id {wrong[0]}: must be from 0 to {config.vocab_size - 1}")
    total = len(prompt) + request.max_new_tokens
    if total > config.max_positions:
        console.fail(
            f"{len(prompt)} prompt tokens and --max-new-tokens {request.max_new_tokens} make "
            f"{total}: the model takes at most {config.max_positions}"
        )


def _parse_ids(ids: str) -> list[int]:
    try:
        return [int(part) for part in ids.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt-ids is {ids!r}: must be whole numbers, such as 1,2,3") from None


def _end_ids(checkpoint: Path, config: MLAConfig) -> set[int]:
    """The ids that end a text: generation_config.json's, else config.json's."""
    file = checkpoint / "generation_config.json"
    ids = None
    if file.is_file():
        ids = text.read_json(file).get("eos_token_id")
    if ids is None:
        ids = config.eos_id
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}


def _write_text(stream: text.TextStream) -> Generator[None, int, None]:
    """Takes ids, prints the text they complete; ends the line when closed."""
    try:
        while True:
            print(stream.push((yield)), end="", flush=True)
    finally:
        print(stream.finish(), flush=True)


def _write_ids() -> Generator[None, int, None]:
    """Takes ids, prints them with commas between; ends the line when closed."""
    separator = ""
    try:
        while True:
            print(f"{separator}{(yield)}", end="", flush=True)
            separator = ","
    finally:
        print(flush=True)
