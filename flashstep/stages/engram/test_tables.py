"""Placements of Engram tables: the same rows wherever they lie, for every rank."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flashstep import jit
from flashstep.checkpoint import Checkpoint
from flashstep.layout import engram_offsets
from flashstep.loading import BUNDLED_MODEL
from flashstep.shards import CheckpointError
from flashstep.stages.engram import tables
from flashstep.stages.engram.cuda import Hash
from flashstep.tiny import random_checkpoint, small_config


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(BUNDLED_MODEL)


@pytest.mark.parametrize("placement", tables.PLACEMENTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_finds_its_rows(device, checkpoint, placement, world):
    if placement == "mapped" and not jit.emulated(device) and not tables.reads_mapped_files(device):
        pytest.skip("this GPU does not read mapped files")
    config = checkpoint.config
    for index, layer in enumerate(config.engram_layer_ids):
        whole = checkpoint.engram_table(layer).load()
        for rank in range(world):
            found = tables.place(checkpoint.engram_table(layer, rank, world), placement, device)
            hash = Hash.of(config, rank, world, torch.device("cpu"), whole=found.whole)
            heads = config.engram_n_heads // world
            # The first and the last row of every head of the rank, by the numbers of the whole table.
            first = [offsets[rank * heads + i] for offsets in engram_offsets(config, layer) for i in range(heads)]
            ends = hash.primes[index] - 1
            for place, start in (
                (hash.offsets[index], torch.tensor(first)),
                (hash.offsets[index] + ends, torch.tensor(first) + ends),
            ):
                for got, want in zip((found.codes, found.scales), whole, strict=True):
                    assert torch.equal(got.cpu()[place], want.view(torch.uint8)[start])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_locked_memory_is_read_by_the_gpu_and_given_back(device, monkeypatch):
    monkeypatch.setattr(tables, "_LOCK_BYTES", 1 << 20)
    for _ in range(3):  # again at the same address, as likely as not: it must have been unlocked
        memory = tables.locked(5 << 19, device)
        assert memory.is_pinned()
        assert jit.Params("K", [("x", "const u8*")]).pack({"x": memory}, device)[0] == memory.data_ptr()
        del memory


def test_a_refusal_to_lock_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tables.jit, "emulated", lambda device: False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: 304))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(OSError, match=r"page-lock 100 bytes .* 304; .*--engram-placement device or mapped"):
        tables.locked(100, torch.device("cuda"))


def test_bad_rows_are_found_as_they_are_copied(tmp_path, device):
    directory = random_checkpoint(small_config(), tmp_path / "model")
    checkpoint = Checkpoint.open(directory)
    table = checkpoint.engram_table(1)
    codes, _ = table.views()
    codes.view(torch.uint8)[7, 3] = 0x7F  # private memory: the file stays as it is
    with pytest.raises(CheckpointError, match=r"layers\.1\.engram\.embed\.weight: row 7, column 3"):
        tables.place(table, "pinned", device)
