"""Verification of an implementation against recorded numbers in the golden format.

Owns what a golden directory is and the order of the work. A directory holds units (one file a primitive), or one
configuration (a checkpoint, its tokenizer, `vectors/`, further `config_NAME.json` for the vector files `NAME_*`), or
several of either. Everything is read from the files: sizes, steps, modes, which quantities there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.loading import token_map
from flashstep.model import Model
from flashstep.verify.backends import Backend, backend_named
from flashstep.verify.files import GoldenError, MissingTensor, Vectors, read, read_json
from flashstep.verify.prompts import BF16, F32, NOQUANT, NUMERICS, EndToEnd, Recorded, tokens_of
from flashstep.verify.report import Report, print_report
from flashstep.verify.sublayers import Layers
from flashstep.verify.units import Beside, Unit, check_for

__all__ = ["GoldenError", "Report", "print_report", "verify"]

_INPUTS = ("prompt", "decode_tokens", "snap_pos", "f32.snap_pos", "router_margin", "index_margin")
Advance = Callable[[], None]  # another piece of work is done


@torch.inference_mode()
def verify(directory: Path | str, backend: str = "reference", *, show_progress: bool = False) -> Report:
    """Compare `backend` with everything recorded below `directory`.

    Raises ValueError for an unknown backend, and `GoldenError`, `ConfigError` or `CheckpointError` for files that are
    missing or broken, each naming all it found.
    """
    directory = Path(directory)
    implementation = backend_named(backend)
    report = Report(backend, str(directory))
    work: list[_Units | _Configuration] = []
    for part in _parts(directory):
        kind = _Units if _is_units(part) else _Configuration
        work.append(kind(part, directory, report, implementation))
    with _progress(sum(piece.pieces for piece in work), show_progress) as advance:
        for piece in work:
            piece.check(advance)
    return report


def _is_units(path: Path) -> bool:
    return (path / "index.json").is_file() and not (path / "config.json").is_file()


def _is_configuration(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "vectors").is_dir()


def _parts(directory: Path) -> list[Path]:
    """The unit and configuration directories at `directory`. Raises `GoldenError` where there is none."""
    if not directory.is_dir():
        raise GoldenError(directory, ["no such directory: give one in the golden format"])
    if _is_units(directory) or _is_configuration(directory):
        return [directory]
    parts = [p for p in sorted(directory.iterdir()) if p.is_dir() and (_is_units(p) or _is_configuration(p))]
    if not parts:
        found = ", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "nothing"
        raise GoldenError(
            directory,
            [
                f"no golden vectors: found {found}; expected index.json beside unit files, or config.json beside "
                "vectors/, or directories of these"
            ],
        )
    return parts


class _Meta(dict[str, Any]):
    """Constants of a unit file; one that is missing skips what needs it."""

    def __missing__(self, key: str) -> Any:
        raise MissingTensor(f"the constant {key} (index.json)")


class _Units:
    """A directory of unit files, read and checked against its index."""

    def __init__(self, path: Path, root: Path, report: Report, backend: Backend) -> None:
        self.path, self.report, self.backend = path, report, backend
        self.index = read_json(path / "index.json")
        if not isinstance(self.index, dict) or not all(isinstance(entry, dict) for entry in self.index.values()):
            raise GoldenError(path, ["index.json: expected an object that names unit files; copy the file again"])
        names = self.index.keys() | {file.stem for file in path.glob("*.safetensors")}
        where = path.relative_to(root).as_posix()
        prefix = "" if where == "." else f"{where}/"
        self.files = read({name: path / f"{name}.safetensors" for name in sorted(names)}, report, path)
        problems = [problem for name, entry in self.index.items() for problem in _differences(self.files[name], entry)]
        if problems:
            raise GoldenError(path, problems)
        for name, vectors in self.files.items():
            vectors.name, vectors.prefix = prefix + name, re.sub(r"_r\d+$", "", name) + "."
        self.pieces = len(self.files)

    def check(self, advance: Advance) -> None:
        """Run the check of every file."""
        for name, vectors in self.files.items():
            if self.backend.whole_only:
                self.report.skip(vectors.name, "all tensors", self.backend.whole_only)
                advance()
                continue
            check = check_for(name)
            meta = _Meta(self.index.get(name, {}).get("meta", {}))
            if check is None:
                self.report.skip(vectors.name, "all tensors", "unknown unit file: nothing here checks it")
            else:
                with vectors.needed_for(name):
                    check(Unit(vectors, meta, self.backend, self._beside))
                vectors.finish()
            advance()

    def _beside(self, name: str) -> Beside | None:
        siblings = sorted(p for p in self.path.resolve().parent.iterdir() if _is_configuration(p))
        path = next((p for p in siblings if name in (p.name, _own_name(p))), None)
        if path is None:
            return None
        checkpoint = Checkpoint.open(path)
        return Beside(checkpoint, token_map(path, checkpoint.config))


def _own_name(configuration: Path) -> str | None:
    """What a configuration directory calls itself, whatever its directory is called."""
    index_file = configuration / "vectors" / "index.json"
    index = read_json(index_file) if index_file.is_file() else {}
    return index.get("config") if isinstance(index, dict) else None


def _differences(vectors: Vectors, entry: dict[str, Any]) -> list[str]:
    """Where a unit file does not hold what its index entry lists."""
    problems = []
    for name, wanted in entry.get("tensors", {}).items():
        tensor = vectors.tensors.get(name)
        if tensor is None:
            problems.append(f"{vectors.name}: no tensor {name}, but index.json lists it; copy the file again")
            continue
        found = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        problems += [
            f"{vectors.name}: {name} has {key} {found[key]}, index.json says {wanted[key]}; copy the file again"
            for key in found
            if key in wanted and found[key] != wanted[key]
        ]
    return problems


class _Configuration:
    """A checkpoint with its vectors, all read and validated."""

    def __init__(self, path: Path, root: Path, report: Report, backend: Backend) -> None:
        self.report, self.backend = report, backend
        self.checkpoint = Checkpoint.open(path)
        if not (path / "tokenizer.json").is_file():
            raise GoldenError(path, ["tokenizer.json: no such file; the Engram's token map is made from it"])
        self.token_map = token_map(path, self.checkpoint.config)
        self.configs = {"": self.checkpoint.config} | {
            file.stem.removeprefix("config_"): ModelConfig.from_file(file)
            for file in sorted(path.glob("config_*.json"))
        }
        index_file = path / "vectors" / "index.json"
        index = read_json(index_file) if index_file.is_file() else {}
        if not isinstance(index, dict):
            raise GoldenError(path, ["vectors/index.json: expected an object; copy the file again"])
        self.hc_layer = index.get("hc_layer")
        listed = {path / found for value in index.values() if isinstance(value, list) for found in _files(value)}
        present = set((path / "vectors").glob("*.safetensors"))
        if not listed | present:
            raise GoldenError(path, ["vectors/: holds no safetensors file; copy the directory again"])
        self.files = read({file.stem: file for file in sorted(listed | present)}, report, path)
        where = path.relative_to(root).as_posix()
        for vectors in self.files.values():
            vectors.name = vectors.name if where == "." else f"{where}/{vectors.name}"
        self._sort()

    def _sort(self) -> None:
        """Tell prompts, layers and runs without quantizers apart, and gather what runs together."""
        self.prompts = {n: v for n, v in self.files.items() if "prompt" in v and "decode_tokens" in v}
        self.layers = {n: v for n, v in self.files.items() if any(t.startswith("layer.") for t in v.tensors)}
        self.runs: dict[tuple[str, str], dict[str, Recorded]] = {}  # by configuration and mode
        for name, vectors in self.prompts.items():
            tokens = tokens_of(vectors)
            problem = _token_problem(tokens.fed + tokens.decode[-1:], len(tokens.prompt), self._config_of(name))
            if problem:
                raise GoldenError(self.checkpoint.path, [f"{vectors.name}: {problem}; copy the file again"])
            plain = {t for t in vectors.tensors if not t.startswith("f32.")}
            for mode, prefix, found in (
                (BF16, "", plain - set(_INPUTS)),
                (F32, "f32.", vectors.tensors.keys() - plain),
            ):
                if found:
                    group = self.runs.setdefault((self._config_name(name), mode), {})
                    group[name] = Recorded(vectors, prefix, tokens)
        for file, vectors in self.files.items():
            if file.endswith(NOQUANT):
                for name in sorted({t.split(".")[0] for t in vectors.tensors} & self.prompts.keys()):
                    group = self.runs.setdefault((self._config_name(name), NOQUANT), {})
                    group[name] = Recorded(vectors, f"{name}.", tokens_of(self.prompts[name]))
        # Cutting a sequence differently needs no recorded logits.
        self.cuts = {} if any(mode == NOQUANT for _, mode in self.runs) else self._some_prompts()
        self.pieces = (
            len(self.layers)
            + 2 * len(self.cuts)
            + sum(
                len(group) * (3 if mode == NOQUANT else 1) + max(r.tokens.steps for r in group.values())
                for (_, mode), group in self.runs.items()
            )
        )

    def _some_prompts(self) -> dict[str, Recorded]:
        names = [name for name in self.prompts if not self._config_name(name)]
        return {n: Recorded(self.prompts[n], "", tokens_of(self.prompts[n])) for n in names}

    def check(self, advance: Advance) -> None:
        """Layers first, the finest; then every mode of every configuration."""
        for vectors in self.layers.values():
            if self.backend.whole_only:
                self.report.skip(vectors.name, "all tensors", self.backend.whole_only)
                continue
            with vectors.needed_for("layers"):
                model, draft = self._load("", BF16)
                same = [v for n, v in self.prompts.items() if not self._config_name(n) and _same_prompt(v, vectors)]
                Layers(vectors, same[0] if same else None, self.backend, model, draft).check()
            advance()
        for (config, mode), group in self.runs.items():
            reason = self._not_run(config, mode)
            if reason:
                for record in group.values():
                    record.vectors.leave_all(record.prefix, reason)
                continue
            self._end_to_end(config, mode, advance).check(group)
        if self.cuts and not self.backend.whole_only:
            run = self._end_to_end("", NOQUANT, advance)
            run.check_cuts(self.cuts, {})
        for name, vectors in self.files.items():
            for tensor in _INPUTS:
                vectors.leave(tensor, "an input of the comparisons")
            if name.endswith(NOQUANT) or vectors in (*self.prompts.values(), *self.layers.values()):
                vectors.finish()
            else:
                self.report.skip(vectors.name, "all tensors", "unknown file: neither prompt, layers nor noquant")
        for kind, found in (("layers", self.layers), (NOQUANT, any(m == NOQUANT for _, m in self.runs))):
            if not found:
                self.report.skip(f"vectors/{kind}", "all tensors", "no such file in this directory")

    def _not_run(self, config: str, mode: str) -> str:
        """Why the backend does not run a mode of a configuration; empty where it does."""
        if not self.backend.whole_only:
            return ""
        if mode != BF16:
            return self.backend.whole_only
        most = max(self.configs[config].num_experts_per_tok, self.configs[config].dspark_num_experts_per_tok)
        return f"{most} experts a token: the kernels choose at most 8" if most > 8 else ""

    def _config_name(self, file: str) -> str:
        """The configuration of a vector file: NAME where it is called NAME_*, otherwise config.json (empty)."""
        return max((name for name in self.configs if name and file.startswith(f"{name}_")), key=len, default="")

    def _config_of(self, file: str) -> ModelConfig:
        return self.configs[self._config_name(file)]

    def _load(self, config: str, mode: str) -> tuple[Model, Draft]:
        backend = self.backend
        model = backend.model(self.configs[config], self.checkpoint, self.token_map, NUMERICS[mode])
        return model, backend.draft(model, self.checkpoint)

    def _end_to_end(self, config: str, mode: str, advance: Advance) -> EndToEnd:
        model, draft = self._load(config, mode)
        return EndToEnd(mode, self.configs[config], model, draft, self.backend, self.hc_layer, advance)


def _files(entries: list[Any]) -> list[str]:
    return [entry["file"] for entry in entries if isinstance(entry, dict) and "file" in entry]


def _same_prompt(one: Vectors, other: Vectors) -> bool:
    return "prompt" in other and torch.equal(one.tensors["prompt"], other.tensors["prompt"])


def _token_problem(tokens: list[int], prompt: int, config: ModelConfig) -> str | None:
    """What is wrong with the tokens that a file wants fed."""
    outside = [token for token in tokens if not 0 <= token < config.vocab_size]
    if outside:
        return f"token {outside[0]} is outside the vocabulary of {config.vocab_size}"
    if not prompt or len(tokens) < prompt + 2:
        return f"{prompt} prompt tokens and {len(tokens) - prompt} to decode: expected at least 1 and 2"
    if len(tokens) > config.max_position_embeddings:
        return f"{len(tokens)} tokens, more than max_position_embeddings = {config.max_position_embeddings}"
    return None


@contextmanager
def _progress(pieces: int, show: bool) -> Iterator[Advance]:
    """A bar on the terminal's error stream that moves with every piece of work."""
    columns = (TextColumn("verifying"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task("", total=pieces)
        yield lambda: bar.advance(task)
