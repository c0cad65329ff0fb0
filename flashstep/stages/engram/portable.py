"""The Engram in Triton, for any number of rows: table rows from token ids, and the gated sum into the stream.

`rows` gives what the wkv product reads: row numbers from the tokens of this forward and of the history in front of it,
then the rows themselves, gathered from a table on the device or in pinned host memory and quantized. The product is a
dense one like any other. `inject` adds its gated value to the stream. `write_history` belongs behind `rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK, ModelConfig
from flashstep.stages.attention.portable import Batch, write_ring
from flashstep.stages.engram.cuda import Hash
from flashstep.stages.triton_ops import Build, decode_e4m3, decode_ue8m0, interpreted, quantize_fp8, round_bf16, to_bf16

import triton  # isort: skip
import triton.language as tl  # isort: skip

_ROWS = 4  # of a program that gathers
_CHUNK = 1024  # columns of the stream that a program holds at once

# -- table rows -------------------------------------------------------------------------------------------------------


@triton.jit
def _ids_back(ids, history, row, position, slot, first, pad, ring, inside, BACK: tl.constexpr):
    """Compressed ids BACK tokens in front of `row`: from this forward, from the history, or the pad token's."""
    own = row - BACK >= first
    before = position >= BACK
    fresh = tl.load(ids + row - BACK, mask=inside & own, other=0)
    place = slot.to(tl.int64) * ring + (position - BACK) % ring
    old = tl.load(history + place, mask=inside & before & (own == 0), other=0)
    return tl.where(own, fresh, tl.where(before, old, pad)).to(tl.int64)


