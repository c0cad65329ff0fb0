"""Which backend runs the steps: the best one that this machine supports, or the one that was asked for by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashstep import doctor
from flashstep.loading import BUNDLED_MODEL, LoadedModel, load
from flashstep.stages.engram.tables import Placement

AUTO, SPECIALIZED, PORTABLE, REFERENCE = "auto", "latency_specialized", "portable", "reference"
NAMES = (AUTO, SPECIALIZED, PORTABLE, REFERENCE)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choice:
    """A backend and the device that it runs on."""

    backend: str
    device: str


def choose(name: str, device: str | None, *, world: int = 1) -> Choice:
    """The backend `name` on `device` (None: the backend's own kind of device) for `world` ranks.

    `auto` takes the specialized kernels, else the portable ones, where every requirement is met and no other device
    was asked for, else the reference. Raises ValueError that lists every missing requirement of a backend that was
    asked for by name. The portable kernels also run on a CPU, in Triton's interpreter, where TRITON_INTERPRET=1 says
    that somebody wants to test them.
    """
    if name not in NAMES:
        raise ValueError(f"--decode-backend {name}: expected one of {', '.join(NAMES)}")
    if name == REFERENCE:
        return Choice(REFERENCE, device or "cpu")
    if world > 1:
        if name == AUTO:
            return Choice(REFERENCE, device or "cpu")
        raise ValueError(f"--decode-backend {name} runs on one rank so far: {world} ranks run the {REFERENCE}")
    found = {backend.name: backend for backend in doctor.backends()}
    if name == AUTO:
        on_gpu = device is None or device.startswith("cuda")
        for backend in (SPECIALIZED, PORTABLE):
            if on_gpu and found[backend].available:
                return Choice(backend, device or "cuda")
        return Choice(REFERENCE, device or "cpu")
    if name == PORTABLE and os.environ.get("TRITON_INTERPRET") == "1" and device in (None, "cpu"):
        return Choice(PORTABLE, "cpu")
    missed = [requirement for requirement in found[name].requirements if not requirement.met]
    if device is not None and not device.startswith("cuda"):
        raise ValueError(f"--decode-backend {name} runs on a GPU, --device is {device}: leave it out or give cuda")
    if missed:
        listed = "; ".join(f"{r.phrase}: {r.found} -> {r.way_out}" for r in missed)
        raise ValueError(f"--decode-backend {name} cannot run here: {listed}")
    return Choice(name, device or "cuda")


def load_for(
    choice: Choice,
    path: Path | None,
    *,
    random_weights: bool = False,
    num_layers: int | None = None,
    engram: Placement | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model directory `path` (None: the bundled model) for a backend.

    random_weights, num_layers: see `read_packed`; only kernels are timed that way. engram: where Engram tables lie
    (None: on the device for kernels, in the mapped files for the reference). Raises as `loading.load`.
    """
    path = BUNDLED_MODEL if path is None else path
    if choice.backend == SPECIALIZED:
        from flashstep.specialized.loading import load_specialized

        return load_specialized(
            path,
            device=choice.device,
            random_weights=random_weights,
            num_layers=num_layers,
            engram=engram or "device",
            progress=progress,
        )
    if choice.backend == PORTABLE:
        from flashstep.portable.loading import load_portable

        return load_portable(
            path,
            device=choice.device,
            random_weights=random_weights,
            num_layers=num_layers,
            engram=engram or "device",
            progress=progress,
        )
    if random_weights or num_layers is not None:
        raise ValueError(
            f"--load-format random and --num-layers time the backends {SPECIALIZED} and {PORTABLE}; this run uses "
            f"{choice.backend}"
        )
    if engram == "pinned":
        raise ValueError("--engram-placement pinned is read by kernels: the reference takes device or mapped")
    return load(path, device=choice.device, engram=engram or "mapped", progress=progress)
