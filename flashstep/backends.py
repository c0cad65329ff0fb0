"""Which backend runs the steps: the best one that this machine supports, or the one that was asked for by name."""

from __future__ import annotations

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

    `auto` takes the specialized kernels where every requirement is met and no other device was asked for, else the
    reference. Raises ValueError that lists every missing requirement of a backend that was asked for by name.
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
        if on_gpu and found[SPECIALIZED].available:
            return Choice(SPECIALIZED, device or "cuda")
        return Choice(REFERENCE, device or "cpu")
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

    random_weights, num_layers: see `load_specialized`; only the specialized kernels are timed that way. engram: where
    Engram tables lie (None: on the device for kernels, in the mapped files for the reference). Raises as
    `loading.load`.
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
    if random_weights or num_layers is not None:
        raise ValueError(
            f"--load-format random and --num-layers time the backend {SPECIALIZED}; this run uses {choice.backend}"
        )
    if engram == "pinned":
        raise ValueError("--engram-placement pinned is read by kernels: the reference takes device or mapped")
    return load(path, device=choice.device, engram=engram or "mapped", progress=progress)
