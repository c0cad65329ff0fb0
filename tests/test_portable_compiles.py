"""Every portable kernel compiles for NVIDIA and AMD at the released shapes, without a GPU; what it needs fits."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

import flashstep.stages

TARGETS = {  # architecture: backend, threads of a warp, bytes of shared memory that a program may have
    "90": ("cuda", 32, 227 * 1024),
    "100": ("cuda", 32, 227 * 1024),
    "gfx942": ("hip", 64, 64 * 1024),
    "gfx950": ("hip", 64, 160 * 1024),
}


def portable_modules() -> list[str]:
    stages = [f"flashstep.stages.{m.name}" for m in pkgutil.iter_modules(flashstep.stages.__path__) if m.ispkg]
    return [f"{stage}.portable" for stage in stages if importlib.util.find_spec(f"{stage}.portable")]


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("module", portable_modules())
def test_portable_kernels_compile_and_do_not_spill(module, architecture):
    """In a process of its own: where there is no GPU, the tests' own Triton interprets."""
    root = Path(flashstep.__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, module, architecture]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels
    most = TARGETS[architecture][2]
    too_large = {name: used for name, used, _ in kernels if used > most}
    assert not too_large, f"bytes of shared memory, of {most}: {too_large}"
    assert {name: spilled for name, _, spilled in kernels if spilled} == {}


def compile_module(module: str, architecture: str) -> list[tuple[str, int, int]]:
    """Name, bytes of shared memory and bytes of stack of every kernel that `module` lists."""
    kernels = importlib.import_module(module).KERNELS
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, warp, _ = TARGETS[architecture]
    target = GPUTarget(backend, int(architecture) if backend == "cuda" else architecture, warp)
    found = []
    for build in (build for build in kernels if backend in build.backends):
        names = build.kernel.arg_names
        multiples = [n for n, t in build.arguments.items() if t[0] == "*" or t.endswith(":16")]
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples}
        signature = {n: build.arguments.get(n, "constexpr").removesuffix(":16") for n in names}
        source = ASTSource(build.kernel, signature, {(names.index(n),): v for n, v in build.constants.items()}, aligned)
        options = {"num_warps": build.warps, "num_stages": build.stages}
        compiled = triton.compile(source, target=target, options=options)
        found.append((build.kernel.__name__, compiled.metadata.shared, stack(compiled, backend)))
    return found


def stack(compiled, backend: str) -> int:
    """Bytes of memory that a thread has beside its registers."""
    if backend == "hip":
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[1])
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


if __name__ == "__main__":
    print(json.dumps(compile_module(*sys.argv[1:])))
