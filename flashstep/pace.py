"""How long a step takes by its rows, learned while it runs: what keeps users' pace while prompts are computed."""

from __future__ import annotations

FORGET = 0.98  # weight of a step relative to the next one; about the last fifty count
CAUTIOUS_ROWS = 16  # added to a step while too little is known
LEAST_ROWS = 8  # a prompt always advances by so many


class StepTimes:
    """A straight line through recent steps: seconds = fixed + per_row * rows, by least squares that forget."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """Take in one step."""
        self._weight = self._weight * FORGET + 1
        self._rows = self._rows * FORGET + rows
        self._seconds = self._seconds * FORGET + seconds
        self._rows_squared = self._rows_squared * FORGET + rows * rows
        self._product = self._product * FORGET + rows * seconds

    def extra_rows(self, rows: int, slowdown: float) -> int:
        """How many rows may join a step of `rows`, so that it takes at most `slowdown` times as long."""
        spread = self._weight * self._rows_squared - self._rows**2
        if self._weight < 2 or spread <= 1e-9 * self._rows**2:  # steps of one size say nothing about another
            return CAUTIOUS_ROWS
        per_row = (self._weight * self._product - self._rows * self._seconds) / spread
        fixed = (self._seconds - per_row * self._rows) / self._weight
        alone = fixed + per_row * rows
        if per_row <= 0 or alone <= 0:  # noise: the sizes so far differ too little
            return CAUTIOUS_ROWS
        return max(LEAST_ROWS, int((slowdown - 1) * alone / per_row))
