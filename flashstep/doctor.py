"""What this machine can run: every backend, each of its requirements met or missed, and the way out.

Start-up and `flashstep doctor` ask the same functions, so that a refusal at start is explained by the same words.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from flashstep import jit
from flashstep.loading import BUNDLED_MODEL

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Requirement:
    """One thing a backend needs: a phrase, whether this machine has it, what was found, and what to do if not."""

    phrase: str
    met: bool
    found: str
    way_out: str


@dataclass(frozen=True)
class Backend:
    """One way to run a step, and what it needs."""

    name: str
    role: str
    requirements: list[Requirement]

    @property
    def available(self) -> bool:
        """Whether every requirement is met."""
        return all(requirement.met for requirement in self.requirements)


def backends() -> list[Backend]:
    """Every backend of the design with its requirements, judged on this machine."""
    common = [_python(), _torch(), _bundled_model()]
    return [
        Backend("reference", "exact PyTorch on the CPU or any one GPU; the judge of all others", common),
        Backend(
            "portable",
            "prefill, mixed steps and any batch on NVIDIA and AMD GPUs",
            [*common, _gpu(), _portable_gpu(), _triton()],
        ),
        Backend(
            "latency_specialized",
            "the whole step as one graph: proven on H200; compiled for B200 and GB300, not run there",
            [*common, _gpu(), _specialized_gpu(), _compiler()],
        ),
    ]


def backend(name: str) -> Backend:
    """The backend `name`."""
    return next(found for found in backends() if found.name == name)


def print_report(*, as_json: bool = False) -> int:
    """Print the machine and every backend. Returns 0 where at least the reference can run, else 1."""
    found = backends()
    usable = [backend.name for backend in found if backend.available]
    if as_json:
        record = {"machine": _machine(), "usable": usable, "backends": [asdict(backend) for backend in found]}
        print(json.dumps(record, indent=2))
        return 0 if usable else 1
    console = Console(highlight=False)
    for key, value in _machine().items():
        console.print(Text(f"{key:>10}  {value}"))
    said: set[str] = set()
    for backend in found:
        console.print()
        verdict = Text("yes", style="green") if backend.available else Text("no", style="red")
        console.print(Text.assemble((backend.name, "bold"), f" ({backend.role}): ", verdict), soft_wrap=True)
        for requirement in backend.requirements:
            if requirement.phrase in said:  # backends share their first requirements
                continue
            said.add(requirement.phrase)
            mark, style = ("met   ", "green") if requirement.met else ("missed", "red")
            line = Text.assemble("  ", (mark, style), f" {requirement.phrase}: {requirement.found}")
            console.print(line, soft_wrap=True)
            if not requirement.met:
                console.print(Text(f"         -> {requirement.way_out}"), soft_wrap=True)
    console.print()
    console.print(Text(f"--decode-backend auto takes: {usable[-1] if usable else 'nothing, see the misses above'}"))
    return 0 if usable else 1


# -- requirements -----------------------------------------------------------------------------------------------------


def _python() -> Requirement:
    version = sys.version_info
    return Requirement(
        "Python 3.11 to 3.13",
        (3, 11) <= version[:2] <= (3, 13),
        platform.python_version(),
        "make the virtual environment with one of these versions",
    )


def _torch() -> Requirement:
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, OLDEST_TORCH))
    return Requirement(
        f"torch {wanted} or newer", numbers >= OLDEST_TORCH, torch.__version__, f"pip install 'torch>={wanted}'"
    )


def _bundled_model() -> Requirement:
    wanted = [BUNDLED_MODEL / name for name in ("config.json", "tokenizer.json", "model.safetensors.index.json")]
    absent = [path.name for path in wanted if not path.is_file()]
    return Requirement(
        "the bundled model", not absent, f"missing {', '.join(absent)}" if absent else "present", "reinstall flashstep"
    )


def _gpu() -> Requirement:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    found = f"{count} x {', '.join(names)}" if count else f"none seen by torch {torch.__version__}"
    way_out = "run on a machine with a GPU, with a CUDA or ROCm build of torch and a driver that it accepts"
    return Requirement("a GPU", count > 0, found, way_out)


def _specialized_gpu() -> Requirement:
    phrase = "an architecture with specialized kernels (SM90, SM100, SM103)"
    way_out = "use --decode-backend reference here"
    if not torch.cuda.is_available():
        return Requirement(phrase, False, "no GPU", way_out)
    if torch.version.hip:
        name = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return Requirement(phrase, False, name, way_out)
    major, minor = torch.cuda.get_device_capability(0)
    return Requirement(phrase, (major, minor) in ((9, 0), (10, 0), (10, 3)), f"SM{major}{minor}", way_out)


def _portable_gpu() -> Requirement:
    phrase = "a GPU with bf16 matrix products (SM80 or newer, CDNA 2 or newer)"
    way_out = "use --decode-backend reference here"
    if not torch.cuda.is_available():
        return Requirement(phrase, False, "no GPU", way_out)
    if torch.version.hip:
        name = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return Requirement(phrase, name in ("gfx90a", "gfx942", "gfx950"), name, way_out)
    major, minor = torch.cuda.get_device_capability(0)
    return Requirement(phrase, major >= 8, f"SM{major}{minor}", way_out)


def _triton() -> Requirement:
    phrase = "Triton 3.4 or newer, which compiles the portable kernels"
    way_out = "pip install 'triton>=3.4' (ROCm builds of torch bring their own)"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        try:
            version = metadata.version("pytorch-triton-rocm")
        except metadata.PackageNotFoundError:
            return Requirement(phrase, False, "not installed", way_out)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return Requirement(phrase, numbers >= (3, 4), version, way_out)


def _compiler() -> Requirement:
    phrase = "NVRTC, which compiles the kernels (no toolkit needed)"
    way_out = "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as problem:
        return Requirement(phrase, False, str(problem).partition("\n")[0], way_out)
    return Requirement(phrase, int(error) == 0, f"NVRTC {major}.{minor}", way_out)


# -- the machine ------------------------------------------------------------------------------------------------------


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "flashstep": metadata.version("flashstep"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cores": f"{cores}, torch uses {torch.get_num_threads()} threads",
        "memory": _memory(),
        "gpu": _gpu().found,
        "model": str(BUNDLED_MODEL),
        "kernels": f"{jit.cache_bytes() / 2**20:.1f} of at most {jit.CACHE_BYTES >> 20} MiB in {jit.cache_directory()}",
    }


def _memory() -> str:
    """Memory of the machine and, where a cgroup sets one, the lower limit of this process."""
    if not hasattr(os, "sysconf"):
        return "unknown"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / 2**30:.1f} GiB"
    limit = _cgroup("memory.max")
    return text if limit is None or limit >= total else f"{text}, this process may use {limit / 2**30:.1f} GiB"


def _cgroup(name: str) -> int | None:
    """A number of this process's cgroup; None where there is none, or it is no limit."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None


def free_host_memory() -> int | None:
    """Bytes that this process can still take on the host; files that are cached give way. None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is None or used is None:
        return free
    try:
        counted = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        cached = int(counted["active_file"]) + int(counted["inactive_file"])
    except (OSError, ValueError, KeyError):
        cached = 0
    return min(free, max(0, limit - used + cached))
