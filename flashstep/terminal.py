"""How tables and progress reach a terminal or a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_S = 1.0  # what takes less shows no bar


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, and wide enough not to fold a cell where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (name, done, of all) that draws a bar on a terminal's stderr once the work has taken a while."""
    started = time.monotonic()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def show(_: str, done: int, total: int) -> None:
        if bar.console.is_terminal and not bar.live.is_started and time.monotonic() - started > PATIENCE_S:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:  # stopping what was never shown would still end a line
            bar.stop()
