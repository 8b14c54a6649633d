"""How far a command is, on stderr: a bar that moves on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxsync.extras import import_extra

_LINE_S = 5.0  # from one line to the next: a log stays short, and nobody takes a slow run for a hang

Move = Callable[..., None]


@contextlib.contextmanager
def progress_bar(
    description: str, columns: Callable[[Any], list[Any]], line: str, *, feature: str, **task: Any
) -> Iterator[Move]:
    """What moves the bar, and is called with what rich's `Progress.update` takes.

    Where nothing can move (a file, a pipe, the lines of `jaxsync launch`) the first call, the last one, and
    one about every five seconds write a line.

    Args:
        description: What goes on.
        columns: Makes the columns of the bar, given the module `rich.progress`.
        line: A line, as a format string of `description` and what `task` and the updates have.
        feature: What needs rich, for the message.
        task: What rich's `Progress.add_task` takes.

    Raises:
        MissingExtraError: rich is not installed.
    """
    console = import_extra("rich.console", package="rich", feature=feature).Console(stderr=True)
    bars = import_extra("rich.progress", package="rich", feature=feature)
    if not console.is_terminal or console.is_dumb_terminal:
        with _lines(line, {"description": description, **task}) as move:
            yield move
        return
    with bars.Progress(*columns(bars), console=console) as bar:
        shown = bar.add_task(description, **task)
        yield functools.partial(bar.update, shown)


@contextlib.contextmanager
def _lines(line: str, facts: dict[str, Any]) -> Iterator[Move]:
    next_s, is_told = 0.0, True

    def tell() -> None:
        print(line.format_map(facts), file=sys.stderr, flush=True)

    def move(**changes: Any) -> None:
        nonlocal next_s, is_told
        facts.update(changes)
        now_s = time.monotonic()
        is_told = now_s >= next_s
        if is_told:
            tell()
            next_s = now_s + _LINE_S

    yield move
    if not is_told:
        tell()
