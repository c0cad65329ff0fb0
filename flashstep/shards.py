"""The files of a checkpoint: which shard holds which tensor, and whether index, directory and headers agree.

Owns the safetensors headers and the index, read without touching a byte of tensor data; every disagreement is
collected, not raised, so that a caller can report all of them at once. Names and shapes are judged by `checkpoint.py`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_PRINTED_PROBLEMS = 40


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. `problems` holds every problem; the message prints the first of them."""

    def __init__(self, source: Path | str, problems: list[str]) -> None:
        lines = [f"  - {problem}" for problem in problems[:_PRINTED_PROBLEMS]]
        if len(problems) > _PRINTED_PROBLEMS:
            lines.append(f"  ... and {len(problems) - _PRINTED_PROBLEMS} more")
        super().__init__(f"{source}: {len(problems)} problem(s) in the checkpoint:\n" + "\n".join(lines))
        self.problems = problems


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `begin` and `end` are byte offsets in the file `shard`."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class Problems:
    """What reading the headers found; `unread` are names whose shard is absent or broken, reported by shard."""

    found: list[str]
    unread: set[str]


def read_headers(path: Path) -> tuple[dict[str, Entry], Problems]:
    """Entries of all shards by tensor name, and every disagreement between index, directory and headers."""
    problems = Problems([], set())
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if not (path / INDEX_FILE).is_file():
        if present != [SINGLE_FILE]:
            raise CheckpointError(path, [_no_index(present)])
        return _read_header(path / SINGLE_FILE, problems), problems
    index = _read_index(path)
    listed: dict[str, list[str]] = {}
    for name, shard in index.items():
        listed.setdefault(shard, []).append(name)
    entries: dict[str, Entry] = {}
    for shard in sorted(listed.keys() | set(present)):
        if shard not in listed:
            problems.found.append(f"{shard}: in the directory, but not in {INDEX_FILE}; remove it or fetch its index")
            continue
        if shard not in present:
            problems.unread.update(listed[shard])
            problems.found.append(
                f"{shard}: missing, with {len(listed[shard])} tensors ({listed[shard][0]}, ...); the download stopped "
                "early: run it again, it resumes"
            )
            continue
        count = len(problems.found)
        header = _read_header(path / shard, problems)
        if not header and len(problems.found) > count:
            problems.unread.update(listed[shard])
        for name, entry in header.items():
            if name in entries:
                problems.found.append(f"{name}: present twice, in {entries[name].shard} and {shard}")
            elif name not in index:
                problems.found.append(f"{name}: held by {shard}, but not listed in {INDEX_FILE}")
            entries.setdefault(name, entry)
    for name, shard in index.items():
        held = entries[name].shard if name in entries else None
        if name in problems.unread or held == shard:
            continue
        where = f"{held} does" if held else "no shard does"
        problems.found.append(f"{name}: listed in {shard}, which does not hold it; {where}")
        problems.unread.add(name)
    return entries, problems


def _no_index(present: list[str]) -> str:
    if not present:
        return f"no {INDEX_FILE} and no {SINGLE_FILE}: the directory holds no weights; download the checkpoint"
    return (
        f"{INDEX_FILE}: missing beside {len(present)} safetensors file(s), so nothing says whether they are all; "
        "the download stopped early: run it again, it resumes"
    )


def _read_index(path: Path) -> dict[str, str]:
    repeated: list[str] = []
    try:
        raw = json.loads((path / INDEX_FILE).read_bytes(), object_pairs_hook=lambda pairs: _unique(pairs, repeated))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, [f"{INDEX_FILE}: not valid JSON: {error}"]) from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(path, [f"{INDEX_FILE}: expected an object with a weight_map"])
    problems = [f"{name}: present twice in {INDEX_FILE}" for name in repeated]
    problems += [
        f"{name}: {INDEX_FILE} gives {shard!r}, expected the name of a safetensors file in this directory"
        for name, shard in weight_map.items()
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors")
    ]
    if problems:
        raise CheckpointError(path, problems)
    return weight_map


def _read_header(file: Path, problems: Problems) -> dict[str, Entry]:
    """Entries of one shard; what is broken is appended to `problems` and left out."""
    size = file.stat().st_size
    repeated: list[str] = []
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            problems.found.append(
                f"{file.name}: {size} bytes, less than its header needs; truncated, or not a safetensors file"
            )
            return {}
        try:
            raw = json.loads(stream.read(length), object_pairs_hook=lambda pairs: _unique(pairs, repeated))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            problems.found.append(f"{file.name}: header is not valid JSON ({error}); the file is damaged")
            return {}
    if not isinstance(raw, dict):
        problems.found.append(f"{file.name}: header is not a JSON object; the file is damaged")
        return {}
    problems.found += [f"{name}: present twice in the header of {file.name}" for name in repeated]
    raw.pop("__metadata__", None)
    entries = {}
    for name, fields in raw.items():
        entry = _parse_entry(file.name, 8 + length, fields)
        if entry is None:
            problems.found.append(f"{name}: malformed entry in the header of {file.name}")
            problems.unread.add(name)
            continue
        entries[name] = entry
        if entry.end > size:
            problems.found.append(
                f"{name}: ends at byte {entry.end} of {file.name}, which has {size}; the file is truncated: "
                "download it again"
            )
    edge = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != edge:
            problems.found.append(f"{name}: starts at byte {entry.begin} of {file.name}, expected {edge}")
        edge = max(edge, entry.end)
    if size > edge:
        problems.found.append(f"{file.name}: {size} bytes, but its header describes {edge}; the file is damaged")
    return entries


def _parse_entry(shard: str, data_start: int, fields: Any) -> Entry | None:
    """An entry whose parts have the right types and whose extent fits its shape, or None."""
    if not isinstance(fields, dict):
        return None
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        return None
    begin, end = offsets
    torch_dtype = TORCH_DTYPES.get(dtype)
    if begin > end or (torch_dtype and end - begin != math.prod(shape) * torch_dtype.itemsize):
        return None
    return Entry(shard, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _unique(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """A JSON object; its repeated keys, which `dict` would drop, are appended to `repeated`."""
    built = dict(pairs)
    if len(built) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated += [key for key, count in counts.items() if count > 1]
    return built
