"""What ranks must have and share before they start: requirements of each one, and facts that must be equal.

Every rank reports; the leader compares, and all fail with one message that lists every problem, or none does.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from flashstep.checkpoint import Checkpoint
from flashstep.doctor import Requirement
from flashstep.loading import weight_bytes
from flashstep.ranks.faults import AgreementError
from flashstep.shards import CheckpointError, read_headers

# Tensors of which some bytes are compared, and how many bytes of each. All of a small model; of a release enough to
# tell two trainings or two revisions apart without waiting for tens of thousands of reads.
_SAMPLED_TENSORS = 4096
_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class Report:
    """What a rank has (`requirements`), and what must be equal on all (`facts`, by phrase)."""

    rank: int
    requirements: tuple[Requirement, ...]
    facts: dict[str, str]


def report(path: Path, rank: int, world: int, device: str, threads: int, missing: str | None = None) -> Report:
    """What this process can say as `rank` of `world` on `device` about the model directory `path`.

    `missing` is the phrase of a requirement that a test takes away.
    """
    requirements = [_gloo()]
    try:
        needed = weight_bytes(Checkpoint.open(path), rank, world)
        requirements.append(Requirement("a readable checkpoint", True, str(path), ""))
    except (ValueError, OSError) as error:
        needed = 0
        requirements.append(Requirement("a readable checkpoint", False, str(error), "give a complete model directory"))
    if torch.device(device).type == "cuda":
        requirements += gpu_requirements(torch.device(device), needed)
    if missing is not None:
        requirements = [
            replace(each, met=False, found="taken away by a test") if each.phrase == missing else each
            for each in requirements
        ]
    facts = {
        "version of flashstep": metadata.version("flashstep"),
        "version of Python": platform.python_version(),
        "version of torch": f"{torch.__version__} ({str(torch.version.git_version)[:8]})",
        "CPU threads": str(threads),
        "kind of device": _kind(torch.device(device)),
        "config.json": _digest(path / "config.json"),
        "headers and sampled bytes of the weights": weights_digest(path),
    }
    return Report(rank, tuple(requirements), facts)


def compare(reports: Sequence[Report]) -> AgreementError | None:
    """The error with which all ranks fail, or None where they may start. Rank 0's facts are what others must share."""
    problems = [
        f"rank {each.rank}: {requirement.phrase}: {requirement.found}; {requirement.way_out}"
        for each in reports
        for requirement in each.requirements
        if not requirement.met
    ]
    first = reports[0]
    for each in reports[1:]:
        problems += [
            f"rank {each.rank}: {phrase}: {each.facts.get(phrase)}, but rank {first.rank} has {wanted}; "
            "all ranks need the same"
            for phrase, wanted in first.facts.items()
            if each.facts.get(phrase) != wanted
        ]
    return refusal(len(reports), problems)


def refusal(world: int, problems: Sequence[str]) -> AgreementError | None:
    """One error of all `problems`, or None where there are none."""
    if not problems:
        return None
    lines = problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems:", *problems])
    return AgreementError(f"tensor parallelism over {world} ranks cannot start: {lines}")


def gpu_requirements(device: torch.device, needed_bytes: int) -> list[Requirement]:
    """Whether GPU `device` exists and has room for `needed_bytes` of weights."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = Requirement(
        f"GPU {device}",
        (device.index or 0) < count,
        f"torch sees {count} GPUs",
        "take fewer ranks (--tensor-parallel-size), or let CUDA_VISIBLE_DEVICES name more GPUs",
    )
    if not present.met:
        return [present]
    return [present, room(device, *torch.cuda.mem_get_info(device), needed_bytes)]


def room(device: torch.device, free_bytes: int, total_bytes: int, needed_bytes: int) -> Requirement:
    """Whether `free_bytes` of a GPU hold a rank's weights."""
    return Requirement(
        f"free memory on {device}",
        free_bytes >= needed_bytes,
        f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are free, the rank's weights take "
        f"{needed_bytes / 2**30:.1f} GiB",
        "the GPU is busy (nvidia-smi names the processes) or too small: free it, or take more ranks",
    )


def weights_digest(path: Path) -> str:
    """A digest of the tensors' names, shapes and places in directory `path`, and of some bytes of the tensors."""
    try:
        entries, _ = read_headers(path)
    except (CheckpointError, OSError) as error:
        return f"unreadable: {str(error).splitlines()[0]}"
    hashed = hashlib.blake2b(digest_size=8)
    files: dict[str, int] = {}
    try:
        step = -(-len(entries) // _SAMPLED_TENSORS)
        for number, (name, entry) in enumerate(sorted(entries.items())):
            hashed.update(f"{name} {entry}\n".encode())
            if number % step:
                continue
            if entry.shard not in files:
                files[entry.shard] = os.open(path / entry.shard, os.O_RDONLY)
            middle = (entry.begin + entry.end) // 2
            begin = max(entry.begin, middle - _SAMPLE_BYTES // 2)
            hashed.update(os.pread(files[entry.shard], min(_SAMPLE_BYTES, entry.end - begin), begin))
    finally:
        for file in files.values():
            os.close(file)
    return hashed.hexdigest()


def _gloo() -> Requirement:
    usable = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    found = f"torch {torch.__version__} has {'it' if usable else 'none'}"
    return Requirement("the gloo collectives", usable, found, "install a build of torch with distributed support")


def _kind(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (SM{major}{minor})"


def _digest(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
