"""What loading for the kernels needs is known, said and compared with what is free before anything is read."""

from __future__ import annotations

import logging

import pytest
import torch

from flashstep import doctor
from flashstep.config import ModelConfig
from flashstep.loading import BUNDLED_MODEL
from flashstep.memory import Need, check_memory
from flashstep.specialized import loading
from flashstep.specialized.loading import load_specialized

GPU, CPU = torch.device("cuda"), torch.device("cpu")
CONFIG = ModelConfig.from_file(BUNDLED_MODEL)


def test_needs_follow_the_placement():
    on_device, pinned, mapped = (Need.of(CONFIG, engram, GPU) for engram in ("device", "pinned", "mapped"))
    tables = sum(CONFIG.engram_num_embeddings) * (CONFIG.engram_head_dim + CONFIG.engram_head_dim // 32)
    assert {need.tables for need in (on_device, pinned, mapped)} == {tables}
    assert on_device.device == mapped.device + tables
    assert pinned.device == mapped.device
    assert [need.host for need in (on_device, pinned, mapped)] == [0, tables, 0]
    halves = [Need.of(CONFIG, "pinned", GPU, rank, 2) for rank in (0, 1)]
    assert sum(need.tables for need in halves) == tables
    assert Need.of(CONFIG, "device", CPU).host == on_device.device


def test_the_need_covers_what_loading_takes():
    """The packed weights themselves, counted."""
    from flashstep import packed_weights as packed

    made = packed.read(CONFIG, packed.RandomSource(CONFIG, 0, 1, CPU))
    seen: dict[int, int] = {}

    def count(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, tuple | list):
            for item in value:
                count(item)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, ModelConfig):
            for name in value.__dataclass_fields__:
                count(getattr(value, name))

    count(made)
    need = Need.of(CONFIG, "device", CPU).host
    assert 0.5 * need < sum(seen.values()) <= need


@pytest.mark.parametrize(
    ("engram", "free", "words"),
    [
        (
            "device",
            (10**6, 10**12),
            ["GB of the device's memory are needed, 0.00 GB are free", "placement pinned", "mapped"],
        ),
        ("pinned", (10**12, 10**5), ["of the host's memory are needed", "placement device", "mapped"]),
        ("mapped", (10**6, 10**12), ["of the device's memory", "placement device", "placement pinned", "more ranks"]),
    ],
)
def test_too_little_is_refused_with_the_ways_out(engram, free, words):
    with pytest.raises(ValueError, match="Engram tables: " + engram) as refusal:
        check_memory(Need.of(CONFIG, engram, GPU), free, engram)
    for word in words:
        assert word in str(refusal.value)


def test_enough_is_said(caplog):
    with caplog.at_level(logging.INFO, "flashstep.loading"):
        check_memory(Need.of(CONFIG, "pinned", GPU), (10**12, None), "pinned")
    assert "of the device's memory, 1000.00 GB are free" in caplog.text
    assert "of the host's memory, how much is free is not known" in caplog.text


def test_nothing_is_read_where_it_does_not_fit(monkeypatch):
    read: list[object] = []
    monkeypatch.setattr(loading.packed, "read", lambda *a, **k: read.append(a))
    need = Need.of(CONFIG, "device", CPU)
    monkeypatch.setattr("flashstep.portable.loading.free_memory", lambda device: (None, need.host - 1))
    with pytest.raises(ValueError, match="--engram-placement mapped"):
        load_specialized(device="cpu")
    assert read == []


def test_free_memory_of_the_host_is_within_the_limits(monkeypatch):
    free = doctor.free_host_memory()
    assert free is not None
    assert free > 0
    monkeypatch.setattr(doctor, "_cgroup", {"memory.max": 10**8, "memory.current": 10**8 - 5}.get)
    limited = doctor.free_host_memory()
    assert limited is not None
    assert limited >= 5
    assert limited <= free
