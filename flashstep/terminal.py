"""How tables reach a terminal or a file."""

from __future__ import annotations

import sys

from rich.console import Console


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, and wide enough not to fold a cell where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)
