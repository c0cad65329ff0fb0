"""The Engram's Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics, decode_fp8_rows, fp8_quantize, ue8m0_encode
from flashstep.loading import BUNDLED_MODEL
from flashstep.stages.attention.portable import Batch
from flashstep.stages.engram import portable, reference
from flashstep.stages.engram.cuda import Hash
from flashstep.state import Rows, State

NUM = Numerics()
CONFIG = ModelConfig.from_file(BUNDLED_MODEL)
PAD = 2


def ids(count: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.engram_compressed_vocab_size, (count,), generator=random, dtype=torch.int32)


def table(layer: int, device: torch.device, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """Codes and scales of a rank's table: all that hashing can reach, each row another."""
    random = torch.Generator().manual_seed(layer)
    whole = CONFIG.engram_num_embeddings[layer]
    codes = torch.randint(0, 256, (whole, CONFIG.engram_head_dim), generator=random, dtype=torch.uint8) & 0xBF
    scales = torch.randint(120, 130, (whole, CONFIG.engram_head_dim // 32), generator=random, dtype=torch.uint8)
    if world > 1:
        first, last = (CONFIG.engram_n_heads * r // world for r in (rank, rank + 1))
        kept, start = [], 0
        for heads in CONFIG.engram_primes[layer]:
            edges = list(itertools.accumulate(heads, initial=start))
            kept.append(torch.arange(edges[first], edges[last]))
            start = edges[-1]
        codes, scales = codes[torch.cat(kept)], scales[torch.cat(kept)]
    return codes.to(device), scales.to(device)


def history_of(tokens: Tensor) -> Tensor:
    """Each token and those before it, as `reference.row_ids` takes them."""
    size = CONFIG.engram_max_ngram_size
    padded = torch.cat((torch.full((size - 1,), PAD), tokens.long()))
    return padded.unfold(0, size, 1).flip(-1)


@pytest.mark.parametrize("sizes", [[1], [40], [1, 2, 3, 4, 5, 6, 19], [30, 1, 1, 8]])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_two_requests_in_chunks(sizes, world, device):
    """A short ring, so that chunks are longer than it: what lies in this forward must not come from there."""
    state = State(CONFIG, num_slots=3, page_tokens=4, rows_per_request=6, chunk_rows=64, device=device)
    state.history = torch.full((3, 9), -99, dtype=torch.int32, device=device)
    tokens = (ids(sum(sizes), 1), ids(sum(sizes), 2))
    wanted = [reference.row_ids(history_of(each), CONFIG) for each in tokens]
    done = 0
    for size in sizes:
        rows = Rows.of([(2, done, [0] * size), (0, done, [0] * size)], device)
        batch = Batch.of(rows.positions.int(), rows.slots.int())
        part = torch.cat([each[done : done + size] for each in tokens]).to(device)
        for layer in range(2):
            check(batch, part, state.history, layer, torch.cat([w[done : done + size, layer] for w in wanted]), world)
        portable.write_history(part, batch, state.history)
        done += size
    assert (state.history[1] == -99).all()


def check(batch: Batch, part: Tensor, history: Tensor, layer: int, wanted: Tensor, world: int) -> None:
    device = part.device
    values = decode_fp8_rows(*(x.cpu() for x in as_fp8(*table(layer, torch.device("cpu")))))[wanted]
    for rank in range(world):
        hash = Hash.of(CONFIG, rank, world, device)
        codes, scales, numbers = portable.rows(
            part, batch, history, CONFIG, hash, layer, *table(layer, device, rank, world), PAD
        )
        heads = CONFIG.engram_n_heads // world
        own = values.unflatten(1, (-1, CONFIG.engram_n_heads))[:, :, rank * heads : (rank + 1) * heads].flatten(1, 2)
        want_codes, want_scales = fp8_quantize(own.flatten(1))
        assert torch.equal(codes.cpu(), want_codes.view(torch.uint8))
        assert torch.equal(scales.cpu(), ue8m0_encode(want_scales))
        if world == 1:
            assert torch.equal(numbers.cpu(), wanted)


def as_fp8(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return codes.view(torch.float8_e4m3fn), scales


def test_inactive_rows_leave_everything_alone(device):
    history = torch.full((2, 12), 5, dtype=torch.int32, device=device)
    positions, slots = torch.tensor([0, 1, 0], device=device).int(), torch.tensor([-1, -1, 1], device=device).int()
    batch = Batch.of(positions, slots)
    portable.write_history(ids(3).to(device), batch, history)
    wanted = torch.full((2, 12), 5, dtype=torch.int32)
    wanted[1, 0] = ids(3)[2]
    assert torch.equal(history.cpu(), wanted)
    codes, _, _ = portable.rows(
        ids(3).to(device), batch, history, CONFIG, Hash.of(CONFIG, 0, 1, device), 0, *table(0, device), PAD
    )
    assert not codes[:2].any()


def test_no_rows(device):
    batch = Batch.of(*(torch.empty(0, dtype=torch.int32, device=device) for _ in range(2)))
    history = torch.zeros(1, 12, dtype=torch.int32, device=device)
    hash = Hash.of(CONFIG, 0, 1, device)
    codes, _, numbers = portable.rows(batch.slots, batch, history, CONFIG, hash, 0, *table(0, device), PAD)
    assert codes.shape == (0, 12 * CONFIG.engram_head_dim)
    assert numbers.shape == (0, 12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_a_table_in_pinned_memory(device):
    batch = Batch.of(torch.arange(7, device=device).int(), torch.zeros(7, device=device).int())
    history = torch.zeros(1, 12, dtype=torch.int32, device=device)
    hash = Hash.of(CONFIG, 0, 1, device)
    on_device = table(1, device)
    pinned = [part.cpu().pin_memory() for part in on_device]
    found = [portable.rows(ids(7).to(device), batch, history, CONFIG, hash, 1, *t, PAD) for t in (on_device, pinned)]
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [256, 320])
def test_inject(dtype, hidden, device):
    random = torch.Generator(device).manual_seed(hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    config = replace(CONFIG, hidden_size=hidden)
    rows = 9
    stream, projected = normal(rows, 4, hidden).bfloat16(), normal(rows, 5 * hidden).to(dtype)
    stream[1] = 0  # a root of zero
    projected[2] = 0
    stream[3] *= 1e-12
    q, k = ((1 + 0.1 * normal(4, hidden)).bfloat16() for _ in range(2))
    kv = projected.bfloat16().unflatten(1, (5, hidden))
    weights = reference.Weights(None, q, k)  # type: ignore[arg-type]
    wanted = (stream + reference.gate(stream, kv[:, :-1], weights, config) * kv[:, -1:].double()).bfloat16()
    out = torch.full_like(stream, torch.nan)
    portable.inject(stream, projected, q, k, out, config)
    assert (out.float() - wanted.float()).abs().max() <= 2.0**-7 * wanted.abs().max()
    assert (out != wanted).float().mean() < 0.002
    assert (wanted != stream).any()
    portable.inject(stream, projected, q, k, stream, config)
    assert torch.equal(stream, out)
