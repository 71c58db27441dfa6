"""What the commands print: results on standard output, progress and errors on standard error.

A terminal gets tables with lines and colours, a progress bar and a spinner. Anything else, and a
terminal with NO_COLOR set or TERM=dumb, gets the same content as plain text.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NoReturn, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Align = Literal["left", "right"]
Column = tuple[str, Align]


class UserError(Exception):
    """Bad input: ends the program with exit code 2 and the message, on one line."""


def is_plain(stream: TextIO) -> bool:
    """Whether `stream` takes neither colours nor box drawing nor moves of the cursor."""
    return (
        not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    )


def say(text: str = "") -> None:
    """A line of the result."""
    print(text, flush=True)


def note(text: str) -> None:
    """A line about the work, on standard error."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """Stop for bad input."""
    raise UserError(message)


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Turn what the library raises for bad arguments and files into a `UserError`."""
    try:
        yield
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        raise UserError(str(error)) from error


def heading(text: str) -> None:
    """The title of a part of the result, with an empty line above it."""
    if is_plain(sys.stdout):
        say(f"\n{text}")
    else:
        Console().print(f"\n[bold]{text}[/bold]", highlight=False)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; titles and cells wrap where a terminal is too narrow."""
    if is_plain(sys.stdout):
        for line in plain_table(columns, rows):
            say(line)
        return
    grid = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for i, (title, align) in enumerate(columns):
        # A short title stays on one line; what has no space would be cut, not wrapped.
        wraps = (" " in title and len(title) > 8) or any(" " in row[i] for row in rows)
        grid.add_column(title, justify=align, no_wrap=not wraps)
    for row in rows:
        grid.add_row(*row)
    Console(highlight=False, markup=False).print(grid)


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in plain text: columns two spaces apart, nothing cut off or wrapped."""
    lines = [[title for title, _ in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    align = {"left": str.ljust, "right": str.rjust}
    return [
        "  ".join(
            align[how](cell, width)
            for cell, width, (_, how) in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]


def pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and what they are."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


@contextlib.contextmanager
def loading(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how much of `what` is loaded; gives the callback for `mla_jax.models.load`."""
    if is_plain(sys.stderr):
        start = time.perf_counter()
        note(f"loading {what}")
        yield lambda done, total: None
        note(f"loaded in {time.perf_counter() - start:.1f} s")
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task(f"loading {what}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[], None]]:
    """Show that `what` is going on; gives a function that ends the show early."""
    if is_plain(sys.stderr):
        note(what)
        yield lambda: None
        return
    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def human_bytes(size: int) -> str:
    """`size` in binary units with three digits: 656 B, 40.5 KiB, 1.21 GiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"
