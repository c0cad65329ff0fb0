"""Every kernel of every stage compiles for every architecture, at the released shapes, without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import Any

import pytest

import flashstep.stages
from flashstep import jit


def stages_with_kernels() -> list[str]:
    """Names of the stages' modules that launch kernels."""
    stages = [f"flashstep.stages.{m.name}" for m in pkgutil.iter_modules(flashstep.stages.__path__) if m.ispkg]
    return [f"{stage}.cuda" for stage in stages if importlib.util.find_spec(f"{stage}.cuda")]


def registered() -> list[Any]:
    """The sources that the stages list, each with the constants of the released shapes."""
    return [
        pytest.param(source, constants, id=f"{name.split('.')[2]}-{source.path.stem}")
        for name in stages_with_kernels()
        for source, constants in getattr(importlib.import_module(name), "SOURCES", [])
    ]


@pytest.mark.parametrize("name", stages_with_kernels())
def test_every_stage_lists_its_sources(name):
    listed = {source.path.name for source, _ in importlib.import_module(name).SOURCES}
    files = (jit.STAGES / name.split(".")[2]).glob("*.cu")
    assert listed >= {path.name for path in files}


@pytest.mark.parametrize("architecture", jit.ARCHITECTURES)
@pytest.mark.parametrize(("source", "constants"), registered())
def test_every_kernel_compiles_and_hot_ones_do_not_spill(source, constants, architecture):
    binary = jit.compile_for(source, architecture, **constants)
    assert set(binary.reported) >= set(source.kernels)
    assert {name: binary.resources(name).spilled for name in source.hot} == dict.fromkeys(source.hot, 0)
