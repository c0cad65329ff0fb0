"""Number formats against definitions written independently of the code, over all codes where there are few."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flashstep import formats as f

UNITS = Path(__file__).parents[2] / "shared" / "golden" / "units"
needs_golden = pytest.mark.skipif(not UNITS.exists(), reason="the golden units are not beside the repository")
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def e4m3_value(code):
    """e4m3 by its definition: sign, 4 exponent bits of bias 7, 3 mantissa bits; all ones is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def smallest_power_at_least(value):
    power = 2.0**-140
    while power < value:
        power *= 2
    return power


# -- UE8M0 ------------------------------------------------------------------------------------------------------------


def test_ue8m0_all_codes():
    decoded = f.ue8m0_decode(ALL_BYTES)
    for code in range(255):
        assert float(decoded[code]) == 2.0 ** (code - 127), code
    assert math.isnan(float(decoded[255]))
    assert torch.equal(f.ue8m0_encode(decoded[:255]), ALL_BYTES[:255])
    assert torch.equal(f.ue8m0_decode(ALL_BYTES.view(torch.float8_e8m0fnu))[:255], decoded[:255])


@pytest.mark.parametrize("value", [3.0, 0.0, -1.0, float("inf"), float("nan"), 2.0**-128, 1.0000001])
def test_ue8m0_refuses_other_values(value):
    with pytest.raises(ValueError, match="powers of two"):
        f.ue8m0_encode(torch.tensor([1.0, value]))


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_ceil_power_of_two(value):
    assert float(f.ceil_power_of_two(torch.tensor([value]))) == smallest_power_at_least(value)


# -- fp8 --------------------------------------------------------------------------------------------------------------


