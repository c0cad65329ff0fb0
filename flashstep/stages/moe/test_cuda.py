import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flashstep import formats, jit
from flashstep.ops import top_k
from flashstep.stages.moe import cuda
from flashstep.stages.moe.cuda import Shape, Tuning

TINY = Shape(256, 128, 8, 2, 1.5)
DRAFT = Shape(256, 128, 6, 2, 1.5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def random_fp4(g: torch.Generator, *size: int) -> tuple[Tensor, Tensor]:
    """Codes [..., k / 2] and scales [..., k / 32] of a weight [..., k] whose products with x are of order one."""
    middle = 127 - round(math.log2(2.9 * math.sqrt(size[-1])))
    codes = torch.randint(0, 256, (*size[:-1], size[-1] // 2), generator=g, dtype=torch.uint8)
    return codes, torch.randint(middle - 1, middle + 2, (*size[:-1], size[-1] // 32), generator=g, dtype=torch.uint8)


def random_fp8(g: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    weight, scale = formats.encode_fp8_weight(torch.randn(rows, columns, generator=g) / math.sqrt(columns))
    return weight.view(torch.uint8), scale


def decode_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    return formats.decode_fp4_weight(codes, scales).double()


def decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    return formats.decode_fp8_weight(codes.view(torch.float8_e4m3fn), scales).double()


def fragments(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 fragments of x [rows, k]: codes [tiles, k / 16, 8, 16], scales [tiles, k / 32, 8]; zeros beyond the rows."""
    codes, scale = formats.fp8_quantize(x)
    codes, scale = codes.view(torch.uint8), formats.ue8m0_encode(scale)
    pad = -len(x) % 8
    codes = torch.cat([codes, codes.new_zeros(pad, codes.shape[1])])
    scale = torch.cat([scale, scale.new_full((pad, scale.shape[1]), 127)])
    return (
        codes.unflatten(0, (-1, 8)).unflatten(2, (-1, 16)).transpose(1, 2).contiguous(),
        scale.unflatten(0, (-1, 8)).transpose(1, 2).contiguous(),
    )


@dataclass
class Case:
    """Random experts, and `rows` random rows, of a shape; the launches over poisoned scratch."""

    device: torch.device
    shape: Shape
    rows: int
    wgmma: bool = True
    blocks: int | None = None
    peers: int = 1
    seed: int = 0
    few: Tuning | None = None
    gate_up: Tuning | None = None
    down: Tuning | None = None

    def __post_init__(self):
        s, g = self.shape, torch.Generator().manual_seed(self.seed)
        self.w1, self.w3 = random_fp4(g, s.experts, s.inner, s.hidden), random_fp4(g, s.experts, s.inner, s.hidden)
        self.w2 = random_fp4(g, s.experts, s.hidden, s.inner)
        self.v1, self.v3 = random_fp8(g, s.inner, s.hidden), random_fp8(g, s.inner, s.hidden)
        self.v2 = random_fp8(g, s.hidden, s.inner)
        self.x = torch.randn(self.rows, s.hidden, generator=g).bfloat16()
        self.logits = torch.randn(self.rows, s.experts, generator=g) * 3
        self.bias = torch.randn(s.experts, generator=g)
        self.slot = torch.arange(self.rows, dtype=torch.int32)

    def on(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def prepare(self) -> list[jit.Launch]:
        (w1, s1), (w3, s3), (w2, s2), (v1, t1), (v3, t3), (v2, t2) = (
            self.w1,
            self.w3,
            self.w2,
            self.v1,
            self.v3,
            self.v2,
        )
        weights = cuda.Weights(
            self.on(cuda.pack_gate_up(w1, w3, s1, s3)),
            self.on(cuda.pack_down(w2, s2)),
            self.on(cuda.pack_shared_gate_up(v1, v3, t1, t3)),
            self.on(cuda.pack_shared_down(v2, t2)),
        )
        blocks = self.blocks or cuda.num_blocks(self.device)
        tuning = {"gate_up": self.gate_up, "down": self.down}
        sizes = cuda.scratch_sizes(self.shape, self.rows, blocks, **tuning)
        scores = torch.nn.functional.softplus(self.logits.double()).sqrt().float()
        self.scratch = {
            name: torch.empty(size, dtype=dtype, device=self.device) for name, (size, dtype) in sizes.items()
        }
        for tensor in self.scratch.values():
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, -1
        for name in self.marks():
            self.scratch[name].zero_()
        self.out = [torch.full((self.rows, self.shape.hidden), math.nan, device=self.device) for _ in range(self.peers)]
        codes, scales = fragments(self.x)
        return cuda.experts(
            self.device,
            self.shape,
            self.rows,
            weights=weights,
            bias=self.on(self.bias),
            scores=self.on(scores),
            row_slot=self.on(self.slot),
            x_codes=self.on(codes),
            x_scales=self.on(scales),
            scratch=self.scratch,
            out=self.out,
            blocks=blocks,
            wgmma=self.wgmma,
            few=self.few,
            **tuning,
        )

    def marks(self) -> tuple[str, ...]:
        """Scratch that starts as zeros and is left so."""
        return cuda.ZEROS if self.rows <= 8 else ("arrivals",)

    def run(self) -> Tensor:
        for launch in self.prepare():
            launch()
        for name in self.marks():
            assert not self.scratch[name].view(torch.int32).any(), f"{name} must be ready for the next launch"
        for other in self.out[1:]:
            assert torch.equal(other, self.out[0])
        return self.out[0].cpu()

    # ---- what the list says -----------------------------------------------------------------------------------------

    @property
    def listed(self) -> list[int]:
        """Experts of the routed pairs."""
        entries = self.scratch["list"].cpu()
        return entries[4 : 4 + int(entries[0])].tolist()

    def pair_rows(self) -> list[list[int]]:
        """Rows of every pair, shared ones first, -1: none."""
        if self.rows <= 8:
            return [[row if row < self.rows else -1 for row in range(8)]] * (1 + len(self.listed))
        return self.scratch["pair_rows"].cpu()[: -(-self.rows // 8) + len(self.listed)].tolist()

    def routing(self) -> tuple[Tensor, Tensor]:
        """Expected choice and weights, float64, as reference.route computes them; -1 and 0 for inactive rows."""
        scores = torch.nn.functional.softplus(self.logits.double()).sqrt()
        chosen = top_k(scores + self.bias.double(), self.shape.top_k)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * self.shape.scaling
        inactive = (self.slot < 0)[:, None]
        return chosen.masked_fill(inactive, -1), weights.masked_fill(inactive, 0)

    # ---- comparisons ------------------------------------------------------------------------------------------------

    def check(self) -> Tensor:
        """Runs and compares; the output."""
        out = self.run()
        chosen, weights = self.routing()
        assert self.listed == sorted(self.listed)
        assert set(self.listed) == set(chosen.unique().tolist()) - {-1}
        x = formats.fp8_round_trip(self.x).double()
        w1, w3, w2 = decode_fp4(*self.w1), decode_fp4(*self.w3), decode_fp4(*self.w2)
        v1, v3, v2 = decode_fp8(*self.v1), decode_fp8(*self.v3), decode_fp8(*self.v2)
        pair_rows, shared = self.pair_rows(), -(-self.rows // 8)
        expected, magnitude, rounding = (torch.zeros_like(out, dtype=torch.float64) for _ in range(3))
        seen: set[tuple[int, int]] = set()
        for pair, rows in enumerate(pair_rows):
            real = [row for row in rows if row >= 0]
            places = [place for place, row in enumerate(rows) if row >= 0]
            routed = pair >= shared
            expert = self.listed[pair - shared] if routed else 0
            gate, up, down = (w1[expert], w3[expert], w2[expert]) if routed else (v1, v3, v2)
            named = (chosen[real] == expert).double() if routed else None
            weight = (weights[real] * named).sum(1) if named is not None else None
            h = self.decode_h(pair, routed)
            self.check_h(h[places], x[real], gate, up, weight, pair)
            assert not h[[p for p in range(8) if p not in places]].any()
            product = h[places] @ down.T
            expected.index_add_(0, torch.tensor(real, dtype=torch.int64), product.bfloat16().double())
            rounding.index_add_(0, torch.tensor(real, dtype=torch.int64), product.abs() * 2.0**-7)
            magnitude.index_add_(0, torch.tensor(real, dtype=torch.int64), h[places].abs() @ down.abs().T)
            if named is not None:
                seen |= {(real[i], expert) for i in range(len(real)) if named[i].any()}
        assert seen == {(row, e) for row in range(self.rows) for e in chosen[row].tolist() if e >= 0}
        # Down of the h that the kernel made, exact but for float32 sums; wgmma on hardware keeps about 13 bits below
        # the largest product of a group.
        bound = magnitude * (2**-11 if self.wgmma and not jit.emulated(self.device) else 2**-19) + 1e-30
        # Every expert's product rounds to bf16: one in doubt may round the other way. Most outputs hold to the tight
        # bound even so (not with wgmma on hardware, whose sums are in doubt more often).
        error = (out.double() - expected).abs().nan_to_num(nan=math.inf)
        assert (error <= bound).double().mean() > (0.2 if self.wgmma and not jit.emulated(self.device) else 0.95)
        worst = error / (bound + rounding)
        assert worst.max() <= 1, f"{worst.max()} bounds at {divmod(int(worst.argmax()), out.shape[1])}"
        assert magnitude.min() > 0.01  # nothing degenerate
        return out

    def decode_h(self, pair: int, routed: bool) -> Tensor:
        """h of a pair [8, inner] float64 from its operand tile."""
        inner = self.shape.inner
        columns = inner if self.rows > 8 else cuda.h_unit_columns(self.shape, routed)
        parts = []
        for unit in self.scratch["h"][pair].cpu().view(-1, 9 * columns):
            codes = unit[: 8 * columns].view(torch.float8_e4m3fn).double().view(-1, 8, 16).transpose(0, 1).flatten(1)
            scales = unit[8 * columns :].clone().view(torch.float32).double().view(-1, 8).T
            parts.append(codes * scales.repeat_interleave(32, 1))
        h = torch.cat(parts, 1)
        assert h.isfinite().all()
        return h

    def check_h(self, h: Tensor, x: Tensor, w1: Tensor, w3: Tensor, weight: Tensor | None, pair: int) -> None:
        """h against the reference's formula: a rounding of g or u to bf16 may flip, which moves h by one fp8 step.

        What wgmma on hardware loses below the largest product of a group moves g and u, and h with them.
        """
        gate, up = (x @ w1.T).bfloat16().double(), (x @ w3.T).bfloat16().double()
        limit = self.shape.limit
        wanted = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        if weight is not None:
            wanted = wanted * weight[:, None]
        wanted = formats.fp8_round_trip(wanted.bfloat16()).double()
        most = wanted.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
        # Of an fp8 number 2^-3 of itself, or its subnormal step, at a scale that may be twice as large.
        step = torch.maximum(wanted.abs(), h.abs()) / 8 + most / 448 / 2**8
        if self.wgmma and not jit.emulated(self.device):
            lost_gate, lost_up = (2.0**-12 * (x.abs() @ w.abs().T) for w in (w1, w3))
            scale = 1.0 if weight is None else weight[:, None]
            step += scale * (1.1 * lost_gate * (up.abs() + lost_up) + (gate.abs() + lost_gate) * lost_up)
        worst = (h - wanted).abs() / (step + 1e-300)
        assert worst.max() <= 1, f"pair {pair}: {worst.max()} steps at {divmod(int(worst.argmax()), h.shape[1])}"
        assert (h != wanted).double().mean() < 0.03, f"pair {pair}: {(h != wanted).double().mean()} of h differ"


# ---- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "piece", "shared"), [(5120, 256, 128), (576, 192, 96), (288, 320, 96), (2304, 256, 128), (32, 64, 32)]
)
def test_pieces_of_k(columns, piece, shared):
    assert (cuda.routed_piece(columns), cuda.shared_piece(columns)) == (piece, shared)


@pytest.mark.parametrize(("inner", "hidden"), [(32, 256), (64, 64), (288, 128), (576, 192), (96, 320)])
def test_packing_keeps_every_byte(inner, hidden):
    g = torch.Generator().manual_seed(inner)
    (w1, s1), (w3, s3), (w2, s2) = (
        random_fp4(g, 3, rows, k) for rows, k in ((inner, hidden),) * 2 + ((hidden, inner),)
    )
    packed = cuda.pack_gate_up(w1, w3, s1, s3)
    assert all(torch.equal(a, b) for a, b in zip(cuda.unpack_gate_up(packed, hidden), (w1, w3, s1, s3), strict=True))
    assert torch.equal(cuda.pack_gate_up(*cuda.unpack_gate_up(packed, hidden)), packed)
    packed = cuda.pack_down(w2, s2)
    assert all(torch.equal(a, b) for a, b in zip(cuda.unpack_down(packed, inner), (w2, s2), strict=True))
    (v1, t1), (v3, t3), (v2, t2) = (random_fp8(g, rows, k) for rows, k in ((inner, hidden),) * 2 + ((hidden, inner),))
    packed = cuda.pack_shared_gate_up(v1, v3, t1, t3)
    wanted = (v1, v3, t1, t3)
    assert all(torch.equal(a, b) for a, b in zip(cuda.unpack_shared_gate_up(packed, hidden), wanted, strict=True))
    packed = cuda.pack_shared_down(v2, t2)
    assert all(torch.equal(a, b) for a, b in zip(cuda.unpack_shared_down(packed, inner), (v2, t2), strict=True))


def test_random_weights_have_the_packed_shape_and_sane_scales():
    shape = Shape(256, 288, 5, 2, 1.5)
    weights = cuda.random_packed(torch.device("cpu"), shape, torch.Generator().manual_seed(1))
    w1, _, s1, _ = cuda.unpack_gate_up(weights.gate_up, 256)
    assert torch.equal(weights.gate_up, cuda.pack_gate_up(*cuda.unpack_gate_up(weights.gate_up, 256)))
    assert 0.3 < decode_fp4(w1, s1).std() * math.sqrt(256) < 3
    w2, s2 = cuda.unpack_down(weights.down, 288)
    assert 0.3 < decode_fp4(w2, s2).std() * math.sqrt(288) < 3
    v2, t2 = cuda.unpack_shared_down(weights.shared_down, 288)
    assert decode_fp8(v2, t2).isfinite().all()
    assert 0.3 < decode_fp8(v2, t2).std() * math.sqrt(288) < 3


def test_shapes_that_do_not_fit_are_refused_at_once():
    with pytest.raises(ValueError, match=r"hidden 100.*inner 33.*top_k 9"):
        Shape(100, 33, 8, 9, 1.5)


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("column", [0, 5, 63, 95, 127])
def test_one_column_of_weights_lights_one_column(device, wgmma, column):
    """All weights are zero but one column of w2: out is that column times h of that column, and nothing else."""
    case = Case(device, TINY, 2, wgmma=wgmma)
    codes, scales = torch.zeros(8, 256, 128, dtype=torch.uint8), torch.full((8, 256, 4), 127, dtype=torch.uint8)
    codes[:, :, column] = torch.arange(256, dtype=torch.uint8) % 7 + 1
    case.w2 = formats.fp4_pack(codes).view(torch.uint8), scales
    case.v2 = torch.zeros_like(case.v2[0]), case.v2[1]
    out = case.run()
    h = sum(case.decode_h(1 + i, True)[:2, column] for i in range(len(case.listed)))
    wanted = h[:, None] * decode_fp4(*case.w2)[0, :, column]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-9)
    # The same of gate and up: x is lit in one column, so h sees that column of w1 and w3 alone.
    case = Case(device, TINY, 1, wgmma=wgmma)
    case.x = torch.zeros(1, 256).bfloat16()
    case.x[0, column] = 3
    case.run()
    gate, up = (decode_fp4(*w)[case.listed[0], :, column] * 3 for w in (case.w1, case.w3))
    weight = case.routing()[1][0, case.routing()[0][0].tolist().index(case.listed[0])]
    wanted = formats.fp8_round_trip((torch.nn.functional.silu(gate) * up * weight).bfloat16()[None])[0].double()
    torch.testing.assert_close(case.decode_h(1, True)[0], wanted, rtol=0.126, atol=1e-6)


# ---- routing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "k", "rows"), [(384, 6, 192), (128, 3, 13), (6, 2, 9), (40, 8, 48)])
def test_choices_and_weights_of_many_rows(device, num_experts, k, rows):
    case = Case(device, Shape(64, 32, num_experts, k, 1.5), rows)
    case.logits[0] *= 20  # far tails of softplus
    case.logits[1] = -80 + case.logits[1]
    case.slot[2::5] = -1
    launches = case.prepare()
    for launch in launches[:2]:
        launch()
    chosen, weights = case.routing()
    assert torch.equal(case.scratch["chosen"].cpu().long(), chosen)
    torch.testing.assert_close(case.scratch["chosen_weights"].cpu().double(), weights, rtol=2e-6, atol=0)
    pair_rows, pair_weights = case.pair_rows(), case.scratch["pair_weights"].cpu()
    shared = -(-rows // 8)
    assert pair_rows[:shared] == [[r if r < rows else -1 for r in range(8 * t, 8 * t + 8)] for t in range(shared)]
    place = shared
    for expert in chosen.unique().tolist()[1:]:
        visiting = (chosen == expert).any(1).nonzero().flatten().tolist()
        for first in range(0, len(visiting), 8):
            part = visiting[first : first + 8]
            assert case.listed[place - shared] == expert
            assert pair_rows[place] == part + [-1] * (8 - len(part))
            wanted = [case.scratch["chosen_weights"].cpu()[r][chosen[r] == expert].item() for r in part]
            assert pair_weights[place].tolist() == wanted + [0.0] * (8 - len(part))
            place += 1
    assert place == len(pair_rows)
    codes, scale = formats.fp8_quantize(case.x)
    operands = case.scratch["operands"].cpu()
    for pair in (0, shared, place - 1):
        got = operands[pair, : 8 * 64].view(-1, 8, 16).transpose(0, 1).flatten(1)
        got_scales = operands[pair, 8 * 64 :].view(torch.float32).view(-1, 8).T
        for i, row in enumerate(pair_rows[pair]):
            assert torch.equal(got[i], codes.view(torch.uint8)[row] if row >= 0 else torch.zeros_like(got[i]))
            assert torch.equal(got_scales[i], scale[row] if row >= 0 else torch.zeros(2))


@pytest.mark.parametrize("rows", [3, 11])
def test_ties_go_to_the_lowest_expert(device, rows):
    case = Case(device, TINY, rows)
    case.bias[:] = 0
    case.logits[:] = 1.25  # all equal
    case.logits[1] = torch.tensor([0.0, 2, 1, 2, 2, 1, 0, 2])  # the second place is shared by three
    case.logits[2] = torch.tensor([0.0, 0, 0, 0, 0, 0, 9, 0])
    case.check()
    assert case.routing()[0][:3].tolist() == [[0, 1], [1, 3], [6, 0]]
    assert sorted(set(case.listed)) == [0, 1, 3, 6]


@pytest.mark.parametrize("num_experts", [384, 40])
@pytest.mark.parametrize("rows", [6, 12])
def test_ties_among_many_experts_cross_lanes_and_lie_inside_them(device, num_experts, rows):
    case = Case(device, Shape(64, 32, num_experts, 6, 1.5), rows)
    case.bias[:] = 0
    case.logits = torch.randint(0, 3, case.logits.shape, generator=torch.Generator().manual_seed(3)).float()
    case.logits[1] = -2.0
    case.logits[2] = case.logits[0]
    case.check()


@pytest.mark.parametrize("rows", [8, 17])
def test_inactive_rows_cost_no_expert(device, rows):
    case = Case(device, TINY, rows)
    case.slot[:] = -1
    case.slot[rows - 2] = 4
    out = case.check()
    assert case.listed == sorted(case.routing()[0][rows - 2].tolist())
    assert out.isfinite().all()


@pytest.mark.parametrize("rows", [6, 12])
def test_no_active_row_leaves_the_shared_expert_alone(device, rows):
    case = Case(device, TINY, rows)
    case.slot[:] = -1
    out = case.check()
    assert case.listed == []
    case = Case(device, TINY, rows)
    case.slot[:] = -1
    case.v2 = torch.zeros_like(case.v2[0]), case.v2[1]
    assert not case.run().any()
    assert out.any()


@pytest.mark.parametrize("rows", [4, 12])
def test_rows_of_nan_stay_inside_the_tables(device, rows):
    """A broken row may give anything, but must not read outside, nor change what other rows choose."""
    case = Case(device, TINY, rows)
    case.logits[1] = math.nan
    case.run()
    chosen, _ = case.routing()
    assert set(chosen[[0, *range(2, rows)]].flatten().tolist()) <= set(case.listed) <= set(range(8))


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 6, 8, 9, 48])
def test_experts_of_the_tiny_model(device, wgmma, rows):
    Case(device, TINY, rows, wgmma=wgmma, peers=2, seed=rows).check()


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize(
    ("shape", "rows", "tuning"),
    [
        (Shape(256, 32, 8, 2, 1.5), 6, {}),  # TP4 of the tiny model: half a unit of K
        (Shape(256, 64, 8, 2, 1.5), 20, {}),
        (DRAFT, 5, {}),
        (Shape(128, 288, 4, 2, 2.0), 7, {}),  # three warpgroups, one padded piece of K
        (Shape(128, 288, 4, 2, 2.0), 10, {}),
        (Shape(512, 576, 3, 2, 1.5), 3, {"few": Tuning(2, 3, 2)}),
        (Shape(512, 576, 3, 2, 1.5), 2, {"few": Tuning(4, 5, 1)}),
        (Shape(512, 1152, 2, 1, 1.5), 3, {}),  # TP2 of the released model's inner: two steps of K in a pair of down
        (Shape(512, 576, 3, 2, 1.5), 9, {"gate_up": Tuning(2, 3, 2), "down": Tuning(4, 2, 3)}),
        (Shape(192, 96, 5, 3, 1.5), 9, {"gate_up": Tuning(1, 2, 1), "down": Tuning(3, 2, 1)}),
    ],
)
def test_experts_of_other_shapes(device, wgmma, shape, rows, tuning):
    Case(device, shape, rows, wgmma=wgmma, **tuning).check()


@pytest.mark.parametrize(("rows", "blocks"), [(6, 1), (6, 2), (6, 7), (6, 16), (12, 1), (12, 7), (12, 40)])
def test_any_number_of_blocks(device, rows, blocks):
    Case(device, TINY, rows, blocks=blocks).check()


@pytest.mark.parametrize("rows", [8, 30])
def test_every_row_chooses_the_same_experts(device, rows):
    case = Case(device, TINY, rows)
    case.bias[:] = 0
    case.bias[[2, 7]] = 50.0
    case.check()
    pairs = 1 if rows <= 8 else math.ceil(rows / 8)
    assert case.listed == [2] * pairs + [7] * pairs


def test_large_values_are_clamped(device):
    case = Case(device, TINY, 4)
    case.x *= 200
    case.check()
    assert case.run().isfinite().all()


@pytest.mark.parametrize("rows", [6, 33])
def test_two_runs_give_equal_bits_over_other_rubbish(device, rows):
    case = Case(device, TINY, rows)
    first = case.run().clone()
    launches = case.prepare()
    for name, tensor in case.scratch.items():
        if name not in case.marks():
            tensor.view(torch.uint8).fill_(0x5A)
    for _ in range(2):  # the second time over what the first has left
        case.out[0].fill_(math.nan)
        for launch in launches:
            launch()
        assert torch.equal(case.out[0].cpu(), first)


def test_refusals(device):
    case = Case(device, TINY, 4)
    case.prepare()
    with pytest.raises(ValueError, match=r"193 rows: 1\.\.192"):
        cuda.experts(
            device,
            TINY,
            193,
            weights=None,
            bias=None,
            scores=None,
            row_slot=None,
            x_codes=None,
            x_scales=None,
            scratch={},
            out=[],
        )
