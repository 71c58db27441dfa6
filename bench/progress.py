"""How far a run is, on standard error: a bar in a terminal, a line per step elsewhere."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_jax.cli import console


class Say(Protocol):
    """What the current step is doing; `done` marks its result, which stays on the screen."""

    def __call__(self, text: str, *, done: bool = False) -> None: ...


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], Say]]:
    """Gives a function that begins the next of `total` steps."""
    if console.is_plain(sys.stderr):
        yield _plain(total)
        return
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total, completed=-1)

        def step(name: str) -> Say:
            bar.update(task, advance=1, description=name)

            def say(text: str, *, done: bool = False) -> None:
                if done:
                    bar.console.print(f"{name}: {text}", highlight=False, markup=False)
                else:
                    bar.update(task, description=f"{name}: {text}")

            return say

        yield step


def _plain(total: int) -> Callable[[str], Say]:
    count = 0

    def step(name: str) -> Say:
        nonlocal count
        count += 1
        prefix = f"[{count}/{total}] {name}"
        console.note(prefix)

        def say(text: str, *, done: bool = False) -> None:
            if done:
                console.note(f"{prefix}: {text}")

        return say

    return step


@contextlib.contextmanager
def watchdog(what: str, seconds: float) -> Iterator[None]:
    """End the process if the body takes longer: a kernel that hangs cannot be interrupted."""

    def end():
        console.note(f"error: {what} did not end within {seconds:.0f} s")
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
