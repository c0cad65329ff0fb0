"""Skinny products against float64 products of the decoded weights.

Most inputs are small integers under power-of-two scales: every sum is then exact in float32 whatever its order, and
the results must be equal bit for bit. Random inputs follow with a bound on the float32 sums.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import ModelConfig
from flashstep.formats import Numerics, decode_fp8_weight, fp8_quantize, ue8m0_encode
from flashstep.ops import Rope, rms_norm
from flashstep.stages.attention.reference import window_entry
from flashstep.stages.boundary.cuda import pack_fn
from flashstep.stages.dense import cuda
from flashstep.stages.dense.cuda import (
    Bf16,
    Fp8,
    Latent,
    Mixes,
    PackedWeight,
    Peers,
    Rows,
    Scores,
    Segment,
    Shape,
    Window,
)
from flashstep.tiny import small_config

torch.set_num_threads(1)

# Float32 sums of up to 5,120 terms in parts: far fewer than 64 roundings or truncations (tensor cores) in a row.
SUM_ERROR = 2.0**-18
# wgmma keeps about 13 bits below the largest product of a group.
WGMMA_ERROR = 2.0**-11


class Case:
    """Random numbers of a test, by its name."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self.draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.draws)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draws)

    def fp8_weight(self, outputs: int, columns: int, *, exact: bool = True) -> tuple[PackedWeight, Tensor]:
        """Packed, and its values float64."""
        values = self.integers(-4, 4, outputs, columns).float() if exact else self.normal(outputs, columns)
        weight = values.to(torch.float8_e4m3fn)
        blocks = (-(-outputs // 32), -(-columns // 32))
        scale = self.integers(126 if exact else 110, 129, *blocks).to(torch.uint8)
        packed = cuda.pack_fp8(weight.to(self.device), scale.to(self.device))
        return packed, decode_fp8_weight(weight, scale).double()

    def bf16_weight(self, outputs: int, columns: int, *, exact: bool = True) -> tuple[PackedWeight, Tensor]:
        values = self.integers(-4, 4, outputs, columns) if exact else self.normal(outputs, columns)
        weight = values.bfloat16()
        return cuda.pack_bf16(weight.to(self.device)), weight.double()

    def rows(self, rows: int, columns: int, *, exact: bool = True) -> Tensor:
        """bf16 rows; exact: fp8 keeps them as they are."""
        if not exact:
            return (self.normal(rows, columns) * 2.0 ** self.integers(-3, 3, rows, 1)).bfloat16()
        return self.integers(-8, 8, rows, columns).bfloat16()

    def fp8(self, x: Tensor) -> tuple[Fp8, Tensor]:
        """Fragments of bf16 rows, and the values they hold float64. Rows of the last tile that are not there: noise."""
        rows, columns = x.shape
        tiles = -(-rows // 8)
        quantized, scale = fp8_quantize(x)
        codes = self.integers(0, 0x7E, tiles * 8, columns).to(torch.uint8)
        scales = self.integers(100, 150, tiles * 8, columns // 32).to(torch.uint8)
        codes[:rows], scales[:rows] = quantized.view(torch.uint8), ue8m0_encode(scale)
        values = (quantized.double().unflatten(-1, (-1, 32)) * scale.double().unsqueeze(-1)).flatten(-2)
        codes = codes.view(tiles, 8, columns // 16, 16).transpose(1, 2).contiguous()
        scales = scales.view(tiles, 8, columns // 32).transpose(1, 2).contiguous()
        return Fp8(codes.to(self.device), scales.to(self.device)), values

    def bf16(self, x: Tensor) -> Bf16:
        rows, columns = x.shape
        tiles = -(-rows // 8)
        values = (self.normal(tiles * 8, columns) * 1000).bfloat16()
        values[:rows] = x
        return Bf16(values.view(tiles, 8, columns // 8, 8).transpose(1, 2).contiguous().to(self.device))

    def poison(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def empty_fp8(self, rows: int, columns: int) -> Fp8:
        tiles = -(-rows // 8)
        codes = torch.full((tiles, columns // 16, 8, 16), 0x7F, dtype=torch.uint8, device=self.device)
        return Fp8(codes, torch.full((tiles, columns // 32, 8), 0xFF, dtype=torch.uint8, device=self.device))


@pytest.fixture
def case(device: torch.device, request: pytest.FixtureRequest) -> Case:
    return Case(device, request.node.name)


def run(case: Case, segments: Sequence[Segment], rows: int, **options: object) -> None:
    launches = cuda.product(case.device, segments, rows, stage="test", **options)
    for launch in launches:
        launch()


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Same bits; names the first coordinate that differs."""
    got = got.cpu()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    differs = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if bool(differs.any()):
        where = tuple(int(i) for i in (got != expected).nonzero()[0])
        raise AssertionError(
            f"{int((got != expected).sum())} differ; at {where} {got[where]}, expected {expected[where]}"
        )


def assert_untouched(out: Tensor, rows: int, first: int, count: int) -> None:
    """Everything of `out` [.., stride] but rows < `rows` of `count` columns from `first` on is still poison."""
    kept = torch.ones(out.shape, dtype=torch.bool)
    kept[:rows, first : first + count] = False
    assert bool(out.cpu()[kept].isnan().all())


def assert_close(got: Tensor, exact: Tensor, magnitude: Tensor, *, half_unit: float = 0.0) -> None:
    error, allowed = (got.cpu().double() - exact).abs(), magnitude * SUM_ERROR + exact.abs() * half_unit
    assert bool((error <= allowed).all()), f"worst {(error / allowed).max():.2f} times what is allowed"


def fragments(x: Fp8, rows: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scale codes [rows, columns / 32]."""
    codes, scales = (t.cpu().transpose(1, 2).flatten(0, 1).flatten(1)[:rows] for t in (x.codes, x.scales))
    return codes, scales


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "columns"), [(16, 32), (40, 96), (33, 100), (1, 4), (128, 256)])
def test_packing_keeps_every_byte(case: Case, outputs: int, columns: int) -> None:
    weight = case.integers(0, 255, outputs, columns).to(torch.uint8).view(torch.float8_e4m3fn).to(case.device)
    scale = case.integers(0, 254, -(-outputs // 32), -(-columns // 32)).to(torch.uint8).to(case.device)
    packed = cuda.pack_fp8(weight, scale)
    assert packed.nbytes == -(-outputs // 16) * -(-columns // 128) * 4 * 516
    codes, scales = cuda.unpack_fp8(packed)
    assert torch.equal(codes.view(torch.uint8), weight.view(torch.uint8))
    expected = torch.where(scale == 0, 2.0**-127, torch.exp2(scale.double() - 127).float())
    assert torch.equal(scales, expected.repeat_interleave(2, 0)[: scales.shape[0]])

    values = case.integers(-(2**15), 2**15 - 1, outputs, columns).to(torch.int16).view(torch.bfloat16).to(case.device)
    unpacked = cuda.unpack_bf16(cuda.pack_bf16(values))
    assert torch.equal(unpacked.view(torch.int16), values.view(torch.int16))


def test_packing_refuses_scales_of_another_shape(case: Case) -> None:
    weight = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale \(2, 1\).*expected \(2, 2\)"):
        cuda.pack_fp8(weight, torch.zeros(2, 1, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_random_weights_are_finite_and_of_useful_size(case: Case, kind: cuda.Kind) -> None:
    draws = torch.Generator(case.device).manual_seed(1)
    packed = cuda.random_packed(256, 512, kind, draws, case.device)
    if kind == "fp8":
        codes, scales = cuda.unpack_fp8(packed)
        weight = codes.double() * scales.double().repeat_interleave(16, 0).repeat_interleave(32, 1)
    else:
        weight = cuda.unpack_bf16(packed).double()
    assert 0.5 < float(weight.square().sum(1).mean().sqrt()) < 2
    assert float((weight.sum() / weight.abs().sum()).abs()) < 0.05


# -- products of the chain --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 8])
def test_two_fp8_weights_share_an_output(case: Case, rows: int, wgmma: bool) -> None:
    """wq_a and wkv write `low`; sizes that fill neither a tile nor the warps."""
    x = case.rows(rows, 96)
    operand, values = case.fp8(x)
    first, first_values = case.fp8_weight(40, 96)
    second, second_values = case.fp8_weight(21, 96)
    low = case.poison(rows + 1, 64, dtype=torch.bfloat16)
    run(case, [Segment(first, operand, Rows(low)), Segment(second, operand, Rows(low, 40))], rows, wgmma=wgmma)
    expected = torch.cat((values @ first_values.T, values @ second_values.T), dim=1).bfloat16()
    assert_equal(low[:rows, :61], expected)
    assert_untouched(low, rows, 0, 61)


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("rows", [6, 20])
def test_squares_of_latents(case: Case, rows: int, wgmma: bool) -> None:
    """What wq_a leaves for q_norm: of its results as rounded, whichever blocks of a cluster they come from."""
    operand, values = case.fp8(case.rows(rows, 256))
    first, first_values = case.fp8_weight(96, 256)
    second, _ = case.fp8_weight(40, 256)
    low, squares = case.poison(rows, 136, dtype=torch.bfloat16), case.poison(rows + 1, 4)
    segments = [Segment(first, operand, Rows(low, 0, squares)), Segment(second, operand, Rows(low, 96))]
    tiles = 4 if wgmma else 2
    shape = Shape(cluster=2, tiles_fp8=tiles, row_tiles=1 if rows <= 8 else 2, wgmma=wgmma)
    run(case, segments, rows, shape=shape)
    results = (values @ first_values.T).bfloat16()
    assert_equal(low[:rows, :96], results)
    assert_untouched(squares, rows, 0, 3)
    expected = results.double().square().unflatten(-1, (-1, 32)).sum(-1)
    assert_close(squares[:rows, :3], expected, expected)


@pytest.mark.parametrize("wgmma", [True, False])
def test_a_row_does_not_depend_on_the_others(case: Case, wgmma: bool) -> None:
    weight, _ = case.fp8_weight(48, 128, exact=False)
    x = case.rows(8, 128, exact=False)
    results = []
    for rows in (1, 5, 8):
        out = case.poison(rows, 48)
        operand, _ = case.fp8(torch.cat((x[:1], case.rows(rows - 1, 128, exact=False))))
        run(case, [Segment(weight, operand, Rows(out))], rows, wgmma=wgmma)
        results.append(out[:1].cpu())
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("rows", [6, 20])
def test_source_layer_mixes_kinds_and_outputs(case: Case, rows: int, wgmma: bool) -> None:
    """fp8 to bf16, bf16 to float32, K shared by a cluster; above 8 rows in passes of 16."""
    x = case.rows(rows, 256)
    operand, values = case.fp8(x)
    fp8, fp8_values = case.fp8_weight(80, 256)
    segments, expected = [], []
    low = case.poison(rows, 80, dtype=torch.bfloat16)
    segments.append(Segment(fp8, operand, Rows(low)))
    expected.append((values @ fp8_values.T).bfloat16())
    for outputs in (64, 24):
        weight, weight_values = case.bf16_weight(outputs, 256)
        segments.append(Segment(weight, case.bf16(x), Rows(case.poison(rows, outputs))))
        expected.append((x.double() @ weight_values.T).float())
    tiles = (4 if wgmma else 2, 4 if wgmma and rows > 8 else 1)
    shape = Shape(cluster=2, tiles_fp8=tiles[0], tiles_bf16=tiles[1], row_tiles=1 if rows <= 8 else 2, wgmma=wgmma)
    run(case, segments, rows, shape=shape)
    for segment, values in zip(segments, expected, strict=True):
        assert isinstance(segment.out, Rows)
        assert_equal(segment.out.values, values)


@pytest.mark.parametrize("rows", [3, 8])
def test_grouped_product_is_quantized_for_the_next(case: Case, rows: int) -> None:
    """wo_a: fp8 weights at bf16, an input per group, bf16 rounding and then fp8 with a scale per 32 outputs."""
    u = case.empty_fp8(rows, 192)
    segments, expected = [], []
    for group in range(2):
        x = case.rows(rows, 128) * 2.0 ** case.integers(-20, 20, 1, 1)  # what fp8 would not keep beside other columns
        weight, values = case.fp8_weight(96, 128)
        segments.append(Segment(weight, case.bf16(x.bfloat16()), Fp8(u.codes, u.scales, 96 * group)))
        expected.append(x.double() @ values.T)
    run(case, segments, rows)
    codes, scale = fp8_quantize(torch.cat(expected, dim=1).bfloat16())
    got_codes, got_scales = fragments(u, rows)
    assert_equal(got_scales, ue8m0_encode(scale))
    assert_equal(got_codes, codes.view(torch.uint8))
    if rows % 8:
        assert bool((u.codes[:, :, rows:] == 0x7F).all())
        assert bool((u.scales[:, :, rows:] == 0xFF).all())


@pytest.mark.parametrize(
    ("rows", "columns", "wgmma"), [(9, 512, False), (48, 480, True), (192, 512, True), (70, 480, False)]
)
def test_many_rows_to_peers(case: Case, rows: int, columns: int, wgmma: bool) -> None:
    """Passes over rows, four tiles a block, K over four blocks, three peers; the last pass is not full."""
    operand, values = case.fp8(case.rows(rows, columns))
    weight, weight_values = case.fp8_weight(80, columns)
    out = Peers([case.poison(rows, 96) for _ in range(3)], column=8)
    shape = Shape(blocks_per_sm=1, cluster=4, tiles_fp8=4, row_tiles=3, wgmma=wgmma)
    run(case, [Segment(weight, operand, out)], rows, shape=shape)
    for copy in out.values:
        assert_equal(copy[:, 8:88], (values @ weight_values.T).float())
        assert_untouched(copy, rows, 8, 80)


@pytest.mark.parametrize("rows", [6, 33])
def test_router_over_a_cluster_of_five(case: Case, rows: int) -> None:
    """K that five blocks and eight warps do not divide, outputs that end in the middle of four."""
    x = case.rows(rows, 352)
    weight, values = case.bf16_weight(22, 352)
    out = case.poison(rows, 23)
    shape = Shape(cluster=5, tiles_bf16=1, row_tiles=1 if rows <= 8 else 2)
    run(case, [Segment(weight, case.bf16(x), Rows(out))], rows, shape=shape)
    assert_equal(out[:, :22], (x.double() @ values.T).float())
    assert_untouched(out, rows, 0, 22)


@pytest.mark.parametrize("rows", [6, 9])
def test_scores_of_a_router(case: Case, rows: int) -> None:
    """From logits of thousands, both signs, where a plain logarithm of 1 + e^x ends, through small ones."""
    x = case.rows(rows, 64)
    x[0] = 0
    weight, values = case.bf16_weight(24, 64)
    weight = cuda.pack_bf16((values * 2.0 ** case.integers(-8, 6, 24, 1)).bfloat16().to(case.device))
    logits = x.double() @ cuda.unpack_bf16(weight).cpu().double().T
    out = case.poison(rows, 27)
    run(case, [Segment(weight, case.bf16(x), Scores(out, 2))], rows)
    expected = torch.nn.functional.softplus(logits, threshold=1000).sqrt()
    assert_untouched(out, rows, 2, 24)
    got = out[:, 2:26].cpu().double()
    assert bool(((got - expected).abs() <= expected * 2.0**-20 + 1e-18).all())
    assert float(logits.max()) > 1000
    assert float(logits.min()) < -1000


@pytest.mark.parametrize("rows", [6, 21])
@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp8 at bf16", "bf16"])
def test_random_inputs(case: Case, kind: str, wgmma: bool, rows: int) -> None:
    """Sizes of the release in K, shapes as chosen; scales that differ by 2^20."""
    columns, outputs = 5120 if kind != "fp8 at bf16" else 4096, 32
    x = case.rows(rows, columns, exact=False)
    make = case.bf16_weight if kind == "bf16" else case.fp8_weight
    weight, weight_values = make(outputs, columns, exact=False)
    operand, values = case.fp8(x) if kind == "fp8" else (case.bf16(x), x.double())
    exact, magnitude = values @ weight_values.T, values.abs() @ weight_values.abs().T
    out = case.poison(rows, outputs)
    run(case, [Segment(weight, operand, Rows(out))], rows, wgmma=wgmma)
    error = WGMMA_ERROR if wgmma and kind == "fp8" and not jit.emulated(case.device) else SUM_ERROR
    assert_close(out, exact, magnitude * (error / SUM_ERROR))
    assert float(exact.abs().median()) > 2 * error * float(magnitude.median())  # the bound says something


@pytest.mark.parametrize("normed", [True, False])
def test_prologue_is_the_separate_kernel(case: Case, normed: bool) -> None:
    """Bit for bit, for every shape; and both are what the reference quantizes."""
    rows, columns = 7, 288
    low = case.rows(rows, 320, exact=False).to(case.device)
    norm = (1 + 0.25 * case.normal(columns)).to(case.device) if normed else None
    squares = case.poison(rows, 12)  # 9 groups; what fills up the last four is not read
    squares[:, : columns // 32] = low[:, :columns].float().square().unflatten(-1, (-1, 32)).sum(-1)
    latent = Latent(low, norm, 1e-20, squares if normed else None)
    written = case.empty_fp8(rows, columns)
    for launch in cuda.quantize(case.device, latent, written, rows, stage="test"):
        launch()

    x = low[:, :columns].cpu()
    if norm is not None:
        x = rms_norm(x, norm.cpu().double(), 1e-20, Numerics())
    codes, scale = fp8_quantize(x)
    got_codes, got_scales = fragments(written, rows)
    # A norm in float32 may round a value that lies between two bf16 numbers the other way, rarely.
    assert float((got_codes == codes.view(torch.uint8)).float().mean()) > (0.99 if normed else 1 - 1e-9)
    assert float((got_scales == ue8m0_encode(scale)).float().mean()) > (0.95 if normed else 1 - 1e-9)
    assert bool((written.codes[0, :, rows:] == 0x7F).all())

    weight, _ = case.fp8_weight(64, columns, exact=False)
    results = []
    for operand, shape in (
        (written, Shape()),
        (latent, Shape()),
        (latent, Shape(tiles_fp8=4)),
        (written, Shape(tiles_fp8=4, wgmma=True)),
        (latent, Shape(tiles_fp8=4, wgmma=True)),
    ):
        out = case.poison(rows, 64)
        run(case, [Segment(weight, operand, Rows(out))], rows, shape=shape)
        results.append(out.cpu())
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    assert_equal(results[4], results[3])


def test_prologue_above_its_rows_writes_scratch(case: Case) -> None:
    rows, columns = 9, 128
    low = case.rows(rows, 192).to(case.device)
    weight, values = case.fp8_weight(32, columns)
    out = case.poison(rows, 32, dtype=torch.bfloat16)
    scratch = case.empty_fp8(rows, columns)
    segment = Segment(weight, Latent(low, scratch=scratch), Rows(out))
    launches = cuda.product(case.device, [segment], rows, stage="test", shape=Shape(tiles_fp8=2, row_tiles=2))
    assert [launch.name for launch in launches] == ["quantize", "product"]
    for launch in launches:
        launch()
    assert_equal(out, (low[:, :columns].cpu().double() @ values.T).bfloat16())
    with pytest.raises(ValueError, match="need scratch"):
        run(case, [Segment(weight, Latent(low), Rows(out))], rows)


# -- other work in the same launch ------------------------------------------------------------------------------------


def test_mixes_ride_along(case: Case) -> None:
    rows, hidden, slices = 6, 256, 3
    stream = case.normal(rows, 4, hidden).bfloat16()
    fn = case.normal(24, 4 * hidden)
    partials = case.poison(rows, slices, 28)
    x = case.rows(rows, hidden)
    operand, values = case.fp8(x)
    weight, weight_values = case.fp8_weight(48, hidden)
    out = case.poison(rows, 48)
    mixes = Mixes(stream.to(case.device), pack_fn(fn).to(case.device), partials, slices)
    run(case, [Segment(weight, operand, Rows(out))], rows, extra=mixes, shape=Shape(cluster=2, tiles_fp8=2))
    assert_equal(out, (values @ weight_values.T).float())
    flat = stream.flatten(1).double()
    exact = torch.cat((flat @ fn.double().T, flat.square().sum(1, keepdim=True)), dim=1)
    magnitude = torch.cat((flat.abs() @ fn.double().abs().T, flat.square().sum(1, keepdim=True)), dim=1)
    assert_close(partials.cpu().double().sum(1)[:, :25], exact, magnitude)


@pytest.mark.parametrize("rows", [6, 11])
def test_window_rides_along(case: Case, rows: int) -> None:
    """wq_b with its prologue or a kernel in front, and the window entries of the same latents; a row is inactive."""
    q_lora, head_dim, rope, ring = 128, 64, 32, 24
    config = ModelConfig.from_dict(small_config(head_dim=head_dim, qk_rope_head_dim=rope))
    low = case.rows(rows, q_lora + head_dim)
    kv_norm = (1 + 0.25 * case.normal(head_dim)).bfloat16()
    positions = torch.tensor([3, 25, 26, 27, 0, 1, 28, 29, 30, 31, 32])[:rows]
    slots = torch.tensor([1, 0, 0, 0, -1, 2, 0, 0, 0, 0, 0])[:rows]
    frequencies = Rope(config, compressed=False)
    codes = torch.full((3, ring, head_dim), 0x7F, dtype=torch.uint8, device=case.device)
    scales = torch.full((3, ring, head_dim // 32), 0xFF, dtype=torch.uint8, device=case.device)
    weight, values = case.fp8_weight(80, q_lora)
    out = case.poison(rows, 80, dtype=torch.bfloat16)
    latents = low.to(case.device)
    window = Window(
        low=latents,
        column=q_lora,
        kv_norm=kv_norm.to(case.device),
        eps=1e-20,
        frequencies=frequencies.frequencies.to(case.device),
        row_position=positions.int().to(case.device),
        row_slot=slots.int().to(case.device),
        codes=codes,
        scales=scales,
        ring=ring,
    )
    latent = Latent(latents, scratch=case.empty_fp8(rows, q_lora))
    run(
        case,
        [Segment(weight, latent, Rows(out))],
        rows,
        extra=window,
        shape=Shape(tiles_fp8=2, row_tiles=-(-rows // 8)),
    )
    assert_equal(out, (low[:, :q_lora].double() @ values.T).bfloat16())

    latent = rms_norm(low[:, q_lora:], kv_norm.double(), 1e-20, Numerics())
    expected = window_entry(latent, frequencies.at(positions), Numerics()).double()
    stored = codes.cpu().view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 32))
    stored = (stored * torch.exp2(scales.cpu().double() - 127).unsqueeze(-1)).flatten(-2)
    active = slots >= 0
    got = stored[slots[active], (positions % ring)[active]]
    assert bool(((got - expected[active]).abs() <= expected[active].abs() * 2.0**-3 + 2.0**-8).all())
    assert float((got == expected[active]).double().mean()) > 0.95
    assert int((codes == 0x7F).all(-1).sum()) == 3 * ring - int(active.sum())


# -- large weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 6])
def test_stream_of_a_head(case: Case, rows: int) -> None:
    """bf16 to float32; blocks with 15 or 16 tiles in rounds of 8, a ring that turns several times."""
    x = case.rows(rows, 192)
    weight, values = case.bf16_weight(990, 192)
    out = case.poison(rows, 992)
    for launch in cuda.stream_product(
        case.device, weight, case.bf16(x), Rows(out), rows, stage="test", tiles=8, blocks=4
    ):
        assert launch.nbytes == weight.nbytes
        launch()
    assert_equal(out[:, :990], (x.double() @ values.T).float())
    assert_untouched(out, rows, 0, 990)


@pytest.mark.parametrize(("rows", "tiles"), [(6, 4), (20, 2), (75, 8)])
def test_stream_to_peers(case: Case, rows: int, tiles: int) -> None:
    """fp8; several warps a tile, a last stage that is not full, more blocks than full rounds."""
    operand, values = case.fp8(case.rows(rows, 1216))
    weight, weight_values = case.fp8_weight(250, 1216)
    out = Peers([case.poison(rows, 250) for _ in range(2)])
    for launch in cuda.stream_product(case.device, weight, operand, out, rows, stage="test", tiles=tiles, blocks=3):
        assert launch.name == "stream"
        launch()
    for copy in out.values:
        assert_equal(copy, (values @ weight_values.T).float())


def test_stream_falls_back_where_scales_cannot_be_copied(case: Case) -> None:
    operand, values = case.fp8(case.rows(2, 96))
    weight, weight_values = case.fp8_weight(32, 96)
    out = case.poison(2, 32)
    (launch,) = cuda.stream_product(case.device, weight, operand, Rows(out), 2, stage="test")
    assert launch.name == "product"
    launch()
    assert_equal(out, (values @ weight_values.T).float())


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_operands_that_do_not_fit_are_refused(case: Case) -> None:
    weight, _ = case.fp8_weight(48, 128)
    bf16, _ = case.bf16_weight(48, 128)
    operand, _ = case.fp8(case.rows(6, 128))
    narrow, _ = case.fp8(case.rows(6, 64))
    latent = Latent(case.poison(6, 128, dtype=torch.bfloat16), case.poison(128), 1e-20)
    out = Rows(case.poison(6, 48))
    for segments, rows, match in (
        ([], 6, "0 segments"),
        ([Segment(weight, operand, out)], 0, "0 rows"),
        ([Segment(weight, operand, out)], 193, "193 rows"),
        ([Segment(weight, operand, out)], 9, "expected"),
        ([Segment(weight, narrow, out)], 6, "expected"),
        ([Segment(bf16, operand, out)], 6, "bf16 weights take bf16"),
        ([Segment(weight, operand, Rows(out.values, 8))], 6, "expected 6 x 56"),
        ([Segment(weight, operand, case.empty_fp8(6, 64))], 6, "whole groups of 32"),
        ([Segment(weight, operand, Rows(case.poison(5, 48)))], 6, "output"),
        ([Segment(weight, latent, out)], 6, "a norm needs 6 rows of 4"),
        ([Segment(weight, operand, Rows(out.values, 0, case.poison(6, 4)))], 6, "squares of 48 results"),
    ):
        with pytest.raises(ValueError, match=match):
            cuda.product(case.device, segments, rows, stage="test")


@pytest.mark.parametrize("rows", [1, 6, 8, 9, 24, 48, 192])
def test_released_shapes_fit_a_multiprocessor(rows: int) -> None:
    for plan in cuda._released(rows):
        assert plan.shared <= 227 * 1024
        assert plan.grid % plan.cluster == 0
        assert plan.cluster <= 8
        if rows <= 8 and plan.kernel != "stream":  # beside the next kernel of the chain, which fills its own
            assert plan.shared <= 116 * 1024
