"""What a verification found: one row per compared quantity, one note per quantity that was not compared.

Owns the record, its verdict, and how both are printed. What is compared, and how closely, is decided elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashstep.terminal import wide_console
from flashstep.verify.tolerances import MEASURES, Tolerance


@dataclass(frozen=True)
class Row:
    """One comparison of a recorded quantity with what the backend computes."""

    file: str
    quantity: str
    mode: str  # of the numbers: bf16, f32 or noquant; empty where there is only one
    measured: Mapping[str, float]  # by measure, see `tolerances`
    limits: Mapping[str, float]  # largest values that pass
    reason: str  # why the tolerance is what it is
    problem: str = ""  # why nothing could be measured

    @property
    def passed(self) -> bool:
        """Whether every measure is within its limit; NaN is not."""
        return not self.problem and all(self.measured[name] <= limit for name, limit in self.limits.items())

    @property
    def load(self) -> float:
        """The largest error as a share of its limit; infinite where it failed without a finite one."""
        if self.problem:
            return math.inf
        shares = [_share(self.measured[name], limit) for name, limit in self.limits.items()]
        return max(shares, default=0.0)


@dataclass(frozen=True)
class Note:
    """A quantity that was not compared, and why."""

    file: str
    quantity: str
    reason: str


@dataclass
class Report:
    """All rows and notes of a verification."""

    backend: str
    directory: str
    rows: list[Row] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was compared and everything that was is within its tolerance."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if not row.passed]

    def compare(self, file: str, quantity: str, mode: str, got: Tensor, want: Tensor, tolerance: Tolerance) -> None:
        """Measure `got` against the recorded `want` and add a row."""
        problem, measured = "", {}
        if got.shape != want.shape:
            problem = f"computed shape {list(got.shape)}, recorded {list(want.shape)}"
        elif not want.numel():
            self.skip(file, quantity, "nothing to compare: no row is left")
            return
        else:
            measured = {name: MEASURES[name](got.detach(), want) for name in tolerance.limits}
        self.rows.append(Row(file, quantity, mode, measured, tolerance.limits, tolerance.reason, problem))

    def add(self, file: str, quantity: str, mode: str, measured: Mapping[str, float], tolerance: Tolerance) -> None:
        """Add a row whose errors the caller has measured."""
        self.rows.append(Row(file, quantity, mode, measured, tolerance.limits, tolerance.reason))

    def skip(self, file: str, quantity: str, reason: str) -> None:
        """Add a note."""
        self.notes.append(Note(file, quantity, reason))

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; values that JSON cannot hold become strings."""
        rows = []
        for row in self.rows:
            measured = {k: v if math.isfinite(v) else str(v) for k, v in row.measured.items()}
            rows.append(asdict(row) | {"measured": measured, "limits": dict(row.limits), "passed": row.passed})
        return {
            "backend": self.backend,
            "directory": self.directory,
            "passed": self.passed,
            "rows": rows,
            "notes": [asdict(note) for note in self.notes],
        }


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the largest error of each quantity beside its tolerance, then failures, notes and the verdict."""
    console = console or wide_console()
    table = Table(title=f"{report.directory}: backend {report.backend}", title_justify="left")
    for heading in ("quantity", "mode", "compared", "largest error", "tolerance", "worst in", ""):
        table.add_column(heading, overflow="fold")
    for rows in _grouped(report.rows):
        worst = max(rows, key=lambda row: row.load)
        failed = sum(not row.passed for row in rows)
        verdict = f"[red]{failed} failed[/red]" if failed else "pass"
        # Not the errors of one row: each measure at its largest over the group.
        errors = {
            name: max((r.measured[name] for r in rows if name in r.measured), default=math.nan, key=_nan_last)
            for name in worst.limits
        }
        shown = (_anonymous(worst.quantity), worst.mode, str(len(rows)), _numbers(errors), _numbers(worst.limits))
        table.add_row(*shown, worst.file, verdict)
    console.print(table)
    for row in report.failures:
        found = row.problem or f"{_numbers(row.measured)}; at most {_numbers(row.limits)}"
        console.print(f"FAILED {row.file}: {row.quantity} {row.mode}: {found}", style="red", highlight=False)
        console.print(f"  {row.reason}", highlight=False)
    names: dict[tuple[str, str], list[str]] = {}
    for note in report.notes:
        names.setdefault((note.file, note.reason), []).append(note.quantity)
    files: dict[tuple[str, str], list[str]] = {}
    for (file, reason), quantities in names.items():
        files.setdefault((", ".join(quantities), reason), []).append(file)
    if files:
        console.print("Not compared:")
    for (quantities_text, reason), where in files.items():
        console.print(f"  {', '.join(where)}: {quantities_text}: {reason}", highlight=False)
    count = len(report.failures)
    verdict = "all within tolerance" if report.passed else f"{count} outside tolerance" if report.rows else "nothing"
    console.print(f"{len(report.rows)} comparisons, {verdict}", style="green" if report.passed else "red")


def _grouped(rows: list[Row]) -> list[list[Row]]:
    """Rows that differ only in their file or in a number inside the name (layer, call), in order of appearance."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((_anonymous(row.quantity), row.mode, str(dict(row.limits))), []).append(row)
    return list(groups.values())


def _anonymous(quantity: str) -> str:
    return re.sub(r"(?<=[._])\d+(?=\.|$)|^p\d+(?=\.)", "N", quantity)


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def _share(value: float, limit: float) -> float:
    if math.isnan(value):
        return math.inf
    return value / limit if limit else (math.inf if value else 0.0)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
