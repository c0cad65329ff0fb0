"""What the Triton kernels of all stages share: number formats bit for bit, and how Triton is set up.

Everything here is integer and float32 arithmetic that any GPU has: fp8 instructions differ between vendors (CDNA 3 has
another e4m3), bits do not. The counterpart of `formats.py` inside kernels; compared with it in `test_triton_ops.py`.

Import this module before `triton`, from every module with kernels: without a GPU it turns Triton's interpreter on,
which has to happen before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

if not torch.cuda.is_available():
    # As good as 1, by which somebody who wants the interpreter says so (`backends.py`).
    os.environ.setdefault("TRITON_INTERPRET", "true")
# a * b + c may become one instruction, in every version of Triton: where bits are promised, products are exact.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"))


# A code's bits, moved to where bf16 and float32 have exponent and mantissa, are the value without the difference of the
# exponents' biases: these factors restore it.
E4M3_IN_BF16 = tl.constexpr(2.0**120)
E2M1_IN_BF16 = tl.constexpr(2.0**126)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: correct, and slow by the number of programs."""
    return bool(_INTERPRETED.value)


@dataclass(frozen=True)
class Build:
    """A kernel as the released model compiles it. A portable module lists its own as `KERNELS`.

    arguments: types of what is passed at run time, in Triton's words ("*bf16", "i32"). Multiples of 16:
    pointers, and what has ":16" behind its type.
    constants: all other arguments. backends: where it is compiled so.
    """

    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    backends: tuple[str, ...] = ("cuda", "hip")


# -- bf16 -----------------------------------------------------------------------------------------------------------


@triton.jit
def to_bf16(x):
    """float32 as bf16, to nearest even (Triton's interpreter would cut the bits off)."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """float32 rounded to what bf16 holds."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def bf16_pairs(word):
    """The two bf16 in each 32-bit `word` [..]: [.., 2], the low half first. The interpreter, without a bf16 of its own,
    gets float32.
    """
    if _INTERPRETED:
        return tl.join((word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True))
    else:
        return tl.join(word.to(tl.int16), (word >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def dot(a, b, sums):
    """`sums` float32 + `a` x `b`, bf16 (in the interpreter float32)."""
    if _INTERPRETED:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    else:
        sums = tl.dot(a, b, sums)
    return sums


# -- UE8M0 ----------------------------------------------------------------------------------------------------------


@triton.jit
def decode_ue8m0(code):
    """2^(code - 127) in float32 of `code` 0..254 (any integer type); 2^-127, a subnormal, of 0."""
    code = code.to(tl.int32)
    return tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)


# -- fp8 ------------------------------------------------------------------------------------------------------------


@triton.jit
def decode_e4m3(code):
    """float32 of e4m3 `code` (any integer type; not NaN)."""
    code = code.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * E4M3_IN_BF16


@triton.jit
def encode_e4m3(x):
    """int32 codes of float32 `x` within +-448: to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14's last bit is e4m3's 2^-9
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def fp8_scale_code(amax):
    """int32 UE8M0 code of the scale of values up to `amax` (float32): the power of two not below amax / 448."""
    bits = (tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return (bits + 0x7FFFFF) >> 23


@triton.jit
def quantize_fp8(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes uint8 [ROWS, COLUMNS] and UE8M0 scales uint8 [ROWS, COLUMNS / 32] of float32 `x` [ROWS, COLUMNS]."""
    groups = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    scale = fp8_scale_code(tl.max(tl.abs(groups), 2))
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    codes = encode_e4m3(groups * inverse[:, :, None])
    return tl.reshape(codes, (ROWS, COLUMNS)).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def round_fp8(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 `x` [ROWS, COLUMNS] as fp8 with a scale per row and 32 columns holds it (bf16 holds the result too)."""
    groups = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    scale = fp8_scale_code(tl.max(tl.abs(groups), 2))[:, :, None]
    codes = encode_e4m3(groups * ((254 - scale) << 23).to(tl.float32, bitcast=True))
    return tl.reshape(decode_e4m3(codes) * decode_ue8m0(scale), (ROWS, COLUMNS))


# -- fp4 ------------------------------------------------------------------------------------------------------------


@triton.jit
def decode_e2m1(code):
    """float32 of e2m1 `code` 0..15 (any integer type)."""
    code = code.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * E2M1_IN_BF16


@triton.jit
def encode_e2m1(x):
    """int32 codes of float32 `x`: to nearest, ties to the even code, saturating."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
