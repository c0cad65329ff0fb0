"""The attention kernels against `reference`, on the GPU if there is one, else on the emulator."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from flashstep import formats, jit
from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Rope, rms_norm, rotate
from flashstep.stages.attention import cuda, reference
from flashstep.stages.attention.cuda import Block, Chosen, Early, Split

torch.set_num_threads(1)
EXACT = Numerics()
CPU = torch.device("cpu")
PLAIN, YARN = 10000.0, 160000.0
NAN_CODES = (0x7F, 0xFF)
FAR = 0x3FFFFFFF  # a page that does not exist


@pytest.fixture
def random(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))


def frequencies(rope: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rope, 2, dtype=torch.float32) / rope)


def turns(positions: Tensor, freq: Tensor) -> Tensor:
    """As `ops.Rope.at`."""
    angles = (positions.float().unsqueeze(-1) * freq).double()
    return torch.polar(torch.ones_like(angles), angles)


def poison(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Bytes that are NaN as e4m3 codes and scales."""
    return torch.tensor(NAN_CODES, dtype=torch.uint8)[torch.randint(2, shape, generator=random)]


def latents(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """bf16 values over several binades, so that groups have different scales."""
    spread = torch.randint(-6, 7, (*shape[:-1], shape[-1] // 16), generator=random).repeat_interleave(16, -1)
    return (torch.randn(shape, generator=random) * 2.0 ** (spread / 3)).bfloat16()


# -- window entries -------------------------------------------------------------------------------------------------


def ambiguous(exact: Tensor, room: Tensor) -> Tensor:
    """Where `exact` float64, known to `room`, may round to either of two bf16 values."""
    return (exact - room).bfloat16() != (exact + room).bfloat16()


def expected_entries(x: Tensor, weight: Tensor, freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale codes, and for each row whether float32 arithmetic leaves no doubt about a rounding."""
    dims = x.shape[-1]
    exact = weight.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-20)
    normed = rms_norm(x, weight, 1e-20, EXACT)
    doubt = ambiguous(exact, exact.abs() * 2.0**-21)  # nine additions, a division, a root, three products
    turned = rotate(normed, turns(positions, freq), EXACT)
    pairs = torch.view_as_complex(normed[:, dims - 2 * len(freq) :].double().unflatten(-1, (-1, 2)))
    exact = torch.view_as_real(pairs * turns(positions, freq)).flatten(-2)
    room = pairs.abs().repeat_interleave(2, -1) * 2.0**-21
    doubt[:, dims - 2 * len(freq) :] |= ambiguous(exact, room)
    codes, scales = formats.fp8_quantize(turned)
    return codes.view(torch.uint8), formats.ue8m0_encode(scales), ~doubt.any(-1)


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("base", [PLAIN, YARN])
def test_window_entries_have_the_bits_of_the_formats(
    device: torch.device, random: torch.Generator, head_dim: int, base: float
) -> None:
    rope, ring, slots, layers = head_dim // 8 * (4 if head_dim == 64 else 1), 131, 3, 3
    positions = torch.tensor([0, 1, 130, 131, 263, 5000, 65_600, 1_000_003, 2**31 - 1, 7])
    slot = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0, -1, 2])
    rows = len(slot)
    low = latents((rows, 32 + layers * head_dim), random)
    low[5, 32:] = 0
    low[6, 32:] *= 2.0**-30  # scales at their lower end
    weights = [(torch.rand(head_dim, generator=random) + 0.5).bfloat16() for _ in range(layers)]
    columns = [32 + (layers - 1 - layer) * head_dim for layer in range(layers)]
    codes = [poison((slots, ring, head_dim), random) for _ in range(layers)]
    scales = [poison((slots, ring, head_dim // 32), random) for _ in range(layers)]
    freq = frequencies(rope, base)
    sure = 0
    # Runs before the reference, and once more with the entries of rows instead of slots.
    got = [(c.to(device), s.to(device)) for c, s in zip(codes, scales, strict=True)]
    own = [(torch.full((rows, head_dim), 0x7F), torch.full((rows, head_dim // 32), 0xFF)) for _ in range(layers)]
    own = [(c.to(device, torch.uint8), s.to(device, torch.uint8)) for c, s in own]
    for caches in (got, own):
        (launch,) = cuda.write_window(
            low.to(device),
            columns,
            [w.to(device) for w in weights],
            [c for c, _ in caches],
            [s for _, s in caches],
            frequencies=freq.to(device),
            row_position=positions.to(device, torch.int32),
            row_slot=slot.to(device, torch.int32),
            eps=1e-20,
        )
        launch()
    for layer in range(layers):
        x = low[:, columns[layer] : columns[layer] + head_dim]
        want_codes, want_scales, certain = expected_entries(x, weights[layer], freq, positions)
        untouched = torch.ones(slots, ring, dtype=torch.bool)
        for row in range(rows):
            if slot[row] < 0:
                assert bool((own[layer][0][row] == 0x7F).all())
                continue
            place = (int(slot[row]), int(positions[row]) % ring)
            untouched[place] = False
            for where, (c, s) in ((place, got[layer]), ((row,), own[layer])):
                found = c[where].cpu(), s[where].cpu()
                if certain[row]:
                    assert torch.equal(found[0], want_codes[row]), f"layer {layer}, row {row}"
                    assert torch.equal(found[1], want_scales[row]), f"layer {layer}, row {row}"
                    sure += 1
                else:  # one rounding to bf16 went the other way, and perhaps one scale
                    value = decode_fp8(*found)
                    want = decode_fp8(want_codes[row], want_scales[row])
                    assert torch.allclose(value, want, rtol=0.13, atol=float(want.abs().max()) * 2.0**-7)
        assert torch.equal(got[layer][0].cpu()[untouched], codes[layer][untouched])
        assert torch.equal(got[layer][1].cpu()[untouched], scales[layer][untouched])
    assert sure >= 2 * layers * (rows - 1) * 0.6, "the inputs leave too many roundings in doubt"


def decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    return (values * formats.ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def test_window_write_refuses_caches_that_do_not_fit() -> None:
    codes, scales = torch.zeros(1, 9, 64, dtype=torch.uint8), torch.zeros(1, 9, 2, dtype=torch.uint8)
    ints, norm = torch.zeros(1, dtype=torch.int32), torch.zeros(64).bfloat16()
    rest = {"frequencies": torch.ones(16), "row_position": ints, "row_slot": ints, "eps": 1e-20}
    low = torch.zeros(1, 128).bfloat16()
    with pytest.raises(ValueError, match="multiples of 4, inside"):
        cuda.write_window(low, [65], [norm], [codes], [scales], **rest)
    with pytest.raises(ValueError, match=r"1\.\.4 of each"):
        cuda.write_window(low, [0, 64], [norm], [codes], [scales], **rest)
    with pytest.raises(ValueError, match="different shapes"):
        cuda.write_window(low, [0, 64], [norm] * 2, [codes, codes[:, 1:]], [scales] * 2, **rest)


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """Rows of one request: `count` from position `start`. `chosen`: how many entries each row attends to at most."""

    slot: int
    start: int
    count: int = 1
    chosen: int = 10**9


@dataclass
class Case:
    """A forward. `ratio` 0: no compressed entries. `block`: rows of a draft block (every request has so many)."""

    requests: list[Request]
    heads: int = 2
    head_dim: int = 128
    rope: int = 32
    groups: int = 1
    window: int = 16
    ring: int = 23
    slots: int = 3
    ratio: int = 0
    topk: int = 24
    page_entries: int = 5
    base: float = PLAIN
    block: int = 0
    split: Split | None = field(default_factory=lambda: Split(2, 16, 32))
    early: Early = Early.NOTHING
    sink: list[float] | None = None
    flat: bool = False  # all scores 0


class Forward:
    """Random tensors of a case, the launch, and what the reference says."""

    def __init__(self, case: Case, random: torch.Generator) -> None:
        self.case = case
        position, slot, last = [], [], []
        self.chosen_lists: list[list[int]] = []
        for request in case.requests:
            for i in range(request.count):
                live = request.slot >= 0
                position.append(request.start + i if live else 0x7FFFFFFF)
                last.append(request.start - 1 if live else -1)
                slot.append(request.slot)
                visible = (request.start + i + 1) // case.ratio if case.ratio and live else 0
                kept = min(visible, case.topk, request.chosen)
                picked = torch.randperm(visible, generator=random)[:kept].sort().values
                self.chosen_lists.append(picked.tolist())
        self.rows = len(slot)
        self.position, self.slot, self.last = (torch.tensor(x) for x in (position, slot, last))
        self.q = torch.randn(self.rows, case.heads * case.head_dim, generator=random).bfloat16()
        if case.flat:
            self.q.zero_()
        self.q[self.slot < 0] = float("nan")
        self.sink = torch.randn(case.heads, generator=random) if case.sink is None else torch.tensor(case.sink)
        self.freq = frequencies(case.rope, case.base)
        self._fill_window(random)
        self._fill_pages(random)

    def _fill_window(self, random: torch.Generator) -> None:
        case = self.case
        self.codes = poison((case.slots, case.ring, case.head_dim), random)
        self.scales = poison((case.slots, case.ring, case.head_dim // 32), random)
        for row in range(self.rows):
            slot = int(self.slot[row])
            places = [p % case.ring for p in self.window_positions(row)]
            codes, scales = formats.fp8_quantize(latents((len(places), case.head_dim), random))
            self.codes[slot, places] = codes.view(torch.uint8)
            self.scales[slot, places] = formats.ue8m0_encode(scales)
        codes, scales = formats.fp8_quantize(latents((self.rows, case.head_dim), random))
        self.own_codes, self.own_scales = codes.view(torch.uint8), formats.ue8m0_encode(scales)
        self.own_codes[self.slot < 0] = 0x7F

    def _fill_pages(self, random: torch.Generator) -> None:
        case = self.case
        used = sorted({(int(s), e) for s, es in zip(self.slot, self.chosen_lists, strict=True) for e in es})
        numbers = sorted({(s, e // case.page_entries) for s, e in used})
        pages = torch.randperm(len(numbers) + 3, generator=random)
        self.table = torch.full((case.slots, max((n for _, n in numbers), default=0) + 2), FAR)
        for (s, n), page in zip(numbers, pages.tolist(), strict=False):
            self.table[s, n] = page
        shape = (len(pages), case.page_entries)
        self.entry_codes = torch.randint(256, (*shape, case.head_dim // 2), generator=random).to(torch.uint8)
        self.entry_scales = poison((*shape, case.head_dim // 16), random)
        if used:
            slots, entries = torch.tensor(used).T
            place = self.table[slots, entries // case.page_entries], entries % case.page_entries
            x = latents((len(used), case.head_dim), random)
            scale, group = formats.fp4_e4m3_scale(x)
            self.entry_codes[place] = formats.fp4_pack(formats.fp4_quantize(x, scale, group)).view(torch.uint8)
            self.entry_scales[place] = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        self.chosen = torch.full((self.rows, case.topk), -1)
        for row, entries in enumerate(self.chosen_lists):
            self.chosen[row, : len(entries)] = torch.tensor(entries, dtype=torch.int64)

    def window_positions(self, row: int) -> range:
        if self.slot[row] < 0:
            return range(0)
        last = int(self.last[row] if self.case.block else self.position[row])
        return range(max(0, last - self.case.window + 1), last + 1)

    # -- the kernel -------------------------------------------------------------------------------------------------

    def launch(self, device: torch.device) -> tuple[jit.Launch, Tensor]:
        case, rows = self.case, self.rows
        pieces = case.heads * case.head_dim // case.groups // 8
        out = torch.full((case.groups, -(-rows // 8), pieces, 8, 8), float("nan"), device=device).bfloat16()

        def ints(x: Tensor) -> Tensor:
            return x.to(device, torch.int32)

        chosen = Chosen(
            ints(self.chosen), self.entry_codes.to(device), self.entry_scales.to(device), ints(self.table), case.ratio
        )
        block = Block(ints(self.last), self.own_codes.to(device), self.own_scales.to(device), case.block, 2)
        (launch,) = cuda.attend(
            self.q.to(device),
            self.codes.to(device),
            self.scales.to(device),
            out,
            row_position=ints(self.position),
            row_slot=ints(self.slot),
            frequencies=self.freq.to(device),
            sink=self.sink.to(device),
            window=case.window,
            chosen=chosen if case.ratio else None,
            block=block if case.block else None,
            early=case.early,
            split=case.split,
        )
        return launch, out

    def run(self, device: torch.device) -> Tensor:
        """[rows, heads, head_dim] bf16; also checks that nothing was written behind the last row."""
        launch, out = self.launch(device)
        launch()
        flat = out.cpu().permute(1, 3, 0, 2, 4).reshape(-1, self.case.heads, self.case.head_dim)
        assert bool(flat[self.rows :].isnan().all())
        return flat[: self.rows]

    # -- the reference ----------------------------------------------------------------------------------------------

    def entries(self, row: int) -> Tensor:
        """[entries, head_dim] bf16 that the row sees."""
        case, slot = self.case, int(self.slot[row])
        places = [p % case.ring for p in self.window_positions(row)]
        parts = [decode_fp8(self.codes[slot, places], self.scales[slot, places])]
        if case.block:
            block = slice(row - row % case.block, row - row % case.block + case.block)
            parts.append(decode_fp8(self.own_codes[block], self.own_scales[block]))
        if self.chosen_lists[row]:
            entries = torch.tensor(self.chosen_lists[row])
            place = self.table[slot, entries // case.page_entries], entries % case.page_entries
            codes = formats.fp4_unpack(self.entry_codes[place]).long()
            scale = self.entry_scales[place].view(torch.float8_e4m3fn).float()
            values = torch.tensor([*formats.FP4_VALUES, *(-v for v in formats.FP4_VALUES)])[codes]
            parts.append((values.unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2))
        kv = torch.cat(parts)
        assert torch.equal(kv.bfloat16().float(), kv)
        assert bool(kv.isfinite().all())
        return kv.bfloat16()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, a bound of its error, and its likely squared error, each [rows, heads, head_dim]."""
        case = self.case
        out = torch.zeros(self.rows, case.heads, case.head_dim).bfloat16()
        bound, variance = torch.zeros(out.shape, dtype=torch.float64), torch.zeros(out.shape, dtype=torch.float64)
        for row in range(self.rows):
            if self.slot[row] < 0:
                continue
            kv = self.entries(row)
            turn = turns(self.position[row : row + 1].clamp(max=2**30), self.freq)
            q = rotate(self.q[row : row + 1].unflatten(-1, (case.heads, -1)), turn, EXACT)
            o = reference.attend(q, kv[None], torch.ones(1, len(kv), dtype=torch.bool), self.sink, EXACT)
            out[row] = rotate(o, turn, EXACT, back=True)[0]
            bound[row], variance[row] = self._room(q[0], kv, o[0])
        return out, bound, variance

    def _room(self, q: Tensor, kv: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """How far two results may lie apart that round P against different maxima, and how far they likely do.

        Both round P (each by at most 2^-9), o, and what the rotation makes of it; a pair that turns mixes its errors.
        Everything else is float32: 2^-11 of the sum of absolute terms leaves room for scores of several hundreds.
        """
        turning = self.case.head_dim - self.case.rope
        scores = q.double() @ kv.double().T * q.shape[-1] ** -0.5
        highest = torch.maximum(scores.amax(-1, keepdim=True), self.sink.double()[:, None])
        p = torch.exp(scores - highest)
        p = p / (p.sum(-1, keepdim=True) + torch.exp(self.sink.double()[:, None] - highest))
        p = p.nan_to_num(0.0)  # an infinite sink leaves nothing to the entries
        terms = p @ kv.double().abs()
        squares = 2 * p.square() @ kv.double().square() + 3 * o.double().square()
        for x in (terms, squares):
            pairs = x[:, turning:].unflatten(-1, (-1, 2))
            x[:, turning:] = pairs.sum(-1, keepdim=True).expand_as(pairs).flatten(-2)
        return terms * (3 * 2.0**-8 + 2.0**-11) + 1e-30, squares * 2.0**-18 / 3


def check(case: Case, device: torch.device, random: torch.Generator, kind: type[Forward] = Forward) -> Forward:
    """Run, compare with the reference, run again."""
    forward = kind(case, random)
    got = forward.run(device)
    want, bound, variance = forward.expected()
    difference = (got.double() - want.double()).abs()
    wrong = ~(difference <= bound)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} differ, first at row, head, column {at}: found {got[at]}, "
            f"expected {want[at]} within {bound[at]:.3g}"
        )
    # Errors are roundings, so they average out: an entry left out, or one taken twice, does not.
    if float(variance.sum()):
        assert float(difference.square().sum() / variance.sum()) < 3
    assert torch.equal(got.view(torch.int16), forward.run(device).view(torch.int16))
    return forward


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 20, 32, 64])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_heads_and_ratios(device: torch.device, random: torch.Generator, heads: int, ratio: int) -> None:
    requests = [Request(1, 40), Request(2, 7, 2), Request(-1, 0), Request(0, 21)]
    check(Case(requests, heads=heads, groups=max(1, heads // 4), ratio=ratio), device, random)


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 17, 22, 23, 45, 46, 47, 69])
def test_window_edges_and_ring_turns(device: torch.device, random: torch.Generator, start: int) -> None:
    # Window 16, ring 23: the ring wraps at 23, 46 and 69.
    check(Case([Request(1, start, 3), Request(0, start, 1)], head_dim=256, split=Split(4, 16)), device, random)


@pytest.mark.parametrize("start", [126, 127, 128, 129, 130, 267])
def test_released_window(device: torch.device, random: torch.Generator, start: int) -> None:
    check(Case([Request(1, start, 2)], window=128, ring=134, head_dim=256, split=Split(4, 32)), device, random)


IN_CHUNKS, WHOLE = Split(2, 16, 32), Split(2, 32, 32)  # of 24 chosen entries and a window of 16


@pytest.mark.parametrize("split", [IN_CHUNKS, WHOLE])
@pytest.mark.parametrize("early", list(Early))
@pytest.mark.parametrize("start", [0, 3, 30, 100])
def test_reading_early_changes_no_bit(
    device: torch.device, random: torch.Generator, early: Early, start: int, split: Split
) -> None:
    # Three rows of a request in front of the last one: their entries are of this forward.
    case = Case([Request(2, 5), Request(1, start, 4), Request(0, 64, 2)], ratio=1, early=early, split=split)
    forward = check(case, device, random)
    early_bits = forward.run(device)
    forward.case.early = Early.NOTHING
    assert torch.equal(early_bits.view(torch.int16), forward.run(device).view(torch.int16))


@pytest.mark.parametrize("split", [IN_CHUNKS, WHOLE])
def test_entries_of_this_forward_are_seen(device: torch.device, random: torch.Generator, split: Split) -> None:
    # They are written by the kernel in front: reading them before it has ended would find NaN (on a GPU).
    forward = Forward(Case([Request(1, 60, 6), Request(0, 3, 4)], early=Early.STATE, ratio=1, split=split), random)
    launch, out = forward.launch(device)
    codes, scales = launch.fields["window_codes"], launch.fields["window_scales"]
    low = latents((forward.rows, forward.case.head_dim), random).to(device)
    (write,) = cuda.write_window(
        low,
        [0],
        [torch.ones(forward.case.head_dim, device=device).bfloat16()],
        [codes],
        [scales],
        frequencies=launch.fields["frequencies"],
        row_position=launch.fields["row_position"],
        row_slot=launch.fields["row_slot"],
        eps=1e-20,
    )
    write()
    launch()
    first = out[:, 0].clone()  # a full tile: eight rows
    assert bool(first.isfinite().all())
    for _ in range(3 if jit.emulated(device) else 200):
        codes[forward.slot.to(device), (forward.position % forward.case.ring).to(device)] = 0x7F
        out.fill_(float("nan"))
        write()
        launch()
        assert torch.equal(first.view(torch.int16), out[:, 0].view(torch.int16))


@pytest.mark.parametrize("chosen", [0, 1, 2, 3, 23, 24])
@pytest.mark.parametrize("ratio", [1, 2])
def test_number_of_chosen_entries(device: torch.device, random: torch.Generator, chosen: int, ratio: int) -> None:
    requests = [Request(0, 200, 2, chosen), Request(1, 2, 1, chosen), Request(2, 99, 1, chosen)]
    check(Case(requests, ratio=ratio, page_entries=7), device, random)


@pytest.mark.parametrize(
    ("head_dim", "split"),
    [
        (64, Split(1, 16, 32)),
        (64, Split(2, 80, 32)),
        (128, Split(1, 32, 32)),
        (128, Split(2, 16)),
        (128, Split(2, 48)),
        (192, Split(3, 16, 32)),
        (256, Split(2, 32)),
        (256, Split(4, 16, 32)),
        (512, Split(8, 16)),
        (512, Split(4, 32, 32)),
        (384, Split(3, 32)),
        (512, Split(8, 80)),
        (512, Split(1, 32)),
    ],
)
def test_every_split(device: torch.device, random: torch.Generator, head_dim: int, split: Split) -> None:
    requests = [Request(0, 300, 2), Request(1, 0), Request(2, 12, 2), Request(-1, 0, 2), Request(1, 77, 2)]
    check(Case(requests, ratio=1, topk=50, heads=4, groups=2, head_dim=head_dim, split=split), device, random)


@pytest.mark.parametrize("position", [65_536, 70_001, 1_000_000])
@pytest.mark.parametrize("base", [PLAIN, YARN])
def test_far_positions(device: torch.device, random: torch.Generator, position: int, base: float) -> None:
    check(Case([Request(1, position, 2, 24)], ratio=2, base=base, page_entries=64), device, random)


@pytest.mark.parametrize("sink", [float("-inf"), 0.0, 5.0, 80.0, 200.0, float("inf")])
def test_sinks(device: torch.device, random: torch.Generator, sink: float) -> None:
    forward = check(Case([Request(1, 0), Request(0, 40, 2)], sink=[sink, 0.0], ratio=1), device, random)
    got = forward.run(device)
    assert bool((got[:, 0] == 0).all()) == (sink > 100)
    assert bool((got[:, 1] != 0).any())


def test_every_entry_counts_the_same_when_all_scores_are_zero(device: torch.device, random: torch.Generator) -> None:
    # Probabilities are 1 without rounding, so sums are nearly exact and one entry more or less is visible.
    case = Case(
        [Request(0, 300, 3), Request(1, 33)], ratio=1, topk=61, flat=True, head_dim=256, split=Split(4, 32), heads=4
    )
    forward = Forward(case, random)
    got = forward.run(device).double()
    want, bound, _ = forward.expected()
    ulp = 2.0**-7 * torch.maximum(want.double().abs(), got.abs())
    parts = bound / (3 * 2.0**-8 + 2.0**-11) * 2.0**-12  # blocks exchange f16
    assert bool(((got - want.double()).abs() <= 2 * ulp + parts + 2e-5 * want.double().abs().amax()).all())


@pytest.mark.parametrize("start", [1, 2, 5, 16, 17, 18, 46, 200])
@pytest.mark.parametrize("early", [Early.NOTHING, Early.STATE])
def test_draft_block(device: torch.device, random: torch.Generator, start: int, early: Early) -> None:
    requests = [Request(1, start, 5), Request(0, 31, 5), Request(-1, 0, 5), Request(2, 1, 5)]
    check(Case(requests, block=5, early=early, heads=4, split=Split(2, 32)), device, random)


def test_rollback_leaves_nothing_behind(device: torch.device, random: torch.Generator) -> None:
    # Six rows, of which one was accepted; then six rows from the next position on write over the rejected five.
    case = Case([Request(1, 60, 6)], ring=22)
    before = Forward(case, random)
    after = Forward(Case([Request(1, 61, 6)], ring=22), random)
    kept = [p % 22 for p in range(61 - 16 + 1, 61)]
    after.codes[1, kept], after.scales[1, kept] = before.codes[1, kept], before.scales[1, kept]
    fresh = [p % 22 for p in range(61, 67)]
    stale = [place for place in range(22) if place not in kept + fresh]
    after.codes[1, stale], after.scales[1, stale] = before.codes[1, stale], before.scales[1, stale]
    got, (want, bound, _) = after.run(device), after.expected()
    assert bool(((got.double() - want.double()).abs() <= bound).all())


@pytest.mark.parametrize(
    ("heads", "groups", "ratio", "block"), [(16, 2, 1, 0), (8, 1, 2, 0), (16, 2, 0, 0), (16, 2, 0, 5)]
)
def test_released_shape(
    device: torch.device, random: torch.Generator, heads: int, groups: int, ratio: int, block: int
) -> None:
    requests = [Request(1, 140, 5), Request(0, 3, 5), Request(-1, 0, 5)] if block else [Request(1, 1100, 2)]
    check(
        Case(
            requests,
            heads=heads,
            groups=groups,
            head_dim=512,
            rope=64,
            window=128,
            ring=134,
            ratio=ratio,
            topk=512,
            page_entries=64,
            base=YARN if ratio else PLAIN,
            block=block,
            split=None,
            early=Early.STATE,
        ),
        device,
        random,
    )


@pytest.mark.parametrize("head_dim", [128, 384])
def test_other_head_sizes(device: torch.device, random: torch.Generator, head_dim: int) -> None:
    case = Case([Request(1, 40, 2)], head_dim=head_dim, rope=64, ratio=1, split=Split(2, 48))
    check(case, device, random)
    check(replace(case, split=Split(3 if head_dim == 384 else 1, 16)), device, random)


def test_all_rows_inactive(device: torch.device, random: torch.Generator) -> None:
    forward = check(Case([Request(-1, 0, 9)], ratio=1), device, random)
    assert bool((forward.run(device) == 0).all())


def test_a_row_does_not_depend_on_the_others(device: torch.device, random: torch.Generator) -> None:
    forward = Forward(Case([Request(1, 50, 3), Request(0, 9, 2)], ratio=1), random)
    together = forward.run(device)
    forward.slot[torch.tensor([0, 1, 3])] = -1
    forward.q[:2] = float("nan")
    alone = forward.run(device)
    for row in (2, 4):
        assert torch.equal(together[row].view(torch.int16), alone[row].view(torch.int16))


def test_plan_covers_every_row_count() -> None:
    for rows in range(1, 193):
        for others in (0, 5, 64, 512):
            split = cuda.plan(rows, cuda.count_tiles(128, others), 512)
            assert 8 % split.blocks == 0
            assert split.entries % 16 == 0
            shared = cuda.attend_constants(16, 512, 64, 2, 128, others, 0, split)["SHARED"]
            resident = 2 if rows * split.blocks > cuda.MULTIPROCESSORS else 1
            assert resident * (shared + 1024) <= jit.MAX_SHARED + 1024
    assert cuda.plan(6, 80, 512) == Split(8, 80)


def test_rope_frequencies_are_those_of_the_reference(device: torch.device) -> None:
    config = ModelConfig.from_file("flashstep/models/tiny")
    for compressed in (False, True):
        found = cuda.rope_frequencies(config, compressed=compressed, device=device)
        assert torch.equal(found.cpu(), Rope(config, compressed=compressed).frequencies)


def test_attend_refuses_shapes_that_do_not_fit(random: torch.Generator) -> None:
    forward = Forward(Case([Request(1, 4)]), random)
    forward.q = forward.q[:, 1:]
    with pytest.raises(ValueError, match="q has the shape"):
        forward.launch(CPU)
    with pytest.raises(ValueError, match="17 heads: at most 16, or a multiple of their groups"):
        Forward(Case([Request(1, 4)], heads=17), random).launch(CPU)
    forward = Forward(Case([Request(1, 4)], block=1, ratio=1), random)
    with pytest.raises(ValueError, match="not both"):
        forward.launch(CPU)
