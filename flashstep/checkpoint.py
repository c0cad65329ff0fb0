"""Checkpoint: safetensors files on disk -> named tensors, each checked, one at a time, only the rank's part.

Owns reading, value checks and writing. `Checkpoint.open` compares every header (`shards.py`) with what the model
needs (`layout.py`) before a byte of data is read, and reports all problems at once. Tensors are views of the mapped
files: nothing is copied on the CPU unless a slice is not contiguous. Kernel layouts are made by the stages that use
them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashstep.config import FP8_BLOCK, ModelConfig
from flashstep.formats import UE8M0_NAN, decode_fp8_rows
from flashstep.layout import TensorSpec, check_world, engram_offsets, is_ignored, tensor_specs
from flashstep.shards import INDEX_FILE, TORCH_DTYPES, CheckpointError, Entry, read_headers

_LISTED_VALUES = 16  # bad values of one tensor that are named, before the rest are counted
_CHECK_BYTES = 1 << 26  # values are checked in pieces, so that the masks of a 100 GB table stay small
# A private writable mapping is charged against the commit limit unless it reserves nothing; Python names the flag
# only from 3.13. Writable, because a stray in-place operation must not kill the process, and never reaches the file.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

Progress = Callable[[str, int, int], None]  # tensor name, tensors done, tensors in all


class Checkpoint:
    """The tensors of an opened, validated checkpoint directory. Build it with `Checkpoint.open`."""

    def __init__(self, path: Path, config: ModelConfig, entries: dict[str, Entry]) -> None:
        self.path = path
        self.config = config
        self.specs = tensor_specs(config)
        self.ignored_names = sorted(name for name in entries if name not in self.specs)
        self._entries = entries
        self._shards: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read configuration, index and headers of the directory `path`, and check them all against each other.

        Raises `ConfigError` for an unusable `config.json`, `CheckpointError` for everything else that is wrong.
        """
        path = Path(path)
        config = ModelConfig.from_file(path)
        entries, problems = read_headers(path)
        specs = tensor_specs(config)
        located = entries.keys() | problems.unread
        problems.found += _differences(specs, {name: (e.dtype, e.shape) for name, e in entries.items()}, located)
        if problems.found:
            raise CheckpointError(path, problems.found)
        return cls(path, config, entries)

    def names(self) -> list[str]:
        """Names of the text model's tensors, in the order of the layers."""
        return list(self.specs)

    def tensor(self, name: str, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> Tensor:
        """What `rank` of `world` holds of tensor `name`, as stored, on `device`; its values are checked.

        On the CPU a contiguous part is a view of the mapped file. Raises `CheckpointError` on NaN or infinity.
        """
        if world > 1:
            check_world(self.config, world)
        spec, whole = self.specs[name], self._view(name)
        axis = spec.split.axis if spec.split else 0
        parts = [whole.narrow(axis, start, stop - start) for start, stop in spec.ranges(rank, world)]
        if len(parts) == 1:
            part = parts[0].to(device).contiguous()
        else:  # straight into place, so that the parts of a table are not gathered on the host first
            part = torch.empty(spec.local_shape(rank, world), dtype=whole.dtype, device=device)
            for target, source in zip(part.split([p.shape[axis] for p in parts], axis), parts, strict=True):
                target.copy_(source)
        problems = _bad_values(name, part)
        if problems:
            where = f"{self.path}, slice of rank {rank} of {world}" if world > 1 else self.path
            raise CheckpointError(where, problems)
        return part

    def engram_table(self, layer: int, rank: int = 0, world: int = 1) -> EngramTable:
        """The Engram table of backbone layer `layer`, or the heads of it that `rank` of `world` holds; not read yet."""
        if layer not in self.config.engram_layer_ids:
            raise ValueError(f"layer {layer} carries no Engram: expected one of {list(self.config.engram_layer_ids)}")
        check_world(self.config, world)
        return EngramTable(self, layer, rank, world)

    def __contains__(self, name: object) -> bool:
        """Whether the text model has a tensor `name`."""
        return name in self.specs

    def engram_gather(self, layer: int) -> Callable[[Tensor], Tensor]:
        """A function from row numbers of layer `layer`'s Engram table to their bf16 values, beside the row numbers.

        With `tensor` and `in` this makes a checkpoint the reference model's `Reader` on the CPU.
        """
        table = self.engram_table(layer)
        return lambda rows: decode_fp8_rows(*table.rows(rows)).to(rows.device)

    def check_values(self, *, engram: bool = False, progress: Progress | None = None) -> None:
        """Read every tensor and raise one `CheckpointError` that names all with NaN or infinite values.

        The Engram tables (most of the bytes of a release) are read only if `engram` is set; without it their rows
        are checked as they are used.
        """
        names = [name for name in self.specs if engram or ".engram.embed." not in name]
        names.sort(key=lambda name: (self._entries[name].shard, self._entries[name].begin))  # one pass over the disk
        problems: list[str] = []
        for done, name in enumerate(names, 1):
            problems += _bad_values(name, self._view(name))
            if progress:
                progress(name, done, len(names))
        if problems:
            raise CheckpointError(self.path, problems)

    def _view(self, name: str) -> Tensor:
        """The whole tensor as a view of its mapped file."""
        entry = self._entries[name]
        if entry.shard not in self._shards:
            with (self.path / entry.shard).open("rb") as file:
                mapped = mmap.mmap(
                    file.fileno(),
                    0,
                    flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            self._shards[entry.shard] = torch.frombuffer(mapped, dtype=torch.uint8)
        data = self._shards[entry.shard][entry.begin : entry.end]
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.begin % dtype.itemsize:  # the format does not promise alignment
            data = data.clone()
        return data.view(dtype).view(entry.shape)


class EngramTable:
    """Rows of one Engram table, read from the mapped file as they are asked for.

    Row numbers count inside the rank's own table: `offsets[ngram size - 2][head]` is the first row of each head
    that the rank holds, and the row of a hash is `hash modulo prime + offset`.
    """

    def __init__(self, checkpoint: Checkpoint, layer: int, rank: int, world: int) -> None:
        self._checkpoint, self._rank, self._world = checkpoint, rank, world
        self.name = f"layers.{layer}.engram.embed"
        self.offsets = engram_offsets(checkpoint.config, layer, rank, world)
        spec = checkpoint.specs[f"{self.name}.weight"]
        self.num_rows, self.head_dim = spec.local_shape(rank, world)
        self.nbytes = sum(checkpoint.specs[f"{self.name}.{part}"].local_bytes(rank, world) for part in _TABLE_PARTS)
        # Each range of the file follows the last one of this rank: row + shift is its place in the file.
        ranges = spec.ranges(rank, world)
        sizes = torch.tensor([stop - start for start, stop in ranges])
        self._ends = sizes.cumsum(0)
        self._shifts = torch.tensor([start for start, _ in ranges]) - (self._ends - sizes)

    def rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., head_dim] e4m3 and scales [..., head_dim / 32] e8m0 on the CPU for row numbers `indices` [...].

        Raises IndexError outside the table, `CheckpointError` where a row holds NaN codes.
        """
        wanted = indices.detach().cpu().long()
        outside = (wanted < 0) | (wanted >= self.num_rows)
        if bool(outside.any()):
            first = int(wanted[outside][0])
            raise IndexError(f"{self.name}: row {first} asked for, the table has rows 0..{self.num_rows - 1}")
        flat = wanted.reshape(-1)
        in_file = flat + self._shifts[torch.bucketize(flat, self._ends, right=True)]
        read = []
        for part in _TABLE_PARTS:
            name = f"{self.name}.{part}"
            values = self._checkpoint._view(name)[in_file]
            problems = _bad_values(name, values, in_file.tolist())
            if problems:
                raise CheckpointError(self._checkpoint.path, problems)
            read.append(values.view(*wanted.shape, values.shape[-1]))
        return read[0], read[1]

    def load(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The whole table in memory of `device`: codes [num_rows, head_dim], scales [num_rows, head_dim / 32]."""
        codes, scales = (
            self._checkpoint.tensor(f"{self.name}.{part}", self._rank, self._world, device) for part in _TABLE_PARTS
        )
        if self._world == 1 and codes.device.type == "cpu":  # still views of the file
            return codes.clone(), scales.clone()
        return codes, scales

    def views(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of the whole table, of all ranks, in the mapped file; nothing is read or checked."""
        codes, scales = (self._checkpoint._view(f"{self.name}.{part}") for part in _TABLE_PARTS)
        return codes, scales

    def copy_to(self, codes: Tensor, scales: Tensor) -> None:
        """Read the rank's rows into uint8 `codes` [num_rows, head_dim] and `scales` [num_rows, head_dim / 32].

        In pieces, each of them checked. Raises `CheckpointError` on NaN.
        """
        ranges = self._checkpoint.specs[f"{self.name}.weight"].ranges(self._rank, self._world)
        step = max(1, _CHECK_BYTES // self.head_dim)
        for part, target in zip(_TABLE_PARTS, (codes, scales), strict=True):
            name, done = f"{self.name}.{part}", 0
            whole = self._checkpoint._view(name)
            for start, stop in (
                (first, min(first + step, end)) for begin, end in ranges for first in range(begin, end, step)
            ):
                piece = whole[start:stop]
                if problems := _bad_values(name, piece, range(start, stop)):
                    raise CheckpointError(self._checkpoint.path, problems)
                target[done : done + len(piece)] = piece.view(torch.uint8)
                done += len(piece)


_TABLE_PARTS = ("weight", "scale")


# -- values -----------------------------------------------------------------------------------------------------------


def _bad_values(name: str, tensor: Tensor, row_ids: Sequence[int] | None = None) -> list[str]:
    """A phrase for every NaN or infinity in `tensor` (at most `_LISTED_VALUES`, then a count). Packed fp4 has none.

    `row_ids` are the rows' numbers in the file, where they are not 0, 1, 2, ...
    """
    if tensor.dtype == torch.int8 or tensor.numel() == 0:
        return []
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(1, -1)
    step = max(1, _CHECK_BYTES // (matrix.shape[1] * matrix.element_size()))
    places: list[tuple[int, int]] = []
    count = 0
    for start in range(0, matrix.shape[0], step):
        piece = matrix[start : start + step]
        if piece.dtype == torch.float8_e8m0fnu:
            bad = piece.view(torch.uint8) == UE8M0_NAN
        elif piece.dtype == torch.float8_e4m3fn:
            bad = (piece.view(torch.uint8) & 0x7F) == 0x7F
        else:
            bad = ~torch.isfinite(piece)
        found = int(bad.sum())
        if found and len(places) < _LISTED_VALUES:
            places += [(start + row, column) for row, column in bad.nonzero()[:_LISTED_VALUES].tolist()]
        count += found
    phrases = [
        _describe(name, tensor.dtype, row_ids[row] if row_ids else row, column)
        for row, column in places[:_LISTED_VALUES]
    ]
    if count > len(phrases):
        phrases.append(f"{name}: {count - len(phrases)} more such values")
    return phrases


def _describe(name: str, dtype: torch.dtype, row: int, column: int) -> str:
    if dtype == torch.float8_e8m0fnu:
        rows = "row" if ".ffn.experts." in name or ".engram.embed." in name else "block row"
        return f"{name}: {rows} {row}, block {column}: scale byte {UE8M0_NAN} is NaN"
    if dtype == torch.float8_e4m3fn:
        return f"{name}: row {row}, column {column} (block {column // FP8_BLOCK}): fp8 code 0x7F or 0xFF is NaN"
    return f"{name}: row {row}, column {column}: not a finite number"


def _differences(
    specs: dict[str, TensorSpec], found: dict[str, tuple[str, tuple[int, ...]]], located: set[str]
) -> list[str]:
    """Tensors that are missing (and not `located` elsewhere), unknown, or not as specified, by name."""
    problems = []
    for name, spec in specs.items():
        if name not in found:
            if name not in located:
                problems.append(f"{name}: missing, expected {spec.dtype} {list(spec.shape)}")
            continue
        dtype, shape = found[name]
        if shape != spec.shape:
            problems.append(f"{name}: shape {list(shape)}, expected {list(spec.shape)}")
        if dtype != spec.dtype:
            problems.append(f"{name}: dtype {dtype}, expected {spec.dtype}")
    problems += [
        f"{name}: not a tensor of this model ({dtype} {list(shape)})"
        for name, (dtype, shape) in found.items()
        if name not in specs and not is_ignored(name)
    ]
    return problems


# -- writing ----------------------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write `directory` in the released layout: raw `config`, shards of `tensors`, index, and further `files`.

    UE8M0 scales may be given as uint8 codes. The directory appears complete or not at all; one that exists is replaced
    only with `overwrite`. Raises `CheckpointError` where the tensors are not those of `config`.
    """
    directory = Path(directory)
    if directory.exists() and not overwrite:
        raise FileExistsError(f"{directory}: exists; pass overwrite=True to replace it")
    specs = tensor_specs(ModelConfig.from_dict(config))
    typed = {name: _as_stored(tensor, specs.get(name)) for name, tensor in tensors.items()}
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    described = {name: (names.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in typed.items()}
    problems = _differences(specs, described, set())
    if problems:
        raise CheckpointError(directory, problems)
    shards = list(_pack(typed, max_shard_bytes))
    building = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, building / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in typed.values())}, "weight_map": weight_map}
    (building / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (building / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, content in (files or {}).items():
        (building / name).write_bytes(content)
    if directory.exists():
        replaced = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(replaced)
        building.rename(directory)
        shutil.rmtree(replaced)
    else:
        building.rename(directory)


def _as_stored(tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    if spec and spec.dtype == "F8_E8M0" and tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e8m0fnu)
    return tensor.detach().cpu().contiguous()


def _pack(tensors: dict[str, Tensor], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Runs of `tensors` in order, each within `max_shard_bytes` unless a single tensor is larger."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard
