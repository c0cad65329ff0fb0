"""The formats inside Triton kernels against `formats.py`, every code and every tie."""

from __future__ import annotations

import pytest
import torch

from flashstep import formats
from flashstep.stages import triton_ops as ops

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _elements(x, out, size, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < size, other=0)
    if WHICH == 0:
        r = ops.decode_e4m3(v)
    elif WHICH == 1:
        r = ops.encode_e4m3(v)
    elif WHICH == 2:
        r = ops.decode_ue8m0(v)
    elif WHICH == 3:
        r = ops.decode_e2m1(v)
    elif WHICH == 4:
        r = ops.encode_e2m1(v)
    else:
        r = ops.to_bf16(v)
    tl.store(out + at, r, mask=at < size)


@triton.jit
def _quantize(x, codes, scales, rounded, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    v = tl.load(x + at)
    code, scale = ops.quantize_fp8(v, ROWS, COLUMNS)
    tl.store(codes + at, code)
    groups: tl.constexpr = COLUMNS // 32
    tl.store(scales + tl.arange(0, ROWS)[:, None] * groups + tl.arange(0, groups)[None, :], scale)
    tl.store(rounded + at, ops.round_fp8(v, ROWS, COLUMNS).to(tl.bfloat16))


def apply(which: int, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = x.to(device)
    out = torch.full(x.shape, 77, device=device).to(dtype)
    _elements[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), which, 4096)
    return out.cpu()


def test_every_code_decodes(device):
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = apply(0, codes, torch.float32, device)
    wanted = codes.view(torch.float8_e4m3fn).float()
    finite = ~wanted.isnan()
    assert torch.equal(e4m3[finite], wanted[finite])
    assert torch.equal(apply(2, codes[:255], torch.float32, device), formats.ue8m0_decode(codes[:255]))
    signed = torch.tensor([*formats.FP4_VALUES, *(-v for v in formats.FP4_VALUES)])
    assert torch.equal(apply(3, codes[:16], torch.float32, device), signed)


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 300.0])
def test_rounding_to_codes(device, scale):
    random = torch.Generator().manual_seed(1)
    values = codes_and_ties()
    x = torch.cat([values, -values, torch.randn(3000, generator=random) * scale])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, -torch.tensor(torch.inf))])
    x = x.clamp(-448, 448)
    assert torch.equal(apply(1, x, torch.int32, device), x.to(torch.float8_e4m3fn).view(torch.uint8).int())
    assert torch.equal(apply(4, x, torch.int32, device), formats.fp4_quantize(x, torch.ones(1), x.numel()).int())
    assert torch.equal(apply(5, x, torch.bfloat16, device).view(torch.int16), x.bfloat16().view(torch.int16))


def codes_and_ties() -> torch.Tensor:
    """Every e4m3 value and e2m1 value, and what is halfway between neighbours (bf16's among them)."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e2m1 = torch.tensor(formats.FP4_VALUES)
    bf16 = torch.arange(0x3F00, 0x3F40, dtype=torch.int16).view(torch.bfloat16).float()
    return torch.cat([part for v in (e4m3, e2m1, bf16) for part in (v, (v[1:] + v[:-1]) / 2)])


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_quantization_of_rows(device, size):
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)) * size
    x[3, 32:64] = 0.0
    x[4] *= 448 / x[4].abs().max()  # a scale's exact border
    codes, scales, rounded = torch.full((16, 128), 0x7F), torch.full((16, 4), 255), torch.full((16, 128), torch.nan)
    codes, scales, rounded = codes.byte().to(device), scales.byte().to(device), rounded.bfloat16().to(device)
    _quantize[(1,)](x.to(device), codes, scales, rounded, 16, 128)
    wanted, wanted_scales = formats.fp8_quantize(x)
    assert torch.equal(codes.cpu(), wanted.view(torch.uint8))
    assert torch.equal(scales.cpu(), formats.ue8m0_encode(wanted_scales))
    assert torch.equal(rounded.cpu(), formats.fp8_round_trip(x).bfloat16())
