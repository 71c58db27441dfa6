"""Token generation through paged latent caches: one compiled step, pages handed out on the way."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mla_jax import dispatch
from mla_jax.checks import check_int, check_scale, check_size
from mla_jax.models.deepseek import Caches, DeepseekModel
from mla_jax.models.pages import PageTable
from mla_jax.ops import Implementation

Prompts = Int[Array, "b t"] | Int[np.ndarray, "b t"] | Sequence[Sequence[int]]

# Prompts shorter than this are padded to it, so that they share one compiled prefill.
_MIN_CHUNK = 16


def generate(
    model: DeepseekModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    cache_format: str | None = None,
    page_size: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    implementation: Implementation = None,
    prefill_chunk: int = 2048,
) -> Int[Array, "b max_new_tokens"]:
    """Continues prompts: `stream`, which see for the arguments, collected.

    Returns:
      int32 ids of the new tokens; in a row that has ended, `eos_id`.

    Raises:
      TypeError, ValueError: an argument is not what it must be.
    """
    steps = stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        cache_format=cache_format,
        page_size=page_size,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        eos_id=eos_id,
        implementation=implementation,
        prefill_chunk=prefill_chunk,
    )
    ids = np.full((len(prompts), max_new_tokens), 0 if eos_id is None else eos_id, np.int32)
    for i, tokens in enumerate(steps):
        ids[:, i] = tokens
    return jnp.asarray(ids)


def stream(
    model: DeepseekModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    cache_format: str | None = None,
    page_size: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    implementation: Implementation = None,
    prefill_chunk: int = 2048,
) -> Iterator[Int[Array, " b"]]:
    """Continues prompts, one token per sequence at a time.

    The step is compiled once and given the caches to write in place. A token is handed out when the
    next step is already under way, so reading it does not hold the device up.

    Args:
      model: the model.
      prompts: token ids, `[B, T]` or a list of lists of any lengths.
      max_new_tokens: tokens to add to each prompt.
      cache_format: a format of `mla_jax.init_cache`; None follows the dtype of the model.
      page_size: tokens per cache page.
      temperature: of the sampling distribution; 0 takes the likeliest token.
      top_p: sample from the smallest set of tokens with at least this probability.
      seed: of the sampling.
      eos_id: ends a sequence; it then goes on with `eos_id`, and once all have ended, so does the
        stream.
      implementation: as in `mla_jax.mla_decode`, for the steps. Prompts are taken in with it too
        if it is there for `mla_jax.mla_prefill`, otherwise with the best that is.
      prefill_chunk: prompt tokens, of all sequences together, that are taken in at a time; bounds
        the memory that long prompts need.

    Yields:
      int32 `[B]`, the next token of each sequence.

    Raises:
      TypeError, ValueError: an argument is not what it must be; raised by the call itself.
    """
    ids = _check_prompts(prompts, model.config.vocab_size)
    check_size("max_new_tokens", max_new_tokens)
    check_size("page_size", page_size)
    check_size("prefill_chunk", prefill_chunk)
    check_scale("temperature", temperature)
    check_scale("top_p", top_p)
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"`temperature` is {temperature}: must be at least 0, and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}: must be above 0 and at most 1")
    check_int("seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"`seed` is {seed}: must be an integer of 64 bits")
    if eos_id is not None:
        check_int("eos_id", eos_id)
    if eos_id is not None and not 0 <= eos_id < model.config.vocab_size:
        raise ValueError(
            f"`eos_id` is {eos_id}: must lie in the vocabulary, 0 to {model.config.vocab_size - 1}"
        )
    longest = max(map(len, ids)) + max_new_tokens
    if longest > model.config.max_positions:
        raise ValueError(
            f"the longest prompt and `max_new_tokens` make {longest} tokens: the model takes "
            f"at most {model.config.max_positions}"
        )

    # The last new token is never fed back, so it needs no slot.
    final_lens = np.array([len(row) + max_new_tokens - 1 for row in ids])
    num_pages = int((-(-final_lens // page_size)).sum())
    caches = model.init_caches(
        _bucket(max(num_pages, 1)), page_size=page_size, cache_format=cache_format
    )
    pages = PageTable(
        len(ids),
        num_pages=caches[0].num_pages,
        page_size=page_size,
        max_pages=_bucket(max(-(-int(final_lens.max()) // page_size), 1)),
    )
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        implementation = tuple(implementation)
    dispatch.names(implementation)  # raises for one that it cannot be
    sampling = None
    if temperature > 0:
        # Within float32, whose least normal value and largest one do what lies beyond them would.
        info = np.finfo(np.float32)
        sampling = (
            np.float32(np.clip(temperature, info.tiny, info.max)),
            None if top_p == 1 else np.float32(max(top_p, info.tiny)),
        )
    return _run(
        model,
        ids,
        caches,
        pages,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=jax.random.key(seed),
        eos_id=-1 if eos_id is None else eos_id,
        implementation=implementation,
        prefill_chunk=prefill_chunk,
    )


def _run(
    model: DeepseekModel,
    ids: list[np.ndarray],
    caches: Caches,
    pages: PageTable,
    *,
    max_new_tokens: int,
    sampling: tuple[np.floating, np.floating | None] | None,
    key: jax.Array,
    eos_id: int,
    implementation: Any,
    prefill_chunk: int,
) -> Iterator[Int[Array, " b"]]:
    graphdef, state = nnx.split(model)
    # Leaves rather than the state: their list is the cheapest thing to pass in every step.
    params, treedef = jax.tree.flatten(state)
    prefill, step = _programs(graphdef, treedef, implementation)

    # All but the last token of a prompt, which the first step takes in as every step takes in one.
    prompt_lens = np.array([len(row) for row in ids], np.int32)
    longest = int(prompt_lens.max()) - 1
    chunk = min(max(prefill_chunk // len(ids), 1), max(_MIN_CHUNK, _next_power_of_two(longest)))
    for start in range(0, longest, chunk):
        seq_lens = np.minimum(prompt_lens - 1, start + chunk)
        lengths = np.maximum(seq_lens - start, 0)
        chunk_ids = np.zeros((len(ids), chunk), np.int32)
        for row, length, prompt in zip(chunk_ids, lengths, ids, strict=True):
            row[:length] = prompt[start : start + length]
        pages.grow(seq_lens)
        caches = prefill(params, caches, chunk_ids, pages.on_device(), seq_lens, lengths)

    tokens = jnp.array([row[-1] for row in ids], jnp.int32)
    carry = (tokens, jnp.zeros(len(ids), bool), key)
    for i in range(max_new_tokens):
        seq_lens = prompt_lens + i
        pages.grow(seq_lens)
        previous = carry
        carry, caches = step(
            params, caches, carry, pages.on_device(), seq_lens, np.int32(eos_id), sampling
        )
        if i > 0:
            yield previous[0]
            if eos_id >= 0 and bool(previous[1].all()):
                return
    yield carry[0]


@functools.lru_cache(maxsize=16)
def _programs(graphdef: nnx.GraphDef, treedef: Any, implementation: Any) -> tuple[Any, Any]:
    """The jitted `prefill` and `step` of a model; parameters are arguments of both."""
    prefill_implementation = dispatch.IMPLEMENTATIONS
    if implementation is not None:
        named = implementation if isinstance(implementation, tuple) else (implementation,)
        prefill_implementation = (*named, *prefill_implementation)

    def model_of(params: list[jax.Array]) -> DeepseekModel:
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, params))

    @functools.partial(jax.jit, donate_argnames="caches")
    def prefill(params, caches, input_ids, block_table, seq_lens, lengths):
        # Nobody looks at the logits, so the compiler leaves them out.
        return model_of(params).prefill(
            input_ids,
            caches,
            block_table,
            seq_lens,
            lengths=lengths,
            implementation=prefill_implementation,
        )[1]

    @functools.partial(jax.jit, donate_argnames="caches")
    def step(params, caches, carry, block_table, seq_lens, eos_id, sampling):
        tokens, ended, key = carry
        logits, caches = model_of(params).decode(
            tokens[:, None], caches, block_table, seq_lens, implementation=implementation
        )
        key, step_key = jax.random.split(key)
        tokens = jnp.where(ended, eos_id, _choose(logits[:, 0], step_key, sampling))
        return (tokens, ended | (tokens == eos_id), key), caches

    return prefill, step


def _choose(
    logits: Float[Array, "b vocab"],
    key: jax.Array,
    sampling: tuple[Float[Array, ""], Float[Array, ""] | None] | None,
) -> Int[Array, " b"]:
    """The likeliest tokens, or a sample with `(temperature, top_p)`; no `top_p` is 1."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    temperature, top_p = sampling
    # The likeliest token comes to 0, so that no temperature is too low: the others end at -inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_p is None:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered)
    inside = jnp.cumsum(probs, axis=-1) - probs < top_p
    threshold = jnp.min(ordered, axis=-1, keepdims=True, where=inside, initial=jnp.inf)
    logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _check_prompts(prompts: Prompts, vocab_size: int) -> list[np.ndarray]:
    # One transfer for an array of prompts, not one for each row.
    rows = prompts if isinstance(prompts, list | tuple) else np.asarray(prompts)
    if isinstance(rows, np.ndarray) and rows.ndim == 0:
        raise TypeError(
            f"`prompts` is of type {type(prompts).__name__}: must be token ids, "
            "[B, T] or a list of lists"
        )
    ids = [np.asarray(row) for row in rows]
    if not ids:
        raise ValueError("`prompts` is empty: must hold at least one prompt")
    for i, row in enumerate(ids):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"`prompts[{i}]` has shape {row.shape}: must be [T] with T >= 1")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"`prompts[{i}]` is {row.dtype}: must be integer token ids")
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(
                f"`prompts[{i}]` has ids from {row.min()} to {row.max()}: "
                f"must lie in the vocabulary, 0 to {vocab_size - 1}"
            )
    return ids


def _next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _bucket(n: int) -> int:
    """`n` rounded up by at most an eighth or so: sizes that are close share a compiled program."""
    step = max(1, _next_power_of_two(n) // 8)
    return -(-n // step) * step
