"""The Triton attention kernels against `reference`, on the GPU if there is one, else in Triton's interpreter.

Cases, expectations and bounds are those of `test_cuda`: both backends promise the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashstep import formats
from flashstep.stages.attention import portable
from flashstep.stages.attention.cuda import Block, Chosen
from flashstep.stages.attention.portable import Batch, Entries
from flashstep.stages.attention.test_cuda import (
    PLAIN,
    YARN,
    Case,
    Forward,
    Request,
    check,
    decode_fp8,
    expected_entries,
    frequencies,
    latents,
    poison,
    random,  # noqa: F401 (a fixture)
    turns,
)


def ints(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, torch.int32)


class PortableForward(Forward):
    """A forward whose ring has room for `ring` entries, and not yet those of the forward itself."""

    ring = 0  # 0: as the case says

    def run(self, device: torch.device) -> Tensor:
        case, rows = self.case, self.rows
        ring = self.ring or case.ring
        codes = torch.full((case.slots, ring, case.head_dim), 0x7F, dtype=torch.uint8)
        scales = torch.full((case.slots, ring, case.head_dim // 32), 0xFF, dtype=torch.uint8)
        own_codes, own_scales = self.own_codes.clone(), self.own_scales.clone()
        row = 0
        for request in case.requests:
            if request.slot >= 0:
                old = torch.arange(max(0, request.start - case.window), request.start)
                codes[request.slot, old % ring] = self.codes[request.slot, old % case.ring]
                scales[request.slot, old % ring] = self.scales[request.slot, old % case.ring]
                if not case.block:
                    new = torch.arange(request.start, request.start + request.count)
                    own_codes[row : row + request.count] = self.codes[request.slot, new % case.ring]
                    own_scales[row : row + request.count] = self.scales[request.slot, new % case.ring]
            row += request.count
        chosen = Chosen(
            ints(self.chosen, device),
            self.entry_codes.to(device),
            self.entry_scales.to(device),
            ints(self.table, device),
            case.ratio,
        )
        own = Entries(own_codes.to(device), own_scales.to(device))
        return portable.attend(
            self.q.view(rows, case.heads, case.head_dim).to(device),
            codes.to(device),
            scales.to(device),
            own,
            Batch.of(ints(self.position, device), ints(self.slot, device)),
            turn=portable.turns(self.position.to(device), self.freq.to(device)),
            sink=self.sink.to(device),
            window=case.window,
            chosen=chosen if case.ratio else None,
            block=Block(ints(self.last, device), own.codes, own.scales, case.block, 0) if case.block else None,
        ).cpu()


class LongForward(PortableForward):
    ring = 21  # a window of 16 and 5 rows


# -- window entries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("base", [PLAIN, YARN])
def test_entries_have_the_bits_of_the_formats(
    device: torch.device,
    random: torch.Generator,  # noqa: F811
    head_dim: int,
    base: float,
) -> None:
    rope = 32 if head_dim == 64 else 64
    positions = torch.tensor([0, 1, 130, 131, 263, 5000, 65_600, 1_000_003, 2**31 - 1, 7])
    low = latents((10, 32 + head_dim), random)
    low[4, 32:] = 0
    low[5, 32:] *= 2.0**-30  # scales at their lower end
    x, norm, freq = low[:, 32:], (torch.rand(head_dim, generator=random) + 0.5).bfloat16(), frequencies(rope, base)
    turn = portable.turns(positions.to(device), freq.to(device))
    got = portable.entries(x.to(device), norm.to(device), turn, eps=1e-20)
    codes, scales, certain = expected_entries(x, norm, freq, positions)
    for row in range(10):
        found = got.codes[row].cpu(), got.scales[row].cpu()
        if certain[row]:
            assert torch.equal(found[0], codes[row])
            assert torch.equal(found[1], scales[row])
        else:  # one rounding to bf16 went the other way, and perhaps one scale
            value, want = decode_fp8(*found), decode_fp8(codes[row], scales[row])
            assert torch.allclose(value, want, rtol=0.13, atol=float(want.abs().max()) * 2.0**-7)
    assert int(certain.sum()) >= 6, "the inputs leave too many roundings in doubt"


@pytest.mark.parametrize("counts", [(3, 0, 2), (40, 1, 0), (21, 22, 63)])
def test_each_place_of_the_ring_is_written_once(device: torch.device, counts: tuple[int, ...]) -> None:
    ring, starts = 21, (5, 20, 1000)
    positions, slots = [9, 10], [-1, -1]
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        positions += range(start, start + count)
        slots += [slot] * count
    rows = len(slots)
    values = torch.arange(rows, dtype=torch.float32).unsqueeze(1) + torch.arange(6) / 8
    found = torch.full((3, ring, 2, 3), -1.0)
    wanted = found.clone()
    for row in range(2, rows):
        wanted[slots[row], positions[row] % ring] = values[row].view(2, 3)
    found = found.to(device)
    batch = Batch.of(ints(torch.tensor(positions), device), ints(torch.tensor(slots), device))
    portable.write_ring(values.to(device), batch, found)
    assert torch.equal(found.cpu(), wanted)


def test_window_takes_codes_and_scales(device: torch.device, random: torch.Generator) -> None:  # noqa: F811
    codes, scales = formats.fp8_quantize(latents((3, 64), random))
    new = Entries(codes.view(torch.uint8).to(device), formats.ue8m0_encode(scales).to(device))
    rings = [torch.full((2, 20, width), 0x7F, dtype=torch.uint8, device=device) for width in (64, 2)]
    batch = Batch.of(ints(torch.tensor([19, 20, 3]), device), ints(torch.tensor([1, 1, -1]), device))
    portable.write_window(new, batch, *rings)
    for ring, values in zip(rings, (new.codes, new.scales), strict=True):
        assert torch.equal(ring[1, [19, 0]], values[:2])
        assert bool((ring[0] == 0x7F).all() & (ring[1, 1:19] == 0x7F).all())


def test_first_rows() -> None:
    positions, slots = torch.tensor([4, 5, 6, 7, 7, 8, 3, 3, 4]), torch.tensor([0, 0, 2, 2, -1, -1, 1, 0, 0])
    assert Batch.of(positions, slots).first.tolist() == [0, 0, 2, 2, 4, 4, 6, 7, 7]


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4, 16, 24])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_heads_and_ratios(
    device: torch.device,
    random: torch.Generator,  # noqa: F811
    heads: int,
    ratio: int,
) -> None:
    requests = [Request(1, 40), Request(2, 7, 2), Request(-1, 0), Request(0, 21)]
    check(Case(requests, heads=heads, head_dim=64, ratio=ratio), device, random, PortableForward)


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 22, 23, 45, 69])
def test_window_edges_and_ring_turns(device: torch.device, random: torch.Generator, start: int) -> None:  # noqa: F811
    case = Case([Request(1, start, 3), Request(0, start, 1)], head_dim=64)
    check(case, device, random, PortableForward)


@pytest.mark.parametrize("start", [0, 7, 30])
def test_chunks_longer_than_the_ring(device: torch.device, random: torch.Generator, start: int) -> None:  # noqa: F811
    requests = [Request(1, start, 41), Request(2, 9), Request(0, start + 2, 3)]
    check(Case(requests, head_dim=64, ring=200, ratio=2), device, random, LongForward)


def test_rows_without_entries_stand_anywhere(device: torch.device, random: torch.Generator) -> None:  # noqa: F811
    requests = [Request(0, 0), Request(1, 50, chosen=0), Request(-1, 0, 2), Request(2, 33, chosen=1), Request(-1, 0)]
    check(Case(requests, head_dim=64, ratio=2), device, random, PortableForward)


@pytest.mark.parametrize("start", [0, 1, 9, 40])
def test_draft_blocks(device: torch.device, random: torch.Generator, start: int) -> None:  # noqa: F811
    requests = [Request(1, start, 5), Request(-1, 0, 5), Request(0, 23, 5)]
    check(Case(requests, head_dim=64, ring=30, block=5), device, random, PortableForward)


@pytest.mark.parametrize("sink", [float("-inf"), 0.0, 5.0, 80.0, 200.0])
def test_sinks_join_once(device: torch.device, random: torch.Generator, sink: float) -> None:  # noqa: F811
    case = Case([Request(1, 3), Request(0, 40, 2)], head_dim=64, ratio=1, sink=[sink, 1.0], flat=True)
    check(case, device, random, PortableForward)


def test_released_sizes(device: torch.device, random: torch.Generator) -> None:  # noqa: F811
    requests = [Request(1, 200, 2), Request(0, 3)]
    case = Case(requests, heads=16, head_dim=512, rope=64, window=128, ring=134, ratio=1, topk=40, base=YARN)
    check(case, device, random, PortableForward)


def test_no_rows(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    rings = [torch.zeros(1, 8, width, dtype=torch.uint8, device=device) for width in (64, 2)]
    own = portable.entries(
        torch.zeros(0, 64, device=device).bfloat16(),
        torch.ones(64, device=device).bfloat16(),
        portable.turns(none, torch.ones(16, device=device)),
        eps=1e-20,
    )
    batch = Batch.of(none, none)
    portable.write_window(own, batch, *rings)
    out = portable.attend(
        torch.zeros(0, 2, 64, device=device).bfloat16(),
        *rings,
        own,
        batch,
        turn=portable.turns(none, torch.ones(16, device=device)),
        sink=torch.zeros(2, device=device),
        window=4,
    )
    assert out.shape == (0, 2, 64)


def test_wrong_shapes_are_refused() -> None:
    case = Case([Request(0, 5)], head_dim=64)
    forward = PortableForward(case, torch.Generator().manual_seed(1))
    forward.sink = torch.zeros(3)
    with pytest.raises(ValueError, match=r"sink has the shape \(3,\): expected \(2,\)"):
        forward.run(torch.device("cpu"))
    with pytest.raises(ValueError, match="expected contiguous columns"):
        portable.entries(torch.zeros(2, 64).bfloat16(), torch.ones(32).bfloat16(), torch.zeros(2, 16, 2), eps=1e-20)


def test_reading_unused_places_would_be_seen(random: torch.Generator) -> None:  # noqa: F811
    """The poison of these tests decodes to NaN."""
    assert bool(decode_fp8(poison((4, 64), random), torch.full((4, 2), 127, dtype=torch.uint8)).isnan().all())


def test_turns_are_those_of_the_reference() -> None:
    positions, freq = torch.tensor([0, 5, 1_000_000]), frequencies(32, YARN)
    want = torch.view_as_real(turns(positions, freq)).float()
    assert torch.equal(portable.turns(positions, freq), want)