@triton.jit(do_not_specialize=["rows", "pad", "ring"])
def _rows(
    ids,  # [rows] i32: compressed
    positions,
    slots,
    first,
    history,  # [slots, ring] i32
    pad,
    ring,
    multipliers,  # [LONGEST] i64
    primes,  # [columns] i64
    offsets,
    table,  # [table rows, DIM] u8
    table_scales,  # [table rows, DIM / 32] u8
    codes,  # [rows, columns * DIM] u8
    scales,
    numbers,  # [rows, columns] i64
    rows,
    columns,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    inside = inside & (slot >= 0)
    start = tl.load(first + row, mask=inside, other=0)
    size = row * 0 + (column // HEADS + 2)  # tokens of the column's n-grams; by row, for masks
    roll = _ids_back(ids, history, row, position, slot, start, pad, ring, inside, 0) * tl.load(multipliers)
    for back in tl.static_range(1, LONGEST):
        found = _ids_back(ids, history, row, position, slot, start, pad, ring, inside & (size > back), back)
        roll = tl.where(size > back, roll ^ (found * tl.load(multipliers + back)), roll)
    number = roll % tl.load(primes + column) + tl.load(offsets + column)
    tl.store(numbers + row.to(tl.int64) * columns + column, number, mask=inside)

    part = tl.arange(0, DIM)
    group = tl.arange(0, DIM // 32)
    code = tl.load(table + number[:, None] * DIM + part[None, :], mask=inside[:, None], other=0)
    scale = tl.load(table_scales + number[:, None] * (DIM // 32) + group[None, :], mask=inside[:, None], other=127)
    value = tl.reshape(decode_e4m3(code), (ROWS, DIM // 32, 32))
    value = value * decode_ue8m0(scale)[:, :, None]
    code, scale = quantize_fp8(tl.reshape(round_bf16(value), (ROWS, DIM)), ROWS, DIM)
    place = (row.to(tl.int64) * columns + column)[:, None]
    tl.store(codes + place * DIM + part[None, :], code, mask=(row < rows)[:, None])
    tl.store(scales + place * (DIM // 32) + group[None, :], scale, mask=(row < rows)[:, None])


def rows(
    ids: Tensor,
    batch: Batch,
    history: Tensor,
    config: ModelConfig,
    hash: Hash,
    layer: int,
    table: Tensor,
    table_scales: Tensor,
    pad: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns * dim] uint8 (e4m3), scales [.., / 32] uint8 and table row numbers [rows, columns] int64.

    ids: [rows] int32, compressed; `pad` that of the pad token. history: [slots, ring] int32, as it was in front of this
    forward. layer: place among the Engram layers. table: [table rows of the rank, dim] uint8 and its scales, which a
    kernel can address: on the device or pinned. Inactive rows give zeros.
    """
    count, columns = len(ids), hash.primes.shape[1]
    dim = config.engram_head_dim
    codes = torch.empty(count, columns * dim, dtype=torch.uint8, device=ids.device)
    scales = torch.empty(count, columns * dim // FP8_BLOCK, dtype=torch.uint8, device=ids.device)
    numbers = torch.empty(count, columns, dtype=torch.int64, device=ids.device)
    if count:
        block = _ROWS if not interpreted() else min(256, triton.next_power_of_2(count))
        _rows[(triton.cdiv(count, block), columns)](
            ids,
            batch.positions,
            batch.slots,
            batch.first,
            history,
            pad,
            history.shape[1],
            hash.multipliers[layer],
            hash.primes[layer],
            hash.offsets[layer],
            table,
            table_scales,
            codes,
            scales,
            numbers,
            count,
            columns,
            columns // (config.engram_max_ngram_size - 1),
            dim,
            config.engram_max_ngram_size,
            block,
            num_warps=4,
        )
    return codes, scales, numbers


def write_history(ids: Tensor, batch: Batch, history: Tensor) -> None:
    """Store `ids` [rows] int32 at their positions of `history` [slots, ring] int32."""
    write_ring(ids.unsqueeze(1), batch, history.unsqueeze(2))


# -- into the stream --------------------------------------------------------------------------------------------------


@triton.jit
def _inject(
    stream,  # [rows, HC, HIDDEN] bf16
    projected,  # [rows, HC + 1, HIDDEN] bf16 or f32: a key per copy, then the value
    query_weight,  # [HC, HIDDEN] bf16
    key_weight,
    out,  # [rows, HC, HIDDEN] bf16
    eps,
    HIDDEN: tl.constexpr,
    HC: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    copy = tl.arange(0, HC)
    part = tl.arange(0, CHUNK)
    dots = tl.zeros((HC,), tl.float32)
    squares = tl.zeros((HC,), tl.float32)
    key_squares = tl.zeros((HC,), tl.float32)
    for chunk in range(HIDDEN // CHUNK):
        place = copy[:, None] * HIDDEN + chunk * CHUNK + part[None, :]
        x = tl.load(stream + row * HC * HIDDEN + place).to(tl.float32)
        key = round_bf16(tl.load(projected + row * (HC + 1) * HIDDEN + place).to(tl.float32))
        weight = tl.load(query_weight + place).to(tl.float32) * tl.load(key_weight + place).to(tl.float32)
        dots += tl.sum(x * weight * key, 1)
        squares += tl.sum(x * x, 1)
        key_squares += tl.sum(key * key, 1)
    dots = dots / tl.sqrt_rn(squares / HIDDEN + eps) / tl.sqrt_rn(key_squares / HIDDEN + eps) * HIDDEN**-0.5
    root = tl.sqrt_rn(tl.maximum(tl.abs(dots), 1e-6))
    root = tl.where(dots < 0, -root, tl.where(dots > 0, root, 0.0))
    gate = 1 / (1 + tl.exp(-root))
    for chunk in range(HIDDEN // CHUNK):
        column = chunk * CHUNK + part
        place = row * HC * HIDDEN + copy[:, None] * HIDDEN + column[None, :]
        value = round_bf16(tl.load(projected + (row * (HC + 1) + HC) * HIDDEN + column).to(tl.float32))
        x = tl.load(stream + place).to(tl.float32) + gate[:, None] * value[None, :]
        tl.store(out + place, to_bf16(x))


def inject(
    stream: Tensor, projected: Tensor, query_weight: Tensor, key_weight: Tensor, out: Tensor, config: ModelConfig
) -> None:
    """Write `stream` [rows, hc, hidden] bf16 plus the gated value to `out`, which may be `stream` itself.

    projected: [rows, (hc + 1) * hidden], keys and value as the wkv product leaves them, bf16 or float32 (rounded here).
    """
    rows, hc, hidden = stream.shape
    if rows:
        _inject[(rows,)](
            stream,
            projected,
            query_weight,
            key_weight,
            out,
            config.rms_norm_eps,
            hidden,
            hc,
            min(_CHUNK, hidden & -hidden),
            num_warps=4,
        )


# What the released model compiles, for the test that all of it compiles.
KERNELS = [
    Build(
        _rows,
        dict.fromkeys(("ids", "positions", "slots", "first", "history"), "*i32")
        | dict.fromkeys(("multipliers", "primes", "offsets", "numbers"), "*i64")
        | dict.fromkeys(("table", "table_scales", "codes", "scales"), "*u8")
        | dict.fromkeys(("pad", "ring", "rows", "columns"), "i32"),
        {"HEADS": 2, "DIM": 256, "LONGEST": 4, "ROWS": _ROWS},
    ),
    Build(
        _inject,
        dict.fromkeys(("stream", "query_weight", "key_weight", "out"), "*bf16") | {"projected": "*fp32", "eps": "fp32"},
        {"HIDDEN": 5120, "HC": 4, "CHUNK": _CHUNK},
    ),
]
