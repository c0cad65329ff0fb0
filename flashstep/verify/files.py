"""Golden files: finding them, reading them whole, and keeping account of which of their tensors were compared.

A broken file is an error before anything is computed. A tensor that a file does not hold is a comparison skipped; a
tensor that nothing asks for is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flashstep.verify.report import Report
from flashstep.verify.tolerances import Tolerance


class GoldenError(ValueError):
    """A directory that cannot be verified; the message lists every problem: what, found, expected, what to do."""

    def __init__(self, source: Path, problems: list[str]) -> None:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{source}: {len(problems)} problem(s) in the golden files:\n{lines}")
        self.problems = problems


class MissingTensor(Exception):  # noqa: N818 - expected: files may hold less than all
    """A tensor that a comparison needs and the file does not hold."""


class Vectors:
    """The tensors of one file, and which of them were used."""

    def __init__(self, name: str, tensors: dict[str, Tensor], report: Report) -> None:
        self.name, self.tensors, self.report = name, tensors, report
        self.prefix = ""  # stands before the names of compared quantities
        self._used: set[str] = set()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.tensors

    def __getitem__(self, tensor: str) -> Tensor:
        """The tensor, as an input or to compare with. Raises `MissingTensor`."""
        if tensor not in self.tensors:
            raise MissingTensor(tensor)
        self._used.add(tensor)
        return self.tensors[tensor]

    def numbered(self, pattern: str) -> list[tuple[str, int]]:
        """Names made of the prefix `pattern` and a number, with that number, in its order."""
        rest = {name: name.removeprefix(pattern) for name in self.tensors if name.startswith(pattern)}
        return sorted(((name, int(tail)) for name, tail in rest.items() if tail.isdigit()), key=lambda item: item[1])

    def check(self, tensor: str, got: Callable[..., Tensor], tolerance: Tolerance, mode: str = "") -> None:
        """Compare what `got` computes with `tensor`, or say that the file lacks it or something `got` needs."""
        if tensor not in self:
            self.report.skip(self.name, tensor, "not in this file")
            return
        with self.needed_for(tensor):
            self.compare(tensor, got(), self[tensor], tolerance, mode)

    def compare(self, quantity: str, got: Tensor, want: Tensor, tolerance: Tolerance, mode: str = "") -> None:
        """Add a row for something made of this file's tensors."""
        self.report.compare(self.name, self.prefix + quantity, mode, got, want, tolerance)

    @contextmanager
    def needed_for(self, quantity: str) -> Iterator[None]:
        """Turns a tensor missing inside into a note that `quantity` was skipped."""
        try:
            yield
        except MissingTensor as missing:
            if quantity in self:
                self._used.add(quantity)
            self.report.skip(self.name, quantity, f"not compared: needs {missing}, which is not in this file")

    def leave(self, tensor: str, reason: str) -> None:
        """Note that `tensor`, if the file has it, is not compared with anything."""
        if tensor in self:
            self._used.add(tensor)
            self.report.skip(self.name, tensor, reason)

    def leave_all(self, prefix: str, reason: str) -> None:
        """`leave` every tensor whose name starts with `prefix`."""
        for tensor in sorted(self.tensors):
            if tensor.startswith(prefix):
                self.leave(tensor, reason)

    def finish(self) -> None:
        """Note every tensor that nothing has used."""
        for tensor in sorted(self.tensors.keys() - self._used):
            self.report.skip(self.name, tensor, "unknown or unused tensor: nothing here compares it")


def read(paths: dict[str, Path], report: Report, root: Path) -> dict[str, Vectors]:
    """Read safetensors files whole, by name. Raises `GoldenError` naming every one that is missing or broken."""
    problems, read = [], {}
    for name, path in paths.items():
        try:
            read[name] = Vectors(name, load_file(path), report)
        except FileNotFoundError:
            problems.append(f"{path.relative_to(root)}: no such file, but the index lists it; copy the directory again")
        except (SafetensorError, OSError) as error:
            problems.append(
                f"{path.relative_to(root)}: not a readable safetensors file ({error}); it may be cut short: copy it"
            )
    if problems:
        raise GoldenError(root, problems)
    return read


def read_json(path: Path) -> Any:
    """Parsed JSON of `path`. Raises `GoldenError` where it does not parse."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GoldenError(path.parent, [f"{path.name}: not valid JSON ({error}); copy the file again"]) from None
