"""Options that are lists of names."""

from collections.abc import Sequence

from mla_jax.cli import console


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in `text`, separated by commas, each once.

    Raises:
        console.UserError: one is not `known`.
    """
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in known:
            console.fail(f"{option}: {name!r} is none of {', '.join(known)}")
    return chosen
