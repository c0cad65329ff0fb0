"""Dense products in Triton, for any number of rows: fp8 and bf16 weights in the packed layout of `pack.py`.

A program computes 64 T outputs of up to N rows as W x^T, so that packed weights become the left operand as they lie: a
lane's 16 bytes are the registers that a matrix instruction wants from it, and what it loads is decoded in place. e4m3
times its scale (up to 2^7) is exact in bf16: decoded operands need no scaling of partial sums. A row's bits do not
depend on the other rows, but on how many there are where `choose_shape` cuts K differently.

A lane's four bytes of a fp8 unit are four columns beside each other, where the instruction pairs columns eight apart.
Activations are therefore brought into operand order once, in front of the product: inside 16 columns, place 8 b + 2 q +
a holds column 4 q + 2 a + b. Which order the columns of a sum have does not matter as long as both sides agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK
from flashstep.stages import triton_ops as ops
from flashstep.stages.dense.pack import TILE, Kind, PackedWeight

import triton  # isort: skip
import triton.language as tl  # isort: skip


# -- activations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Rows:
    """Activations in fp8: `codes` e4m3 as uint8 [rows, K], `scales` UE8M0 uint8 [rows, K / 32]; K a multiple of 32."""

    codes: Tensor
    scales: Tensor

    @cached_property
    def operand(self) -> Tensor:
        """The values, exactly, bf16 [rows, K] in operand order; made once for all products that share them."""
        rows, columns = self.codes.shape
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.codes.device)
        if rows:
            _decode[_grid(out)](self.codes, self.scales, out, out.numel(), BLOCK=_block(out), num_warps=4)
        return out


def interleave(x: Tensor) -> Tensor:
    """bf16 `x` [rows, K], K a multiple of 16, in operand order: the input of fp8 weights that are used at bf16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _interleave[_grid(out)](x, out, out.numel(), x.stride(0), x.shape[1], BLOCK=_block(out), num_warps=4)
    return out


