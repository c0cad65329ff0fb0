"""Dense products in Triton against `formats.py` and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashstep import formats
from flashstep.ops import rms_norm
from flashstep.stages.dense import portable
from flashstep.stages.dense.pack import PackedWeight, pack_bf16, pack_fp8
from flashstep.stages.dense.portable import Fp8Rows, Shape


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def fp8_weight(outputs: int, columns: int, random: torch.Generator) -> tuple[PackedWeight, Tensor]:
    """A packed weight with scales of several powers of two, and its values."""
    codes = torch.randint(0, 256, (outputs, columns), generator=random, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    blocks = -(-outputs // 32), -(-columns // 32)
    scales = torch.randint(105, 116, blocks, generator=random, dtype=torch.uint8)
    weight = codes.view(torch.float8_e4m3fn)
    return pack_fp8(weight, scales), formats.decode_fp8_weight(weight, scales)


def fp8_rows(rows: int, columns: int, random: torch.Generator) -> tuple[Tensor, Fp8Rows]:
    x = (
        torch.randn(rows, columns, generator=random) * 2.0 ** torch.randint(-6, 6, (rows, 1), generator=random)
    ).bfloat16()
    codes, scales = formats.fp8_quantize(x)
    return formats.fp8_round_trip(x), Fp8Rows(codes.view(torch.uint8), formats.ue8m0_encode(scales))


def on(device: torch.device, weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.data.to(device), weight.outputs, weight.columns, weight.kind)


def assert_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within float32 sums (2^-22 of the sum of sizes is generous) and the rounding of the output."""
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    rounding = exact.abs() * 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
    assert ((got.cpu().double() - exact).abs() <= sizes * 2.0**-19 + rounding).all()


@pytest.mark.parametrize("columns", [32, 96, 1280])
def test_quantize_has_the_bits_of_the_formats(device, random, columns):
    x = torch.randn(5, columns + 16, generator=random).bfloat16()
    x[2] = 0
    got = portable.quantize(x.to(device)[:, :columns])
    codes, scales = formats.fp8_quantize(x[:, :columns])
    assert torch.equal(got.codes.cpu(), codes.view(torch.uint8))
    assert torch.equal(got.scales.cpu(), formats.ue8m0_encode(scales))
    operand = got.operand.cpu().view(5, columns // 16, 2, 4, 2).permute(0, 1, 3, 4, 2).reshape(5, columns)
    assert torch.equal(operand, formats.fp8_round_trip(x[:, :columns]))


def test_quantize_behind_a_norm(device, random):
    x = torch.randn(7, 128, generator=random).bfloat16()
    norm = torch.randn(128, generator=random).bfloat16()
    got = portable.quantize(x.to(device), norm.to(device), 1e-20)
    wanted = formats.fp8_round_trip(rms_norm(x, norm, 1e-20, formats.Numerics()))
    values = formats.decode_fp8_rows(got.codes.cpu().view(torch.float8_e4m3fn), got.scales.cpu())
    # The norm's last bit may fall to either side of a tie of bf16, and then of fp8.
    assert ((values.float() - wanted.float()).abs() <= wanted.abs() * 2.0**-3).all()
    assert (values == wanted).float().mean() > 0.99


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(1, 64, 128), (5, 16, 32), (17, 100, 160), (70, 192, 96), (130, 72, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_products(device, random, rows, outputs, columns, dtype):
    packed, weight = fp8_weight(outputs, columns, random)
    x, quantized = fp8_rows(rows, columns, random)
    quantized = Fp8Rows(quantized.codes.to(device), quantized.scales.to(device))
    out = torch.full((rows + 1, outputs + 3), torch.nan, dtype=dtype, device=device)
    got = portable.product(quantized, on(device, packed), out=out[:rows, 1 : outputs + 1])
    assert_product(got, x, weight)
    assert out[rows].isnan().all()
    assert out[:, [0, outputs + 1, outputs + 2]].isnan().all()


@pytest.mark.parametrize("shape", [Shape(1, 16, 4, 4, 2, 3), Shape(2, 32, 1, 8, 2), Shape(4, 16, 2, 8, 2, 2)])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_every_cut_gives_the_product(device, random, shape, kind):
    columns, outputs, rows = 416, 208, 19
    if kind == "fp8":
        packed, weight = fp8_weight(outputs, columns, random)
        x, quantized = fp8_rows(rows, columns, random)
        operand: Fp8Rows | Tensor = Fp8Rows(quantized.codes.to(device), quantized.scales.to(device))
    else:
        weight = torch.randn(outputs, columns, generator=random).bfloat16()
        packed, x = pack_bf16(weight), torch.randn(rows, columns, generator=random).bfloat16()
        operand = x.to(device)
    got = portable.product(operand, on(device, packed), dtype=torch.float32, shape=shape)
    assert_product(got, x, weight)


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(3, 32, 64), (20, 40, 100), (66, 16, 96)])
def test_bf16_products(device, random, rows, outputs, columns):
    weight = torch.randn(outputs, columns, generator=random).bfloat16()
    x = torch.randn(rows, columns + 8, generator=random).bfloat16()
    got = portable.product(x.to(device)[:, :columns], on(device, pack_bf16(weight)), dtype=torch.float32)
    assert_product(got, x[:, :columns], weight)


def test_fp8_weights_at_bf16(device, random):
    packed, weight = fp8_weight(48, 64, random)
    x = torch.randn(9, 64, generator=random).bfloat16()
    got = portable.product(portable.interleave(x.to(device)), on(device, packed))
    assert_product(got, x, weight)


def test_a_row_has_the_same_bits_alone_and_beside_others(device, random):
    packed, _ = fp8_weight(64, 256, random)
    _, quantized = fp8_rows(12, 256, random)
    codes, scales = quantized.codes.to(device), quantized.scales.to(device)
    packed = on(device, packed)
    every = portable.product(Fp8Rows(codes, scales), packed, dtype=torch.float32)
    alone = portable.product(Fp8Rows(codes[4:5], scales[4:5]), packed, dtype=torch.float32)
    assert torch.equal(every[4:5], alone)


def test_no_rows_and_operands_that_do_not_fit(device, random):
    packed, _ = fp8_weight(32, 64, random)
    packed = on(device, packed)
    _, none = fp8_rows(0, 64, random)
    none = Fp8Rows(none.codes.to(device), none.scales.to(device))
    assert portable.product(none, packed).shape == (0, 32)
    assert portable.quantize(torch.empty(0, 64, dtype=torch.bfloat16, device=device)).codes.shape == (0, 64)
    with pytest.raises(ValueError, match="bf16 rows of 96 for a fp8 weight of 64"):
        portable.product(torch.zeros(1, 96, dtype=torch.bfloat16, device=device), packed)
    with pytest.raises(ValueError, match="multiple of 32"):
        portable.quantize(torch.zeros(1, 40, dtype=torch.bfloat16, device=device))
    with pytest.raises(ValueError, match="output"):
        portable.product(none, packed, out=torch.empty(1, 32, device=device))
