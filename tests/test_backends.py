"""Which backend runs: the choice by what a machine has, and its refusals."""

from __future__ import annotations

import pytest

from flashstep import backends, doctor
from flashstep.backends import Choice, choose
from flashstep.doctor import Backend, Requirement


@pytest.fixture
def machine(monkeypatch):
    """Say which backends of kernels this machine can run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def has(*available: str) -> None:
        def judged(name: str) -> Backend:
            return Backend(name, "", [Requirement("a thing", name in available, "not this", "get the thing")])

        monkeypatch.setattr(doctor, "backends", lambda: [judged(name) for name in backends.NAMES[1:]])

    return has


@pytest.mark.parametrize(
    ("available", "device", "wanted"),
    [
        (("latency_specialized", "portable"), None, Choice("latency_specialized", "cuda")),
        (("portable",), None, Choice("portable", "cuda")),
        (("portable",), "cuda:1", Choice("portable", "cuda:1")),
        (("portable", "latency_specialized"), "cpu", Choice("reference", "cpu")),
        ((), None, Choice("reference", "cpu")),
    ],
)
def test_auto_takes_the_best(machine, available, device, wanted):
    machine(*available)
    assert choose("auto", device) == wanted


def test_what_is_asked_for_by_name_says_what_is_missing(machine):
    machine()
    with pytest.raises(ValueError, match="--decode-backend portable cannot run here: a thing: not this -> get the"):
        choose("portable", None)
    machine("portable")
    assert choose("portable", None) == Choice("portable", "cuda")
    with pytest.raises(ValueError, match="runs on a GPU, --device is cpu"):
        choose("portable", "cpu")
    with pytest.raises(ValueError, match="runs on one rank so far"):
        choose("portable", None, world=2)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_interpreter_runs_it_on_a_cpu_for_those_who_ask_triton(machine, monkeypatch, device):
    machine()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("portable", device) == Choice("portable", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "true")  # as our own tests' set-up leaves it
    with pytest.raises(ValueError, match="--decode-backend portable"):
        choose("portable", device)


def test_the_doctor_names_what_the_portable_kernels_need():
    found = doctor.backend("portable")
    phrases = [requirement.phrase for requirement in found.requirements]
    assert any("Triton" in phrase for phrase in phrases)
    assert any("bf16" in phrase for phrase in phrases)