def test_fp8_all_codes():
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    weight = ALL_BYTES.view(torch.float8_e4m3fn).view(8, 32)
    decoded = f.decode_fp8_weight(weight, torch.full((1, 1), 127, dtype=torch.uint8)).flatten()
    assert torch.equal(decoded.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_fp8_codes_survive_a_round_trip():
    """Every finite code comes back under the scale it came with, as long as its block holds the largest code."""
    finite = [code for code in range(256) if code not in (0x7F, 0xFF, 0x7E)]
    for code in finite:
        for scale_code in (114, 127, 140):
            row = torch.full((1, 32), code, dtype=torch.uint8)
            row[0, 7] = 0x7E  # 448 pins the scale
            scale = torch.tensor([[scale_code]], dtype=torch.uint8)
            value = f.decode_fp8_weight(row.view(torch.float8_e4m3fn), scale)
            codes, scales = f.fp8_quantize(value)
            assert torch.equal(codes.view(torch.uint8), row), code
            assert torch.equal(f.ue8m0_encode(scales), scale)
            encoded, scales = f.encode_fp8_weight(value)
            assert torch.equal(encoded.view(torch.uint8), row), code
            assert torch.equal(scales, scale)


AMAX = [448 * 2.0**n for n in (-20, -3, 0, 5)]


@pytest.mark.parametrize("edge", AMAX)
def test_fp8_scale_at_a_power_of_two(edge):
    """amax / 448 rounds in float32, so what counts is the product that the definition names, not the quotient."""
    ulp = np.spacing(np.float32(edge))
    for amax in (np.float32(edge - ulp), np.float32(edge), np.float32(edge + ulp)):
        row = torch.zeros(1, 32)
        row[0, 3] = -float(amax)
        product = np.maximum(amax, np.float32(1e-4)) * np.float32(np.float32(1) / np.float32(448))
        assert product.dtype == np.float32
        expected = smallest_power_at_least(float(product))
        assert float(f.fp8_quantize(row)[1]) == expected, amax
    assert float(f.fp8_quantize(torch.full((1, 32), float(np.float32(edge) * np.float32(1.01))))[1]) == 2 * float(
        f.fp8_quantize(torch.full((1, 32), float(np.float32(edge) * np.float32(0.99))))[1]
    )


@pytest.mark.parametrize("amax", [0.0, 1e-45, 2.0**-130, 9.9e-5, 1e-4])
def test_fp8_scale_floor(amax):
    row = torch.full((1, 32), amax)
    assert float(f.fp8_quantize(row)[1]) == 2.0**-22  # the power above 1e-4 / 448 = 2.2e-7
    codes, _ = f.fp8_quantize(row)
    expected = torch.tensor(amax / 2.0**-22).to(torch.float8_e4m3fn).float()
    assert torch.equal(codes.float(), expected.expand(1, 32))


def test_fp8_scale_of_large_values():
    for amax, scale in ((65504.0, 256.0), (3.3e38, 2.0**120)):
        codes, found = f.fp8_quantize(torch.full((1, 32), amax))
        assert float(found) == scale
        assert bool(codes.float().isfinite().all())


@settings(max_examples=50)
@given(
    st.integers(0, 2**31),
    st.floats(-30, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_fp8_round_trip_is_nearest_and_stable(seed, exponent, dtype):
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(dtype)
    codes, scale = f.fp8_quantize(x)
    assert torch.equal(scale, f.ue8m0_decode(f.ue8m0_encode(scale)))
    y = f.fp8_round_trip(x)
    assert y.dtype == dtype
    spread = scale.repeat_interleave(32, -1)
    # Nearest: 3 mantissa bits, half a step is 1/16 of the value, or half the smallest subnormal.
    bound = torch.maximum(x.float().abs() / 16, spread * 2.0**-10)
    assert bool(((y.float() - x.float()).abs() <= bound).all())
    if exponent > -8:  # above the floor of the scale
        assert bool((codes.float().abs().unflatten(-1, (-1, 32)).amax(-1) > 223).all())
    assert torch.equal(f.fp8_round_trip(y), y)


def test_fp8_weight_blocks_do_not_mix():
    weight = torch.zeros(40, 96)
    weight[35, 70] = 3.0
    codes, scale = f.encode_fp8_weight(weight)
    assert scale.shape == (2, 3)
    assert (f.decode_fp8_weight(codes, scale) != 0).nonzero().tolist() == [[35, 70]]
    assert int((scale != scale[0, 0]).sum()) == 1
    changed = scale.clone()
    changed[1, 2] += 1
    assert float(f.decode_fp8_weight(codes, changed)[35, 70]) == 6.0


# -- fp4 --------------------------------------------------------------------------------------------------------------


def test_fp4_low_nibble_is_the_even_column():
    packed = torch.tensor([[0xA0] + [0] * 15], dtype=torch.uint8)
    values = f.decode_fp4_weight(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert values[0, :2].tolist() == [0.0, -1.0]
    assert not bool(torch.signbit(values[0, 0]))
    negative_zero = f.decode_fp4_weight(packed.fill_(0x08), torch.tensor([[127]], dtype=torch.uint8))[0]
    assert bool(torch.signbit(negative_zero[0]))
    assert not bool(torch.signbit(negative_zero[1]))


def test_fp4_all_bytes():
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = f.decode_fp4_weight(ALL_BYTES.view(16, 16), torch.full((16, 1), 128, dtype=torch.uint8)).flatten()
    for byte in range(256):
        for nibble, value in ((byte & 15, values[2 * byte]), (byte >> 4, values[2 * byte + 1])):
            expected = math.copysign(2.0 * table[nibble & 7], -1.0 if nibble & 8 else 1.0)
            assert math.copysign(1, value) == math.copysign(1, expected)
            assert float(value) == expected
    codes = f.fp4_unpack(ALL_BYTES)
    assert torch.equal(f.fp4_pack(codes).view(torch.uint8), ALL_BYTES)
    assert torch.equal(f.fp4_unpack(f.fp4_pack(codes)), codes)


def test_fp4_weight_round_trip_of_every_byte():
    packed = ALL_BYTES.view(16, 16).clone()
    packed[:, 0] = 0x77  # 6 pins the scale of each row
    scale = torch.arange(119, 135, dtype=torch.uint8).view(16, 1)
    encoded, found = f.encode_fp4_weight(f.decode_fp4_weight(packed, scale))
    assert torch.equal(encoded.view(torch.uint8), packed)
    assert torch.equal(found, scale)


@pytest.mark.parametrize("column", [0, 1, 31, 32, 63])
def test_fp4_weight_lights_one_column(column):
    weight = torch.zeros(5, 64)
    weight[3, column] = -2.0
    decoded = f.decode_fp4_weight(*f.encode_fp4_weight(weight))
    assert (decoded != 0).nonzero().tolist() == [[3, column]]
    assert float(decoded[3, column]) == -2.0


def test_fp4_ties_go_to_the_even_code():
    table = list(f.FP4_VALUES)
    cases = []
    for low in range(7):
        middle = np.float32((table[low] + table[low + 1]) / 2)
        even = low if low % 2 == 0 else low + 1
        cases += [(float(middle), even)]
        cases += [(float(np.nextafter(middle, np.float32(0))), low)]
        cases += [(float(np.nextafter(middle, np.float32(9))), low + 1)]
    cases += [(value, code) for code, value in enumerate(table)] + [(7.0, 7), (100.0, 7)]
    x = torch.tensor([[value for value, _ in cases] + [0.0] * (-len(cases) % 32)])
    scale = torch.ones(1, x.shape[1] // 32)
    expected = torch.tensor([code for _, code in cases], dtype=torch.uint8)
    assert torch.equal(f.fp4_quantize(x, scale, 32)[0, : len(cases)], expected)
    assert torch.equal(f.fp4_quantize(-x, scale, 32)[0, : len(cases)], expected + 8)


def test_e4m3_scales_over_all_bytes():
    """A group whose amax is 6 times a positive e4m3 value takes exactly that value as its scale."""
    values = torch.tensor([e4m3_value(code) for code in range(1, 0x7F)])
    x = torch.zeros(len(values), 16)
    x[:, 5] = -6 * values
    scale, group = f.fp4_e4m3_scale(x)
    assert group == 16
    assert torch.equal(scale.flatten(), values)
    assert torch.equal(f.fp4_round_trip(x, scale, group), x)


@pytest.mark.parametrize(("amax", "scale"), [(0.0, 2.0**-9), (1e-9, 2.0**-9), (6 * 2.0**-9, 2.0**-9), (1e6, 448.0)])
def test_e4m3_scale_floor_and_ceiling(amax, scale):
    assert float(f.fp4_e4m3_scale(torch.full((1, 16), amax))[0]) == scale


@pytest.mark.parametrize("amax", [0.0, 1e-45, 6 * 2.0**-126])
def test_ue8m0_fp4_scale_floor(amax):
    scale, group = f.fp4_ue8m0_scale(torch.full((1, 32), amax))
    assert group == 32
    assert 2.0**-126 <= float(scale) <= 2.0**-125


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-20, 20))
def test_fp4_round_trips_are_nearest(seed, exponent):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    for scale, group in (f.fp4_ue8m0_scale(x), f.fp4_e4m3_scale(x)):
        y = f.fp4_round_trip(x, scale, group)
        grid = (
            torch.tensor([*f.FP4_VALUES, *(-v for v in f.FP4_VALUES)]) * scale.repeat_interleave(group, -1)[..., None]
        )
        assert torch.equal((x - y).abs(), (x[..., None] - grid).abs().amin(-1))
    scale, _ = f.fp4_ue8m0_scale(x)
    assert bool((x.abs().unflatten(-1, (-1, 32)).amax(-1) <= 6 * scale).all())


# -- switches ---------------------------------------------------------------------------------------------------------


def test_numerics():
    x = torch.randn(2, 64)
    off, on = f.Numerics(torch.float32, quantize=False), f.Numerics(torch.float32)
    for quantizer in ("fp8", "kv_fp4", "index_fp4"):
        assert getattr(off, quantizer)(x) is x
        assert not torch.equal(getattr(on, quantizer)(x), x)
    assert not torch.equal(on.kv_fp4(x), on.index_fp4(x))
    with pytest.raises(ValueError, match=r"torch\.float16: expected"):
        f.Numerics(torch.float16)


def test_engram_rows():
    codes = torch.tensor([[0x38] * 32 + [0xB8] * 32], dtype=torch.uint8).view(torch.float8_e4m3fn)
    row = f.decode_fp8_rows(codes, torch.tensor([[128, 126]], dtype=torch.uint8))
    assert row.dtype == torch.bfloat16
    assert row.tolist() == [[2.0] * 32 + [-0.5] * 32]


# -- golden values ----------------------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("suffix", ["", "_f32"])
def test_golden_activations(suffix):
    unit = load_file(UNITS / "act_quant.safetensors")
    x = unit[f"x{suffix}"]
    codes, scale = f.fp8_quantize(x)
    assert same_bits(codes, unit[f"q{suffix}"])
    assert torch.equal(f.ue8m0_encode(scale), unit[f"s{suffix}"].view(torch.uint8))
    assert same_bits(f.fp8_round_trip(x), unit[f"deq{suffix}"])


@needs_golden
@pytest.mark.parametrize(("block", "scaling"), [("b32", f.fp4_ue8m0_scale), ("b16", f.fp4_e4m3_scale)])
def test_golden_fp4(block, scaling):
    unit = load_file(UNITS / "fp4_act_quant.safetensors")
    scale, group = scaling(unit["x"])
    assert torch.equal(scale, unit[f"{block}.scale"])
    # Reference codes may hold +0 where a negative value rounds to zero; both are zero.
    codes, expected = f.fp4_quantize(unit["x"], scale, group), unit[f"{block}.codes"]
    assert torch.equal(codes & 7, expected & 7)
    assert torch.equal((codes & 8)[codes & 7 != 0], (expected & 8)[codes & 7 != 0])
    assert torch.equal(f.fp4_round_trip(unit["x"], scale, group), unit[f"{block}.deq"])


@needs_golden
def test_golden_weights():
    unit = load_file(UNITS / "linear.safetensors")
    for kind, decode in (("fp8", f.decode_fp8_weight), ("fp4", f.decode_fp4_weight)):
        decoded = decode(unit[f"{kind}.weight"], unit[f"{kind}.scale"])
        assert same_bits(decoded, unit[f"{kind}.dequant"])
        product = f.fp8_round_trip(unit["x"].float()) @ decoded.T
        expected = unit[f"{kind}.y_f32"]
        assert float((product - expected).abs().max()) < 1e-5 * float(expected.square().mean().sqrt()) * 4