def quantize(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Fp8Rows:
    """bf16 `x` [rows, K], rows any stride apart, as fp8: the bits of `formats.fp8_quantize`.

    `norm` [K], bf16 or float32: of the RMS norm of `x` with `eps`, rounded to bf16 in front.
    ValueError where K is no multiple of 32.
    """
    rows, columns = x.shape
    if columns % FP8_BLOCK:
        raise ValueError(f"{columns} columns: fp8 needs a multiple of {FP8_BLOCK}")
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, columns // FP8_BLOCK, dtype=torch.uint8, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        many = max(1, min(triton.next_power_of_2(rows), 2**20 // block)) if ops.interpreted() else 1
        _quantize[(triton.cdiv(rows, many),)](
            x, norm, codes, scales, rows, x.stride(0), eps, columns, many, block, norm is not None, num_warps=4
        )
    return Fp8Rows(codes, scales)


@triton.jit
def _quantize(
    x, norm, codes, scales, rows, stride, eps,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < COLUMNS)
    v = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse_rms = 1.0 / tl.sqrt(tl.sum(v * v, 1) / COLUMNS + eps)
        weight = tl.load(norm + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        v = ops.round_bf16(weight * v * inverse_rms[:, None])
    code, scale = ops.quantize_fp8(v, ROWS, BLOCK)
    tl.store(codes + row * COLUMNS + column, code, mask=inside)
    group = tl.arange(0, BLOCK // 32)[None, :]
    groups: tl.constexpr = COLUMNS // 32
    tl.store(scales + row * groups + group, scale, mask=(row < rows) & (group < groups))


@triton.jit
def to_operand_order(x, COUNT: tl.constexpr):
    """`x` [COUNT], whole groups of 16 columns, in operand order."""
    return tl.reshape(tl.permute(tl.reshape(x, (COUNT // 16, 4, 2, 2)), (0, 3, 1, 2)), (COUNT,))


@triton.jit
def _decode(codes, scales, out, size, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    group = first // 32 + tl.arange(0, BLOCK // 32)
    v = ops.decode_e4m3(tl.load(codes + at, mask=at < size, other=0))
    scale = ops.decode_ue8m0(tl.load(scales + group, mask=group < size // 32, other=127))
    v = tl.reshape(tl.reshape(v, (BLOCK // 32, 32)) * scale[:, None], (BLOCK,))
    tl.store(out + at, to_operand_order(v, BLOCK).to(tl.bfloat16), mask=at < size)


@triton.jit
def _interleave(x, out, size, stride, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at // columns * stride + at % columns, mask=at < size, other=0.0)
    tl.store(out + at, to_operand_order(v, BLOCK), mask=at < size)


def _block(x: Tensor) -> int:
    return 2**18 if ops.interpreted() else 2048


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), _block(x)),)


# -- weights as left operands ---------------------------------------------------------------------------------------
#
# A load brings words [S T, 512]: S steps of K of T tiles of 64 rows, a warp's 16 rows in 128 words; lane 4 r + q of a
# warp has four of them. The functions turn them into bf16 [64 T, columns] without moving anything between lanes.


@triton.jit
def fp8_operand(words, scale, T: tl.constexpr, S: tl.constexpr):
    """bf16 [64 T, 32 S] of fp8 units, columns in operand order. `scale` float32 [S, T, 4, 8, 4, 1 or 2]: 2^120 times
    that of the row; e4m3 bits where bf16 has its own are 2^-120 of the value.
    """
    words = tl.reshape(words, (S, T, 4, 8, 4, 2, 2))
    even = ((words << 8) & -2147450880) | ((words << 4) & 0x07F007F0)  # 0x80008000: signs
    odd = (words & -2147450880) | ((words >> 4) & 0x07F007F0)
    v = tl.join(ops.bf16_pairs(even), ops.bf16_pairs(odd))  # step, tile, warp, r, q, part, half, a, b
    v = v * tl.reshape(scale, (S, T, 4, 8, 4, 1, scale.shape[5], 1, 1)).to(v.dtype)
    return tl.reshape(tl.permute(v, (1, 2, 6, 3, 0, 5, 8, 4, 7)), (64 * T, 32 * S))


@triton.jit
def bf16_operand(words, T: tl.constexpr, S: tl.constexpr):
    """bf16 [64 T, 16 S] of bf16 units, columns in their own order."""
    words = tl.reshape(words, (S, T, 4, 8, 4, 2, 2))
    v = ops.bf16_pairs(words)  # step, tile, warp, r, q, part, half, pair
    return tl.reshape(tl.permute(v, (1, 2, 6, 3, 0, 5, 4, 7)), (64 * T, 16 * S))


# -- product --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How a product is cut: a program has 64 `tiles` outputs of `rows` rows, and takes `groups` of 32 columns a step.

    split: programs that share K; their parts are added in order by a kernel of its own.
    """

    tiles: int
    rows: int
    groups: int
    warps: int
    stages: int
    split: int = 1


def choose_shape(rows: int, outputs: int, columns: int, *, hip: bool = torch.version.hip is not None) -> Shape:
    """The shape of a product, by rules that stay as they were measured on an H200: equal calls give equal bits.

    `hip`: for AMD, where nothing was measured: no shape takes more than 64 KB of shared memory.
    """
    if rows <= 64:
        width = 16 if rows <= 16 else 64
        if outputs >= 16384:
            return Shape(2, width, 2, 8 if rows <= 16 else 4, 4 if rows <= 16 else 3)
        return Shape(1, width, 4 if rows <= 16 else 2, 4, 4, _split(triton.cdiv(outputs, 64), columns))
    if not hip and triton.cdiv(outputs, 128) * triton.cdiv(rows, 256) >= 96:
        return Shape(2, 256, 2, 8, 3)
    if triton.cdiv(outputs, 128) * triton.cdiv(rows, 128) >= 128:
        return Shape(2, 128, 2, 4, 3)
    return Shape(1, 128, 2, 4, 4, _split(triton.cdiv(outputs, 64) * triton.cdiv(rows, 128), columns))


def _split(programs: int, columns: int) -> int:
    """Programs that share K, a power of two: about 264 in all, with at least 320 columns each."""
    wanted = min(264 / programs, columns / 320)
    return 1 << max(0, round(math.log2(wanted)))


def product(
    x: Fp8Rows | Tensor,
    weight: PackedWeight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """`x` [rows, K] times `weight` [outputs, K]: [rows, outputs] in `dtype`, bf16 (rounded once) or float32.

    fp8 weights take `Fp8Rows`, or bf16 in operand order (`interleave`), at which they are then used; bf16 weights take
    bf16 rows, any stride apart. `out`: where to write instead of a new tensor; its columns lie beside each other.
    ValueError where operands do not fit each other.
    """
    values = x.operand if isinstance(x, Fp8Rows) else x
    rows, columns = values.shape
    if columns != weight.columns or (weight.kind == "bf16" and isinstance(x, Fp8Rows)):
        name = "fp8" if isinstance(x, Fp8Rows) else "bf16"
        raise ValueError(f"{name} rows of {columns} for a {weight.kind} weight of {weight.columns} columns")
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=dtype, device=values.device)
    if tuple(out.shape) != (rows, weight.outputs) or out.stride(1) != 1 or out.dtype not in _OUTPUTS:
        raise ValueError(f"output {tuple(out.shape)} of {out.dtype}: expected {(rows, weight.outputs)} bf16 or float32")
    if not rows:
        return out
    shape = shape or choose_shape(rows, weight.outputs, columns)
    blocks = triton.cdiv(weight.outputs, 64 * shape.tiles), triton.cdiv(rows, shape.rows), shape.split
    parts = out
    if shape.split > 1:
        parts = torch.empty(shape.split, rows, weight.outputs, dtype=torch.float32, device=values.device)
    _product[blocks](
        weight.data,
        values,
        parts,
        rows,
        values.stride(0),
        parts.stride(-2),
        **constants(weight, shape),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if shape.split > 1:
        _add[(triton.cdiv(weight.outputs, _ADD), rows)](
            parts, out, rows, weight.outputs, out.stride(0), SPLIT=shape.split, BLOCK=_ADD, num_warps=4
        )
    return out


_OUTPUTS = (torch.bfloat16, torch.float32)
_ADD = 512  # outputs of a program that adds parts


def constants(weight: PackedWeight, shape: Shape) -> dict[str, int]:
    """What `_product` is compiled with."""
    return {
        "OUTPUTS": weight.outputs,
        "COLUMNS": weight.columns,
        "TILE_BYTES": weight.data.shape[1],
        "FP8": weight.kind == "fp8",
        "T": shape.tiles,
        "G": shape.groups,
        "N": shape.rows,
        "SPLIT": shape.split,
        "STAGES": shape.stages,
    }


@triton.jit
def _product(
    weight, x, out, rows, x_stride, out_stride,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TILE_BYTES: tl.constexpr, FP8: tl.constexpr,
    T: tl.constexpr, G: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = G if FP8 else 2 * G  # of a step
    ALL_UNITS: tl.constexpr = TILE_BYTES // 516 if FP8 else TILE_BYTES // 512
    TILES: tl.constexpr = (OUTPUTS + 15) // 16
    STEPS: tl.constexpr = (COLUMNS + 32 * G - 1) // (32 * G)
    PER_PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = COLUMNS % (32 * G) == 0
    block, part = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * N + tl.arange(0, N)

    # Tiles behind the last one are the last one once more; they are not stored.
    place = tl.arange(0, 512)
    step_tile = tl.arange(0, UNITS * T)
    unit = (step_tile // T)[:, None]
    tile = tl.minimum(block * (4 * T) + (step_tile % T)[:, None] * 4 + (place // 128)[None, :], TILES - 1)
    at = weight.to(tl.pointer_type(tl.int32))
    at += tile.to(tl.int64) * (TILE_BYTES // 4) + (unit * 128 + (place % 128)[None, :])
    if FP8:
        warp = tl.arange(0, 128) // 32
        tile = tl.minimum(block * (4 * T) + (step_tile % T)[:, None] * 4 + warp[None, :], TILES - 1)
        scale_at = weight.to(tl.pointer_type(tl.float32)) + (tile.to(tl.int64) * (TILE_BYTES // 4) + ALL_UNITS * 128)
    column = tl.arange(0, 32 * G)
    x += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + column[None, :]

    begin = part * PER_PART
    end = tl.minimum(begin + PER_PART, STEPS)
    sums = tl.zeros((64 * T, N), tl.float32)
    if FP8:  # a step ahead: too small to be copied by the pipeline
        scale = tl.load(scale_at + tl.minimum(begin * G + unit, ALL_UNITS - 1))
    for step in tl.range(begin, end, num_stages=STAGES):
        if WHOLE:
            words = tl.load(at + step * (UNITS * 128))
            values = tl.load(x + step * (32 * G))
        else:
            words = tl.load(at + step * (UNITS * 128), mask=step * UNITS + unit < ALL_UNITS, other=0)
            values = tl.load(x + step * (32 * G), mask=(step * (32 * G) + column < COLUMNS)[None, :], other=0.0)
        if FP8:
            factor = tl.reshape(scale * ops.E4M3_IN_BF16, (G, T, 4, 8, 4, 1))
            operand = fp8_operand(words, factor, T, G)
            scale = tl.load(scale_at + tl.minimum((step + 1) * G + unit, ALL_UNITS - 1))
        else:
            operand = bf16_operand(words, T, UNITS)
        sums = ops.dot(operand, values.T, sums)
    output = block * (64 * T) + tl.arange(0, 64 * T)
    inside = (output < OUTPUTS)[:, None] & (row < rows)[None, :]
    out += (part * rows + row).to(tl.int64)[None, :] * out_stride + output[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out, ops.to_bf16(sums), mask=inside)
    else:
        tl.store(out, sums, mask=inside)


@triton.jit
def _add(parts, out, rows, outputs, out_stride, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    output, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * rows + row).to(tl.int64) * outputs + output, mask=output < outputs, other=0.0)
    out += row.to(tl.int64) * out_stride + output
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out, ops.to_bf16(total), mask=output < outputs)
    else:
        tl.store(out, total, mask=output < outputs)


# -- what the released model compiles -------------------------------------------------------------------------------


# Outputs, columns and kind of weights, and numbers of rows that between them take every kind of shape.
_PRODUCTS: list[tuple[int, int, Kind, tuple[int, ...]]] = [
    (1792, 5120, "fp8", (6, 512, 4096)),
    (384, 5120, "bf16", (6,)),
    (32320, 5120, "bf16", (128,)),
]


def _released(outputs: int, columns: int, kind: Kind, rows: int, backend: str) -> ops.Build:
    shape = choose_shape(rows, outputs, columns, hip=backend == "hip")
    size = triton.cdiv(columns, 128) * 4 * 516 if kind == "fp8" else triton.cdiv(columns, 32) * 1024
    weight = PackedWeight(torch.empty(outputs // TILE, size, dtype=torch.uint8, device="meta"), outputs, columns, kind)
    out = "*fp32" if shape.split > 1 or kind == "bf16" else "*bf16"
    arguments = {"weight": "*u8", "x": "*bf16", "out": out, "rows": "i32", "x_stride": "i32:16", "out_stride": "i32:16"}
    return ops.Build(_product, arguments, constants(weight, shape), shape.warps, shape.stages, (backend,))


KERNELS = [
    *(
        _released(outputs, columns, kind, rows, backend)
        for backend in ("cuda", "hip")
        for outputs, columns, kind, sizes in _PRODUCTS
        for rows in sizes
    ),
    ops.Build(
        _quantize,
        {
            "x": "*bf16",
            "norm": "*bf16",
            "codes": "*u8",
            "scales": "*u8",
            "rows": "i32",
            "stride": "i32:16",
            "eps": "fp32",
        },
        {"COLUMNS": 1280, "ROWS": 1, "BLOCK": 2048, "NORM": True},
    ),
    ops.Build(_decode, {"codes": "*u8", "scales": "*u8", "out": "*bf16", "size": "i32:16"}, {"BLOCK": 2048}),
]
