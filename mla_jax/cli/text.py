"""Text to token ids and back, as a checkpoint's tokenizer does it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt that a decoder may need to see to get the spacing of the next one right.
_CONTEXT = 8


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: it cannot be read.
    """
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {str(checkpoint)!r}: give token ids with --prompt-ids instead"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower one
        raise ValueError(f"{file}: not a tokenizer: {error}") from error


def encode(tokenizer: Tokenizer, checkpoint: Path, text: str) -> list[int]:
    """Token ids of `text`, with the special tokens that the checkpoint puts in front.

    DeepSeek's tokenizer.json adds none itself; `add_bos_token` in tokenizer_config.json asks for
    it.
    """
    ids = tokenizer.encode(text).ids
    file = checkpoint / "tokenizer_config.json"
    if not file.is_file():
        return ids
    config = read_json(file)
    bos = config.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    bos_id = tokenizer.token_to_id(bos) if config.get("add_bos_token") and bos else None
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it holds none.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return value


class TextStream:
    """Turns ids into text one at a time; characters of several tokens appear when complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        """`prompt_ids` come before the ids that are pushed; their text is not given again."""
        self._tokenizer = tokenizer
        # Whether a space comes before a token can depend on the tokens before it, so each is
        # decoded together with those and their text is taken off again.
        self._context = list(prompt_ids[-_CONTEXT:])
        self._pending: list[int] = []
        self._shown = len(self._decode(self._context))

    def push(self, token: int) -> str:
        """The text that `token` completes; empty if it ends within a character."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        # Only the last character can be incomplete.
        complete = text.removesuffix(_INCOMPLETE)
        new = complete[self._shown :]
        if complete == text:
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))
        else:
            self._shown += len(new)
        return new

    def finish(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._decode(self._context + self._pending)[self._shown :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
