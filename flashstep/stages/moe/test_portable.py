"""Routing and experts in Triton against the formulas of `reference.py`, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashstep import formats
from flashstep.ops import top_k
from flashstep.stages.dense.portable import Fp8Rows
from flashstep.stages.moe import cuda, portable
from flashstep.stages.moe.cuda import Shape
from flashstep.stages.moe.portable import Cut

TINY = Shape(256, 128, 8, 2, 1.5)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Experts:
    """Random weights of a shape: packed on the device, and as float64 values."""

    def __init__(self, shape: Shape, random: torch.Generator, device: torch.device) -> None:
        s = shape

        def fp4(*size: int) -> tuple[Tensor, Tensor]:
            middle = 127 - round(math.log2(2.9 * math.sqrt(size[-1])))
            codes = torch.randint(0, 256, (*size[:-1], size[-1] // 2), generator=random, dtype=torch.uint8)
            scales = (*size[:-1], size[-1] // 32)
            return codes, torch.randint(middle - 1, middle + 2, scales, generator=random, dtype=torch.uint8)

        def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            values = torch.randn(rows, columns, generator=random) / math.sqrt(columns)
            values *= 2.0 ** torch.randint(-2, 3, (rows, 1), generator=random)
            weight, scale = formats.encode_fp8_weight(values)
            return weight.view(torch.uint8), scale

        (w1, s1), (w3, s3), (w2, s2) = (
            fp4(s.experts, rows, k) for rows, k in ((s.inner, s.hidden),) * 2 + ((s.hidden, s.inner),)
        )
        (v1, t1), (v3, t3), (v2, t2) = (fp8(rows, k) for rows, k in ((s.inner, s.hidden),) * 2 + ((s.hidden, s.inner),))
        self.packed = cuda.Weights(
            cuda.pack_gate_up(w1, w3, s1, s3).to(device),
            cuda.pack_down(w2, s2).to(device),
            cuda.pack_shared_gate_up(v1, v3, t1, t3).to(device),
            cuda.pack_shared_down(v2, t2).to(device),
        )
        self.gate, self.up, self.down = (formats.decode_fp4_weight(*w).double() for w in ((w1, s1), (w3, s3), (w2, s2)))
        self.shared_gate, self.shared_up, self.shared_down = (
            formats.decode_fp8_weight(w.view(torch.float8_e4m3fn), t).double()
            for w, t in ((v1, t1), (v3, t3), (v2, t2))
        )


def rows_of(x: Tensor, device: torch.device) -> Fp8Rows:
    codes, scales = formats.fp8_quantize(x)
    return Fp8Rows(codes.view(torch.uint8).to(device), formats.ue8m0_encode(scales).to(device))


def routing(logits: Tensor, bias: Tensor, slots: Tensor | None, shape: Shape) -> tuple[Tensor, Tensor]:
    """What `reference.route` computes; -1 and 0 for inactive rows."""
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    chosen = top_k(scores + bias.double(), shape.top_k)
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * shape.scaling
    if slots is not None:
        chosen, weights = chosen.masked_fill(slots[:, None] < 0, -1), weights.masked_fill(slots[:, None] < 0, 0)
    return chosen, weights


def in_order(h: Tensor) -> Tensor:
    """h in operand order [.., inner] with its columns in their own."""
    return h.cpu().unflatten(-1, (-1, 2, 4, 2)).permute(0, 1, 3, 4, 2).flatten(1)


def assert_h(h: Tensor, x: Tensor, gate: Tensor, up: Tensor, weight: Tensor | None, limit: float) -> None:
    """A rounding of g or u to bf16 may fall to the other side, which moves h by one step of fp8."""
    g, u = (x.double() @ gate.T).bfloat16().double(), (x.double() @ up.T).bfloat16().double()
    wanted = torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
    if weight is not None:
        wanted = wanted * weight[:, None]
    wanted = formats.fp8_round_trip(wanted.bfloat16()).double()
    h = h.double()
    most = wanted.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    step = torch.maximum(wanted.abs(), h.abs()) / 8 + most / 448 / 2**8
    assert ((h - wanted).abs() <= step).all()
    assert (h != wanted).double().mean() < 0.03
    assert wanted.abs().mean() > 1e-3


def assert_products(got: Tensor, h: Tensor, down: Tensor) -> None:
    exact = h.double() @ down.T
    sizes = h.double().abs() @ down.abs().T
    assert got.dtype == torch.bfloat16
    assert ((got.cpu().double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 2.0**-19).all()


# -- routing and sorting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "k", "rows"), [(384, 6, 70), (6, 2, 9), (40, 8, 1)])
def test_choices_and_weights(device, random, num_experts, k, rows):
    shape = Shape(64, 32, num_experts, k, 1.5)
    logits = torch.randn(rows, num_experts, generator=random) * 3
    logits[0] *= 20  # far tails of softplus
    bias = torch.randn(num_experts, generator=random)
    slots = torch.arange(rows, dtype=torch.int32)
    slots[2::5] = -1
    chosen, weights = portable.route(logits.to(device), bias.to(device), slots.to(device), shape)
    wanted, wanted_weights = routing(logits, bias, slots, shape)
    assert torch.equal(chosen.cpu().long(), wanted)
    torch.testing.assert_close(weights.cpu().double(), wanted_weights, rtol=3e-6, atol=0)


def test_equal_scores_and_damaged_ones_choose_the_lowest_experts(device):
    shape = Shape(64, 32, 10, 3, 1.0)
    logits = torch.zeros(3, 10)
    logits[1, 7] = 1
    logits[2] = torch.nan
    chosen, _ = portable.route(logits.to(device), torch.zeros(10, device=device), None, shape)
    assert chosen.tolist() == [[0, 1, 2], [7, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (50, 16), (50, 4), (3000, 128)])
def test_visits_are_sorted_by_expert_into_blocks(device, random, rows, size):
    shape = Shape(64, 32, 12, 3, 1.0)
    chosen = torch.rand(rows, 12, generator=random).topk(3).indices.int()
    chosen[:, 0] = torch.where(chosen[:, 0] == 5, 11, chosen[:, 0])  # experts of none and of many
    chosen[3::7] = -1
    visits = portable.sort(chosen.to(device), shape, size)
    flat = chosen.flatten()
    wanted = [visit for expert in range(12) for visit in (flat == expert).nonzero().flatten().tolist()]
    assert visits.order[: len(wanted)].tolist() == wanted
    blocks, at = [], 0
    for expert in range(12):
        count = int((flat == expert).sum())
        blocks += [[expert, at + i, min(size, count - i)] for i in range(0, count, size)]
        at += count
    listed = visits.blocks.tolist()
    assert listed[: len(blocks)] == blocks
    assert all(expert == -1 for expert, _, _ in listed[len(blocks) :])


def test_as_many_blocks_as_there_can_be(device):
    """Every expert but one has a single visit."""
    shape = Shape(64, 32, 8, 1, 1.0)
    chosen = torch.tensor([0] * 9 + list(range(1, 8)), dtype=torch.int32)[:, None]
    visits = portable.sort(chosen.to(device), shape, 8)
    assert (visits.blocks[:, 0] >= 0).all()


# -- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rows", "cut"),
    [
        (TINY, 1, None),
        (TINY, 40, None),
        (Shape(128, 32, 5, 2, 1.5, limit=0.5), 21, None),  # limits that bite
        (Shape(64, 96, 6, 3, 1.5), 9, None),  # an odd number of groups of 32
        (Shape(192, 192, 3, 2, 1.5), 14, Cut(1, 2, 4, 2)),  # a last step that is not whole
        (Shape(128, 128, 3, 2, 1.5), 30, Cut(2, 1, 4, 2, 16)),  # blocks of two widths
        (Shape(128, 160, 3, 2, 1.5), 20, Cut(2, 2, 8, 2)),  # a last program with a tile too many
    ],
)
def test_experts_stage_by_stage(device, random, shape, rows, cut):
    weights = Experts(shape, random, device)
    x = torch.randn(rows, shape.hidden, generator=random).bfloat16()
    x_fp8, quantized = formats.fp8_round_trip(x), rows_of(x, device)
    logits = torch.randn(rows, shape.experts, generator=random)
    chosen, route_weights = routing(logits, torch.zeros(shape.experts), None, shape)
    if rows > 2:
        chosen[1] = -1
    visits = portable.sort(chosen.int().to(device), shape, 16 if cut is None else 32)
    h = portable.gate_up(quantized, weights.packed.gate_up, shape, visits, route_weights.float().to(device), cut)
    routed = portable.down(h, weights.packed.down, shape, visits, cut)
    plain = in_order(h)
    for expert, first, count in visits.blocks.tolist():
        if expert < 0:
            continue
        visit = visits.order[first : first + count].cpu().long()
        part, weight = plain[first : first + count], route_weights.flatten()[visit]
        row = visit // shape.top_k
        assert_h(part, x_fp8[row], weights.gate[expert], weights.up[expert], weight, shape.limit)
        assert_products(routed.cpu()[visit], part, weights.down[expert])
    h = portable.gate_up(quantized, weights.packed.shared_gate_up, shape, cut=cut)
    shared = portable.down(h, weights.packed.shared_down, shape, cut=cut)
    assert_h(in_order(h), x_fp8, weights.shared_gate, weights.shared_up, None, shape.limit)
    assert_products(shared, in_order(h), weights.shared_down)
    got = portable.add(routed, shared, chosen.int().to(device)).cpu()
    total = shared.cpu().float()
    for place in range(shape.top_k):
        part = routed.cpu()[torch.arange(rows) * shape.top_k + place].float()
        total += torch.where(chosen[:, place, None] >= 0, part, 0.0)
    assert torch.equal(got, total)


def test_inactive_rows_visit_nobody_and_stay_finite(device, random):
    weights = Experts(TINY, random, device)
    x = torch.randn(6, 256, generator=random).bfloat16()
    logits, bias = torch.randn(6, 8, generator=random), torch.zeros(8)
    slots = torch.tensor([0, -1, 2, -1, -1, 5], dtype=torch.int32)

    def run(slots: Tensor | None, rows: list[int]) -> Tensor:
        on = None if slots is None else slots.to(device)
        got = portable.experts(
            rows_of(x[rows], device), logits[rows].to(device), bias.to(device), weights.packed, TINY, slots=on
        )
        return got.cpu()

    out = run(slots, list(range(6)))
    assert out.isfinite().all()
    assert torch.equal(out[[0, 2, 5]], run(None, [0, 2, 5]))  # neither do they change the others' bits
    chosen, _ = portable.route(logits.to(device), bias.to(device), slots.to(device), TINY)
    visited = portable.sort(chosen, TINY, 16).blocks[:, 0].tolist()
    assert {e for e in visited if e >= 0} == set(chosen[[0, 2, 5]].flatten().tolist())
    assert run(torch.full((6,), -1, dtype=torch.int32), list(range(6))).isfinite().all()


def test_no_rows(device, random):
    weights = Experts(TINY, random, device)
    none = rows_of(torch.empty(0, 256).bfloat16(), device)
    out = portable.experts(none, torch.empty(0, 8, device=device), torch.zeros(8, device=device), weights.packed, TINY)
    assert out.shape == (0, 256)
