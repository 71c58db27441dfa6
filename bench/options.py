"""What the benches' command lines have in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench import records
from bench.shapes import Shape
from mla_jax.cli import console

Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Merge the results into this file. Default: bench/results/<gpu>.json.",
        show_default=False,
    ),
]


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


def shapes(text: str) -> list[Shape]:
    """The shapes in `text`, separated by commas.

    Raises:
        console.UserError: one is none.
    """
    with console.input_errors():
        return [Shape.parse(row.strip()) for row in text.split(",")]


def results_file(output: Path | None, device: str) -> Path:
    """Where results are merged into: that of the device if none is given.

    Raises:
        console.UserError: the file holds something else.
    """
    output = output or records.RESULTS / f"{records.slug(device)}.json"
    with console.input_errors():
        records.read(output)
    return output
