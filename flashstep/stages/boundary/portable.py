"""Hyper-connections in Triton, for any number of rows: what lies between two sublayers, in few passes over the stream.

`mixes` makes the coefficients of a sublayer from the stream in front of it. `boundary` takes a sublayer's output back
into every copy and collapses the result into the next sublayer's input, which it norms and quantizes; each half can be
had alone, where the Engram stands between them. `embed` starts the stream.

Values round as in `reference.py` after float32 arithmetic. A row's results depend on nothing else of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK, ModelConfig
from flashstep.stages.triton_ops import Build, dot, interpreted, quantize_fp8, round_bf16, to_bf16

import triton  # isort: skip
import triton.language as tl  # isort: skip

_MIX_PROGRAMS = 264  # that run at once: two a multiprocessor
_CHUNK = 1024  # columns of the stream that a program holds at once


@dataclass(frozen=True)
class Input:
    """What a sublayer reads: the collapsed rows behind their norm, as they are and quantized."""

    values: Tensor  # [rows, hidden] bf16
    codes: Tensor  # [rows, hidden] uint8: e4m3
    scales: Tensor  # [rows, hidden / 32] uint8: UE8M0
    collapsed: Tensor  # [rows, hidden] bf16: before the norm


# -- mixes ------------------------------------------------------------------------------------------------------------


@triton.jit
def _fn_part(fn, outputs, columns, COUNT: tl.constexpr):
    """Values of `pack_fn`'s layout at `outputs` and `columns`, which broadcast; 0 from output COUNT on."""
    chunk, column = columns // 64, columns % 64
    half, quarter, step, low = column // 32, column % 32 // 8, column % 8 // 4, column % 4
    place = chunk * 1536 + (half * 2 + step) * 384 + (outputs // 8) * 128 + (outputs % 8) * 16 + quarter * 4 + low
    return tl.load(fn + place, mask=outputs < COUNT, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _mix_sums(
    stream,  # [rows, COLUMNS] bf16
    fn,
    sums,  # [slices, rows, 32] f32: products with fn, the sum of squares behind them
    rows,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A slice of the columns, whose part of fn stays where the products read it, and every n-th tile of rows."""
    slice = tl.program_id(0)
    column = slice * SLICE + tl.arange(0, SLICE)
    output = tl.arange(0, 32)
    weight = _fn_part(fn, output[None, :], column[:, None], COUNT)
    # A float32 is the sum of three bf16, of which each holds the next 8 bits: the products are exact.
    first = weight.to(tl.bfloat16)
    left = weight - first.to(tl.float32)
    second = left.to(tl.bfloat16)
    third = (left - second.to(tl.float32)).to(tl.bfloat16)
    for tile in tl.range(tl.program_id(1), (rows + ROWS - 1) // ROWS, tl.num_programs(1), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None]
        x = tl.load(stream + row[:, None].to(tl.int64) * COLUMNS + column[None, :], mask=inside, other=0.0)
        total = dot(x, third, tl.zeros((ROWS, 32), tl.float32))
        total = dot(x, second, total)
        total = dot(x, first, total)
        wide = x.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        total += tl.where(output[None, :] == COUNT, squares[:, None], 0.0)
        place = (slice.to(tl.int64) * rows + row[:, None]) * 32 + output[None, :]
        tl.store(sums + place, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _coefficients(
    sums,  # [SLICES, rows, 32] f32
    base,  # [COUNT] f32
    scale,  # [3] f32: pre, post, comb
    out,  # [rows, COUNT] f32: pre, post, comb
    rows,
    columns,
    rms_eps,
    eps,
    HC: tl.constexpr,
    COUNT: tl.constexpr,
    SLICES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    copy = tl.arange(0, HC)
    pair = tl.arange(0, HC * HC)
    squares = tl.zeros((ROWS,), tl.float32)
    pre = tl.zeros((ROWS, HC), tl.float32)
    post = tl.zeros((ROWS, HC), tl.float32)
    flat = tl.zeros((ROWS, HC * HC), tl.float32)
    for begin in range(0, SLICES, 16):
        slice = begin + tl.arange(0, 16)
        some = (slice < SLICES)[:, None] & inside[None, :]
        at = sums + (slice[:, None].to(tl.int64) * rows + row[None, :]) * 32
        squares += tl.sum(tl.load(at + COUNT, mask=some, other=0.0), 0)
        pre += tl.sum(tl.load(at[:, :, None] + copy[None, None, :], mask=some[:, :, None], other=0.0), 0)
        post += tl.sum(tl.load(at[:, :, None] + HC + copy[None, None, :], mask=some[:, :, None], other=0.0), 0)
        flat += tl.sum(tl.load(at[:, :, None] + 2 * HC + pair[None, None, :], mask=some[:, :, None], other=0.0), 0)
    inverse = (1 / tl.sqrt_rn(squares / columns + rms_eps))[:, None]
    pre = pre * inverse * tl.load(scale) + tl.load(base + copy)[None, :]
    post = post * inverse * tl.load(scale + 1) + tl.load(base + HC + copy)[None, :]
    flat = flat * inverse * tl.load(scale + 2) + tl.load(base + 2 * HC + pair)[None, :]
    pre = _sigmoid(pre) + eps
    post = 2 * _sigmoid(post)
    comb = tl.reshape(flat, (ROWS, HC, HC))
    comb = tl.exp(comb - tl.max(comb, 2)[:, :, None])
    comb = comb / tl.sum(comb, 2)[:, :, None] + eps
    comb = comb / (tl.sum(comb, 1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, 2)[:, :, None] + eps)
        comb = comb / (tl.sum(comb, 1)[:, None, :] + eps)
    at = out + row[:, None].to(tl.int64) * COUNT
    tl.store(at + copy[None, :], pre, mask=inside[:, None])
    tl.store(at + HC + copy[None, :], post, mask=inside[:, None])
    tl.store(at + 2 * HC + pair[None, :], tl.reshape(comb, (ROWS, HC * HC)), mask=inside[:, None])


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x); no exponential overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


def mixes(stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig) -> Tensor:
    """Coefficients [rows, (2 + hc) * hc] float32 of a sublayer: pre, post, and comb (from copy i to copy j) row by row.

    stream: [rows, hc, hidden] bf16, in front of the sublayer. fn: of `boundary.cuda.pack_fn`. base [(2 + hc) * hc] and
    scale [3] float32.
    """
    rows, hc, hidden = stream.shape
    count, columns = (2 + hc) * hc, hc * hidden
    out = torch.empty(rows, count, device=stream.device)
    if not rows:
        return out
    cut = _MixCut.of(columns, hip=torch.version.hip is not None)
    slices = columns // cut.columns
    sums = torch.empty(slices, rows, 32, device=stream.device)
    _mix_sums[(slices, min(triton.cdiv(rows, cut.rows), max(1, _MIX_PROGRAMS // slices)))](
        stream, fn, sums, rows, columns, count, cut.rows, cut.columns, cut.stages, num_warps=4
    )
    block = 16 if not interpreted() else 256
    _coefficients[(triton.cdiv(rows, block),)](
        sums,
        base,
        scale,
        out,
        rows,
        columns,
        config.rms_norm_eps,
        config.hc_eps,
        hc,
        count,
        slices,
        config.hc_sinkhorn_iters,
        block,
        num_warps=4,
    )
    return out


@dataclass(frozen=True)
class _MixCut:
    """Rows and columns of a product of the mixes, and the stages of its loads."""

    rows: int
    columns: int
    stages: int

    @classmethod
    def of(cls, columns: int, *, hip: bool) -> _MixCut:
        """Such that two programs share a multiprocessor's memory, or (HIP) that a program's registers suffice."""
        rows, width, stages = (32, 128, 1) if hip else (64, 256, 2)
        return cls(rows, min(width, columns & -columns), stages)


# -- the stream -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "tap_column", "tap_stride"])
def _boundary(
    stream,  # [rows, HC, HIDDEN] bf16
    output,  # [rows, HIDDEN] bf16 or f32: of the sublayer
    coefficients,  # [rows, COUNT] f32: of the sublayer
    stream_out,  # [rows, HC, HIDDEN] bf16
    taps,  # [rows, tap_stride] bf16
    tap_stride,
    tap_column,
    pre,  # [rows, COUNT] f32: coefficients whose first HC collapse
    norm,  # [HIDDEN] bf16
    collapsed,  # [rows, HIDDEN] bf16: before the norm
    values,  # [rows, HIDDEN] bf16: behind it
    codes,  # [rows, HIDDEN] u8
    scales,  # [rows, HIDDEN / 32] u8
    rows,
    rms_eps,
    HIDDEN: tl.constexpr,
    HC: tl.constexpr,
    COUNT: tl.constexpr,
    EXPAND: tl.constexpr,
    TAPS: tl.constexpr,
    COLLAPSE: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    row = row.to(tl.int64)
    copy = tl.arange(0, HC)
    part = tl.arange(0, CHUNK)
    squares = tl.zeros((ROWS,), tl.float32)
    mask = inside[:, None]
    for chunk in range(HIDDEN // CHUNK):
        column = chunk * CHUNK + part
        at = row[:, None] * HIDDEN + column[None, :]
        at_copies = (row[:, None, None] * HC + copy[None, :, None]) * HIDDEN + column[None, None, :]
        if EXPAND:
            y = round_bf16(tl.load(output + at, mask=mask, other=0.0).to(tl.float32))
            post = tl.load(coefficients + row[:, None] * COUNT + HC + copy[None, :], mask=mask, other=0.0)
            new = post[:, :, None] * y[:, None, :]
            for i in tl.static_range(HC):
                old = tl.load(stream + (row[:, None] * HC + i) * HIDDEN + column[None, :], mask=mask, other=0.0)
                comb = tl.load(coefficients + row[:, None] * COUNT + (2 + i) * HC + copy[None, :], mask=mask, other=0.0)
                new += comb[:, :, None] * old.to(tl.float32)[:, None, :]
            rounded = to_bf16(new)
            tl.store(stream_out + at_copies, rounded, mask=mask[:, :, None])
        else:
            rounded = tl.load(stream + at_copies, mask=mask[:, :, None], other=0.0)
        wide = rounded.to(tl.float32)
        if TAPS:
            mean = tl.sum(wide, 1) / HC
            tl.store(taps + row[:, None] * tap_stride + tap_column + column[None, :], to_bf16(mean), mask=mask)
        if COLLAPSE:
            if FIRST:
                weight = tl.where(copy[None, :] == 0, 1.0, tl.zeros((ROWS, HC), tl.float32))
            else:
                weight = tl.load(pre + row[:, None] * COUNT + copy[None, :], mask=mask, other=0.0)
            x = to_bf16(tl.sum(weight[:, :, None] * wide, 1))
            tl.store(collapsed + at, x, mask=mask)
            x = x.to(tl.float32)
            squares += tl.sum(x * x, 1)
    if COLLAPSE:
        inverse = 1 / tl.sqrt_rn(squares / HIDDEN + rms_eps)
        tl.debug_barrier()  # below, threads read what others of this program collapsed
        for chunk in range(HIDDEN // CHUNK):
            column = chunk * CHUNK + part
            at = row[:, None] * HIDDEN + column[None, :]
            x = tl.load(collapsed + at, mask=mask, other=0.0).to(tl.float32)
            x = to_bf16(tl.load(norm + column).to(tl.float32)[None, :] * x * inverse[:, None])
            tl.store(values + at, x, mask=mask)
            code, scale = quantize_fp8(x.to(tl.float32), ROWS, CHUNK)
            tl.store(codes + at, code, mask=mask)
            group = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
            tl.store(scales + row[:, None] * (HIDDEN // 32) + group[None, :], scale, mask=mask)


def _rows_of(rows: int) -> int:
    """Rows of a program; many in the interpreter, which takes its time by the program."""
    return min(256, triton.next_power_of_2(rows)) if interpreted() else 1


@dataclass(frozen=True)
class Sublayer:
    """What a sublayer leaves: its output [rows, hidden], bf16 or float32 (rounded here), and its coefficients."""

    output: Tensor
    mixes: Tensor


@dataclass(frozen=True)
class Collapse:
    """How the stream becomes the next sublayer's input.

    mixes: coefficients of the PREVIOUS sublayer, whose `pre` collapses; None: the first collapse, of copy 0 alone.
    norm: [hidden] bf16.
    """

    mixes: Tensor | None
    norm: Tensor


@dataclass(frozen=True)
class Taps:
    """Where the mean over the copies goes: columns from `column` on of `values` [rows, taps * hidden] bf16."""

    values: Tensor
    column: int


def embed(tokens: Tensor, embedding: Tensor, config: ModelConfig) -> Tensor:
    """The stream [rows, hc, hidden] bf16 that starts from `embedding` [vocab, hidden] of `tokens` [rows]."""
    return embedding[tokens].unsqueeze(1).repeat(1, config.hc_mult, 1)


def expand(stream: Tensor, sublayer: Sublayer, config: ModelConfig, taps: Taps | None = None) -> Tensor:
    """The stream behind a sublayer; `stream` [rows, hc, hidden] bf16 stands in front of it and is left alone."""
    return _launch(stream, config, sublayer, taps, None)[0]


def collapse(stream: Tensor, into: Collapse, config: ModelConfig, taps: Taps | None = None) -> Input:
    """The next sublayer's input from `stream` [rows, hc, hidden] bf16."""
    return _launch(stream, config, None, taps, into)[1]


def boundary(
    stream: Tensor, sublayer: Sublayer, into: Collapse, config: ModelConfig, taps: Taps | None = None
) -> tuple[Tensor, Input]:
    """`expand` and `collapse` in one pass."""
    return _launch(stream, config, sublayer, taps, into)


def _launch(
    stream: Tensor, config: ModelConfig, sublayer: Sublayer | None, taps: Taps | None, into: Collapse | None
) -> tuple[Tensor, Input]:
    rows, hc, hidden = stream.shape
    count = (2 + hc) * hc
    behind = stream if sublayer is None else torch.empty_like(stream)
    wanted = rows if into is not None else 0
    collapsed, values = (stream.new_empty(wanted, hidden) for _ in range(2))
    codes = stream.new_empty(wanted, hidden, dtype=torch.uint8)
    scales = stream.new_empty(wanted, hidden // FP8_BLOCK, dtype=torch.uint8)
    if rows:
        block = _rows_of(rows)
        _boundary[(triton.cdiv(rows, block),)](
            stream,
            None if sublayer is None else sublayer.output,
            None if sublayer is None else sublayer.mixes,
            behind,
            None if taps is None else taps.values,
            0 if taps is None else taps.values.stride(0),
            0 if taps is None else taps.column,
            None if into is None else into.mixes,
            None if into is None else into.norm,
            collapsed,
            values,
            codes,
            scales,
            rows,
            config.rms_norm_eps,
            hidden,
            hc,
            count,
            sublayer is not None,
            taps is not None,
            into is not None,
            into is not None and into.mixes is None,
            block,
            min(_CHUNK, hidden & -hidden),
            num_warps=4,
        )
    return behind, Input(values, codes, scales, collapsed)


def _boundary_build(*, expand: bool, taps: bool, collapse: bool, first: bool) -> Build:
    pointers = ("stream", "stream_out", "taps", "norm", "collapsed", "values")
    arguments = dict.fromkeys(pointers, "*bf16") | {
        "output": "*fp32",
        "coefficients": "*fp32",
        "pre": "*fp32",
        "codes": "*u8",
        "scales": "*u8",
        "tap_stride": "i32",
        "tap_column": "i32",
        "rows": "i32",
        "rms_eps": "fp32",
    }
    constants = {"HIDDEN": 5120, "HC": 4, "COUNT": 24, "ROWS": 1, "CHUNK": _CHUNK}
    return Build(
        _boundary,
        arguments,
        constants | {"EXPAND": expand, "TAPS": taps, "COLLAPSE": collapse, "FIRST": first},
    )


# What the released model compiles, for the test that all of it compiles.
KERNELS = [
    *(
        Build(
            _mix_sums,
            {"stream": "*bf16", "fn": "*fp32", "sums": "*fp32", "rows": "i32"},
            {"COLUMNS": 20480, "COUNT": 24, "ROWS": cut.rows, "SLICE": cut.columns, "STAGES": cut.stages},
            backends=(backend,),
        )
        for backend in ("cuda", "hip")
        for cut in [_MixCut.of(20480, hip=backend == "hip")]
    ),
    Build(
        _coefficients,
        {
            "sums": "*fp32",
            "base": "*fp32",
            "scale": "*fp32",
            "out": "*fp32",
            "rows": "i32",
            "columns": "i32:16",
            "rms_eps": "fp32",
            "eps": "fp32",
        },
        {"HC": 4, "COUNT": 24, "SLICES": 80, "ITERATIONS": 20, "ROWS": 16},
    ),
    _boundary_build(expand=True, taps=True, collapse=True, first=False),
    _boundary_build(expand=True, taps=False, collapse=False, first=False),
    _boundary_build(expand=False, taps=False, collapse=True, first=True),
]
