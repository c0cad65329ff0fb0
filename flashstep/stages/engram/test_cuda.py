"""Engram rows on the device against the reference: numbers, history and quantized rows, all exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import decode_fp8_rows, fp8_quantize, ue8m0_encode
from flashstep.layout import engram_offsets
from flashstep.stages.engram import cuda, reference
from flashstep.tiny import small_config

torch.set_num_threads(1)

RING = 21  # no power of two


@dataclass
class Bench:
    """A rank's tables, and the history on the device and as plain lists of all tokens."""

    config: ModelConfig
    device: torch.device
    rank: int
    world: int
    token_map: Tensor
    guarded: Tensor  # the history behind a slot that nobody may write
    tables: list[Tensor]
    table_scales: list[Tensor]
    hash: cuda.Hash

    @classmethod
    def make(cls, device: torch.device, rank: int = 0, world: int = 1, slots: int = 3) -> Bench:
        config = ModelConfig.from_dict(small_config())
        draws = torch.Generator().manual_seed(rank * 10 + world)
        hash_ = cuda.Hash.of(config, rank, world, device)
        dim = config.engram_head_dim
        tables, scales = [], []
        for layer in range(len(config.engram_layer_ids)):
            rows = int((hash_.offsets[layer] + hash_.primes[layer]).max())
            codes = torch.randint(0, 256, (rows, dim), generator=draws, dtype=torch.uint8)
            codes[codes & 0x7F == 0x7F] = 0  # NaN, which a checkpoint does not hold
            codes[::5, : dim // 2] = 0  # amax below the floor of the scale
            tables.append(codes.to(device))
            scales.append(torch.randint(90, 140, (rows, dim // 32), generator=draws, dtype=torch.uint8).to(device))
        token_map = torch.randint(0, 300, (config.vocab_size,), generator=draws, dtype=torch.int32)
        guarded = torch.full((slots + 1, RING), 2**30, dtype=torch.int32, device=device)  # poison: no compressed id
        return cls(config, device, rank, world, token_map.to(device), guarded, tables, scales, hash_)

    @property
    def history(self) -> Tensor:
        return self.guarded[1:]

    def run(
        self, tokens: list[int], positions: list[int], slots: list[int], with_tables: bool = True
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Row numbers, codes and scales; outputs are poisoned before."""

        def rows(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        tiles, columns = -(-len(tokens) // 8), self.hash.primes.shape[1]
        width, layers = columns * self.config.engram_head_dim, len(self.tables)
        ids = torch.full((len(tokens), layers, columns), -1, dtype=torch.int64, device=self.device)
        codes = [
            torch.full((tiles, width // 16, 8, 16), 0x7F, dtype=torch.uint8, device=self.device) for _ in self.tables
        ]
        scales = [torch.full((tiles, width // 32, 8), 0x7F, dtype=torch.uint8, device=self.device) for _ in self.tables]
        for launch in cuda.engram_rows(
            self.device,
            self.config,
            row_token=rows(tokens),
            row_position=rows(positions),
            row_slot=rows(slots),
            token_map=self.token_map,
            history=self.history,
            hash=self.hash,
            tables=self.tables if with_tables else (),
            table_scales=self.table_scales if with_tables else (),
            codes=codes if with_tables else (),
            scales=scales if with_tables else (),
            row_ids=ids,
        ):
            launch()
        return ids.cpu(), [c.cpu() for c in codes], [s.cpu() for s in scales]

    def want(self, sequences: list[list[int]]) -> Tensor:
        """Row numbers of the last token of each sequence, in the rank's own tables."""
        config, token_map = self.config, self.token_map.cpu().long()
        pad = int(token_map[config.engram_pad_token_id])
        ngram = config.engram_max_ngram_size
        back = [[int(token_map[s[-1 - i]]) if i < len(s) else pad for i in range(ngram)] for s in sequences]
        ids = reference.row_ids(torch.tensor(back), config)  # [rows, layers, sizes * heads], in the whole table
        first, last = (config.engram_n_heads * r // self.world for r in (self.rank, self.rank + 1))
        local = []
        for i, layer in enumerate(config.engram_layer_ids):
            whole = torch.tensor(engram_offsets(config, layer))
            own = torch.tensor(engram_offsets(config, layer, self.rank, self.world))
            by_head = ids[:, i].unflatten(-1, whole.shape)[..., first:last]
            local.append((by_head - whole[:, first:last] + own).flatten(1))
        return torch.stack(local, 1)

    def check_rows(self, ids: Tensor, codes: list[Tensor], scales: list[Tensor], active: list[bool]) -> None:
        """Gathered rows are those of `ids`, quantized as the reference quantizes; zeros where a row is inactive."""
        for layer, table in enumerate(self.tables):
            got_ids = ids[:, layer]
            rows = decode_fp8_rows(
                table.cpu()[got_ids].view(torch.float8_e4m3fn), self.table_scales[layer].cpu()[got_ids]
            ).flatten(1)
            rows[~torch.tensor(active)] = 0
            want_codes, want_scales = fp8_quantize(rows)
            got_codes = codes[layer].transpose(1, 2).flatten(0, 1).flatten(1)
            got_scales = scales[layer].transpose(1, 2).flatten(0, 1)
            count = len(active)
            assert torch.equal(got_scales[:count], ue8m0_encode(want_scales)), f"scales of layer {layer}"
            assert torch.equal(got_codes[:count], want_codes.view(torch.uint8)), f"codes of layer {layer}"
            assert bool((got_codes[count:] == 0x7F).all()), "rows behind the last are written"
            assert bool((got_scales[count:] == 0x7F).all()), "rows behind the last are written"


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
def test_rows_of_several_requests_over_two_turns_of_the_ring(device: torch.device, rank: int, world: int) -> None:
    bench = Bench.make(device, rank, world)
    texts = {slot: tokens_of(60, slot) for slot in (2, 0, 1)}
    done = {2: 0, 0: 0, 1: 0}
    for step in range(9):
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sequences = []
        for slot in texts:
            for position in range(done[slot], done[slot] + 1 + (step + slot) % 6):
                tokens.append(texts[slot][position])
                positions.append(position)
                slots.append(slot)
                sequences.append(texts[slot][: position + 1])
            done[slot] = positions[-1] + 1
        ids, codes, scales = bench.run(tokens, positions, slots)
        assert torch.equal(ids, bench.want(sequences))
        bench.check_rows(ids, codes, scales, [True] * len(tokens))
    assert max(done.values()) > RING
    for slot, text in texts.items():
        last = done[slot]
        kept = torch.tensor(text)[last - min(last, RING) : last]
        at = torch.arange(last - min(last, RING), last) % RING
        assert torch.equal(bench.history.cpu()[slot, at], bench.token_map.cpu()[kept])


def test_neighbours_whose_positions_join(device: torch.device) -> None:
    """A request that continues at the position where the one in front of it in the batch stops."""
    bench = Bench.make(device)
    first, second = tokens_of(6, 8), tokens_of(8, 9)
    bench.run([*first[:4], *second[:6]], [*range(4), *range(6)], [0] * 4 + [1] * 6)
    ids, _, _ = bench.run([*first[4:], *second[6:]], [4, 5, 6, 7], [0, 0, 1, 1])
    assert torch.equal(ids, bench.want([first[:5], first, second[:7], second]))


def test_rejected_tokens_are_written_over(device: torch.device) -> None:
    bench = Bench.make(device)
    text = tokens_of(12, 1)
    bench.run(text[:5], list(range(5)), [1] * 5)
    for accepted in (1, 3, 2):  # each step runs 6 rows of which the first `accepted` stay
        start = 5
        rows = text[start : start + accepted] + tokens_of(6 - accepted, accepted)
        bench.run(rows, list(range(start, start + 6)), [1] * 6)
        following = text[start + accepted : start + accepted + 2]
        at = [start + accepted, start + accepted + 1]
        ids, _, _ = bench.run(following, at, [1, 1])
        assert torch.equal(ids, bench.want([text[: p + 1] for p in at]))


def test_inactive_rows_give_zeros_and_leave_the_history(device: torch.device) -> None:
    bench = Bench.make(device)
    text, other = tokens_of(9, 3), tokens_of(9, 4)
    bench.run(text[:4], [0, 1, 2, 3], [0] * 4)
    before = bench.guarded.clone()
    ids, codes, scales = bench.run([-5, 99999, 7], [3, -1, 4], [-1, -1, -1])
    bench.check_rows(torch.zeros_like(ids), codes, scales, [False] * 3)
    assert torch.equal(bench.guarded, before)
    # Between requests, and with the positions of the request beside it.
    ids, codes, scales = bench.run([*text[4:6], 99999, 99999, *other[:2]], [4, 5, 6, 7, 0, 1], [0, 0, -1, -1, 2, 2])
    want = bench.want([text[:5], text[:6], [0], [0], other[:1], other[:2]])
    active = [True, True, False, False, True, True]
    assert torch.equal(ids[torch.tensor(active)], want[torch.tensor(active)])
    bench.check_rows(ids, codes, scales, active)


def test_row_numbers_alone(device: torch.device) -> None:
    bench = Bench.make(device)
    text = tokens_of(10, 5)
    ids, codes, _ = bench.run(text, list(range(10)), [0] * 10, with_tables=False)
    assert torch.equal(ids, bench.want([text[: i + 1] for i in range(10)]))
    assert bool((codes[0] == 0x7F).all())


def test_released_hash(device: torch.device) -> None:
    """Multipliers near 2^47, primes above 2^23, offsets above 2^28 of the release, beside the reference's int64."""
    raw = small_config(engram_vocab_size=16_000_000, engram_n_heads=8, engram_compressed_vocab_size=500)
    config = ModelConfig.from_dict(raw)
    bench = Bench.make(device)
    bench.config, bench.hash = config, cuda.Hash.of(config, 0, 1, device)
    text = tokens_of(20, 6)
    ids, _, _ = bench.run(text, list(range(20)), [0] * 20, with_tables=False)
    assert torch.equal(ids, bench.want([text[: i + 1] for i in range(20)]))
    assert int(ids.max()) > 2**28


def test_same_bits_again(device: torch.device) -> None:
    bench = Bench.make(device)
    text = tokens_of(6, 7)
    first = bench.run(text, list(range(6)), [0] * 6)
    again = bench.run(text, list(range(6)), [0] * 6)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1] + first[2], again[1] + again[2], strict=True))
