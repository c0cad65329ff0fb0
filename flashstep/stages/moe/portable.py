"""Routing and experts in Triton, for any number of rows, over the packed weights of `moe/cuda.py`.

A visit is a row at one of its chosen experts. Visits are sorted by expert and cut into blocks of up to N; a program
multiplies 64 T weight rows with a block's activations, weights as the left operand (`dense/portable.py` says why and in
which order columns lie). Every expert's product is rounded to bf16 and kept, then a row's are added in the order of its
choice, behind the shared expert's: no atomics, and a row's result does not depend on the rows beside it. Inactive rows
visit nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.stages import triton_ops as ops
from flashstep.stages.dense.portable import Fp8Rows, fp8_operand
from flashstep.stages.moe.cuda import Shape, Weights, routed_piece, shared_piece

import triton  # isort: skip
import triton.language as tl  # isort: skip


# -- routing --------------------------------------------------------------------------------------------------------


def route(logits: Tensor, bias: Tensor, slots: Tensor | None, shape: Shape) -> tuple[Tensor, Tensor]:
    """Chosen experts i32 [rows, top_k], best first, and their weights f32, of `logits` f32 [rows, experts].

    Of equal scores the lowest index. Rows of a negative slot (`slots` i32 [rows], None: all are active) choose -1.
    """
    rows = logits.shape[0]
    chosen = torch.empty(rows, shape.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, shape.top_k, device=logits.device)
    if rows:
        block = min(256, triton.next_power_of_2(rows)) if ops.interpreted() else 4
        _route[(triton.cdiv(rows, block),)](
            logits, bias, slots, chosen, weights, rows,
            shape.experts, triton.next_power_of_2(shape.experts), shape.top_k, shape.scaling, block, num_warps=4,
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + e^x)); the logarithm of 1 + t by its series in t / (2 + t), to float32 accuracy for every t."""
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    y = z * z
    series = ((((((y / 15 + 1 / 13) * y + 1 / 11) * y + 1 / 9) * y + 1 / 7) * y + 1 / 5) * y + 1 / 3) * y + 1.0
    return tl.sqrt(tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def _route(
    logits, bias, slots, chosen, weights, rows,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SCALING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, PADDED)[None, :]
    real = expert < EXPERTS
    inside = row < rows
    active = inside
    if slots is not None:
        active = inside & (tl.load(slots + row, mask=inside, other=-1) >= 0)
    x = tl.load(logits + row.to(tl.int64)[:, None] * EXPERTS + expert, mask=inside[:, None] & real, other=0.0)
    score = _sqrt_softplus(x)
    key = score + tl.load(bias + expert, mask=real, other=0.0)
    key = tl.where(real, tl.where(key > -2.0e38, key, -2.0e38), -3.0e38)  # a NaN too: every choice is an expert
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 1)[:, None], expert, PADDED), 1)
        mine = expert == best[:, None]
        value = tl.sum(tl.where(mine, score, 0.0), 1)
        total += value
        key = tl.where(mine, -float("inf"), key)
        at = row.to(tl.int64) * TOP_K + place
        tl.store(chosen + at, tl.where(active, best, -1), mask=inside)
        tl.store(weights + at, value, mask=inside)
    tl.debug_barrier()  # what a program reads back below, other threads of it have written
    for place in tl.static_range(TOP_K):
        at = row.to(tl.int64) * TOP_K + place
        value = tl.load(weights + at, mask=inside, other=0.0)
        tl.store(weights + at, tl.where(active, value / (total + 1e-20) * SCALING, 0.0), mask=inside)


# -- visits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visits:
    """Visits sorted by expert; a visit's number is row * top_k + place.

    order: [visits] i32, the numbers, those of an expert ascending; behind the last active one undefined.
    blocks: [blocks, 3] i32: expert, its first place in `order`, visits (up to `size`). Expert -1: no block.
    """

    order: Tensor
    blocks: Tensor
    size: int


def sort(chosen: Tensor, shape: Shape, size: int) -> Visits:
    """The visits of `chosen` [rows, top_k] in blocks of up to `size`; without a word to the host."""
    visits = chosen.numel()
    distinct = min(shape.experts, visits)
    blocks = distinct + (visits - distinct) // size
    counts = torch.empty(shape.experts, dtype=torch.int32, device=chosen.device)
    sorted_ = Visits(
        torch.empty(visits, dtype=torch.int32, device=chosen.device),
        torch.empty(blocks, 3, dtype=torch.int32, device=chosen.device),
        size,
    )
    if visits:
        chunk = min(4096, triton.next_power_of_2(visits))
        _count[(shape.experts,)](chosen, counts, visits, chunk, num_warps=4)
        _place[(shape.experts,)](
            chosen, counts, sorted_.order, sorted_.blocks, visits, blocks,
            shape.experts, triton.next_power_of_2(shape.experts), size, chunk, num_warps=4,
        )  # fmt: skip
    return sorted_


@triton.jit
def _count(chosen, counts, visits, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, visits, CHUNK):
        visit = first + tl.arange(0, CHUNK)
        total += (tl.load(chosen + visit, mask=visit < visits, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def _place(
    chosen, counts, order, blocks, visits, num_blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    other = tl.arange(0, PADDED)
    count = tl.load(counts + other, mask=other < EXPERTS, other=0)
    first = tl.sum(tl.where(other < expert, count, 0), 0)
    own = tl.sum(tl.where(other == expert, count, 0), 0)
    block = tl.sum(tl.where(other < expert, (count + SIZE - 1) // SIZE, 0), 0)
    for begin in range(0, own, SIZE):
        at = blocks + (block + begin // SIZE) * 3
        tl.store(at, expert)
        tl.store(at + 1, first + begin)
        tl.store(at + 2, tl.minimum(own - begin, SIZE))
    if expert == EXPERTS - 1:
        for unused in range(block + (own + SIZE - 1) // SIZE, num_blocks):
            tl.store(blocks + unused * 3, -1)
    if own > 0:
        place = first
        for start in range(0, visits, CHUNK):
            visit = start + tl.arange(0, CHUNK)
            mine = (tl.load(chosen + visit, mask=visit < visits, other=-1) == expert).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine, 0) - 1, visit, mask=mine > 0)
            place += tl.sum(mine, 0)


# -- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How products are cut: a program has `tiles` x 64 weight rows of a block and takes `steps` x 64 columns at a time.

    small: blocks of at most so many rows take products that narrow (0: none do).
    """

    tiles: int
    steps: int
    warps: int
    stages: int
    small: int = 0


def block_rows(rows: int, shape: Shape) -> int:
    """Rows of a block of visits, by a rule that stays as it was measured on an H200: equal calls give equal bits."""
    expected = rows * shape.top_k / shape.experts
    return 16 if expected <= 8 else 32 if expected <= 16 else 64 if expected <= 32 else 128


def choose_cut(size: int, *, gate_up: bool, routed: bool) -> Cut:
    """The cut of products with blocks of `size` rows: from the same measurement."""
    if size <= 16:
        return Cut(1, 2, 4, 4) if gate_up else Cut(1, 1, 4, 5)
    if size <= 64 and not routed:
        return Cut(1, 1, 4, 4)
    return Cut(2, 1, 4 if gate_up else 8, 3, 64 if routed and size > 64 else 0)


def experts(
    x: Fp8Rows,
    logits: Tensor,
    bias: Tensor,
    weights: Weights,
    shape: Shape,
    *,
    slots: Tensor | None = None,
) -> Tensor:
    """This rank's part of the experts' output of `x` [rows, hidden]: float32 [rows, hidden], not rounded.

    logits, bias, slots: as for `route`. Inactive rows get what the shared expert makes of them.
    """
    chosen, route_weights = route(logits, bias, slots, shape)
    visits = sort(chosen, shape, block_rows(logits.shape[0], shape))
    h = gate_up(x, weights.gate_up, shape, visits, route_weights)
    routed = down(h, weights.down, shape, visits)
    shared = down(gate_up(x, weights.shared_gate_up, shape), weights.shared_down, shape)
    return add(routed, shared, chosen)


def gate_up(
    x: Fp8Rows,
    weights: Tensor,
    shape: Shape,
    visits: Visits | None = None,
    route_weights: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """h of every visit in the order of `visits`, or of every row by the shared expert: [.., inner] bf16.

    silu(min(gate, limit)) * clamp(up, +-limit) * route weight, rounded to bf16, then to fp8; in operand order.
    """
    count = x.codes.shape[0] if visits is None else visits.order.shape[0]
    out = torch.empty(count, shape.inner, dtype=torch.bfloat16, device=x.codes.device)
    _multiply(weights, x.operand, out, shape, visits, route_weights, gate_up=True, cut=cut)
    return out


def down(h: Tensor, weights: Tensor, shape: Shape, visits: Visits | None = None, cut: Cut | None = None) -> Tensor:
    """The experts' outputs of `h` (as `gate_up` made it), [.., hidden] bf16: by number of visit, or by row."""
    out = torch.empty(h.shape[0], shape.hidden, dtype=torch.bfloat16, device=h.device)
    _multiply(weights, h, out, shape, visits, None, gate_up=False, cut=cut)
    return out


def add(routed: Tensor, shared: Tensor, chosen: Tensor) -> Tensor:
    """float32 [rows, hidden]: `shared` [rows, hidden], plus a row's experts in the order of `chosen` [rows, top_k]."""
    rows, hidden = shared.shape
    out = torch.empty(rows, hidden, device=shared.device)
    if rows:
        block = min(1024, triton.next_power_of_2(hidden))
        many = min(64, triton.next_power_of_2(rows)) if ops.interpreted() else 1
        _add[(triton.cdiv(hidden, block), triton.cdiv(rows, many))](
            routed, shared, chosen, out, rows, hidden, chosen.shape[1], many, block, num_warps=4
        )
    return out


@triton.jit
def _add(
    routed, shared, chosen, out, rows,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HIDDEN)
    total = tl.load(shared + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):
        visit = row * TOP_K + place
        visited = inside & (tl.load(chosen + visit, mask=row < rows, other=-1) >= 0)
        total += tl.load(routed + visit * HIDDEN + column, mask=visited, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total, mask=inside)


def _multiply(
    weights: Tensor,
    x: Tensor,
    out: Tensor,
    shape: Shape,
    visits: Visits | None,
    route_weights: Tensor | None,
    *,
    gate_up: bool,
    cut: Cut | None,
) -> None:
    if not x.shape[0]:
        return
    rows = x.shape[0]
    size = shared_rows(rows) if visits is None else visits.size
    blocks = triton.cdiv(rows, size) if visits is None else visits.blocks.shape[0]
    tiles = shape.inner // 32 if gate_up else shape.hidden // 64
    cut = cut or choose_cut(size, gate_up=gate_up, routed=visits is not None)
    _product[(triton.cdiv(tiles, cut.tiles), blocks)](
        weights,
        x,
        out,
        None if visits is None else visits.order,
        None if visits is None else visits.blocks,
        route_weights,
        rows,
        **constants(shape, size, cut, gate_up=gate_up, routed=visits is not None),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def shared_rows(rows: int) -> int:
    """Rows of a block of the shared expert."""
    return 16 if rows <= 16 else 64 if rows <= 64 else 128


def constants(shape: Shape, size: int, cut: Cut, *, gate_up: bool, routed: bool) -> dict[str, int | float]:
    """What `_product` is compiled with."""
    columns = shape.hidden if gate_up else shape.inner
    return {
        "COLUMNS": columns,
        "TILES": shape.inner // 32 if gate_up else shape.hidden // 64,
        "PIECE": routed_piece(columns) if routed else shared_piece(columns),
        "TOP_K": shape.top_k,
        "LIMIT": shape.limit,
        "GATE_UP": gate_up,
        "ROUTED": routed,
        "T": cut.tiles,
        "S": cut.steps,
        "N": size,
        "SMALL": cut.small,
        "STAGES": cut.stages,
    }


@triton.jit
def _product(
    weights, x, out, order, blocks, route_weights, rows,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, PIECE: tl.constexpr, TOP_K: tl.constexpr, LIMIT: tl.constexpr,
    GATE_UP: tl.constexpr, ROUTED: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    SMALL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if ROUTED:
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        count = tl.load(blocks + block * 3 + 2)
    else:
        expert = 0
        first = block * N
        count = tl.minimum(rows - first, N)
    if expert >= 0:
        if SMALL == 0:
            _block(
                weights, x, out, order, route_weights, expert, first, count,
                COLUMNS, TILES, PIECE, TOP_K, LIMIT, GATE_UP, ROUTED, T, S, N, STAGES,
            )  # fmt: skip
        elif count <= SMALL:
            _block(
                weights, x, out, order, route_weights, expert, first, count,
                COLUMNS, TILES, PIECE, TOP_K, LIMIT, GATE_UP, ROUTED, T, S, SMALL, STAGES,
            )  # fmt: skip
        else:
            _block(
                weights, x, out, order, route_weights, expert, first, count,
                COLUMNS, TILES, PIECE, TOP_K, LIMIT, GATE_UP, ROUTED, T, S, N, STAGES,
            )  # fmt: skip


@triton.jit
def _block(
    weights, x, out, order, route_weights, expert, first, count,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, PIECE: tl.constexpr, TOP_K: tl.constexpr, LIMIT: tl.constexpr,
    GATE_UP: tl.constexpr, ROUTED: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """64 T weight rows times up to N rows. A unit (2048 bytes of a tile) has 64 columns of fp4, 32 of fp8."""
    WIDTH: tl.constexpr = 64 if ROUTED else 32  # columns of a unit
    U: tl.constexpr = S if ROUTED else 2 * S  # units of a step
    PER_PIECE: tl.constexpr = PIECE // WIDTH
    PIECE_BYTES: tl.constexpr = 2048 * PER_PIECE + 2 * PIECE
    PIECES: tl.constexpr = (COLUMNS + PIECE - 1) // PIECE
    UNITS: tl.constexpr = PIECES * PER_PIECE
    STEPS: tl.constexpr = (UNITS + U - 1) // U
    WHOLE: tl.constexpr = COLUMNS % (WIDTH * U) == 0
    tile = tl.program_id(0) * T
    base = weights + (expert * TILES + tile).to(tl.int64) * (PIECES * PIECE_BYTES)
    behind = TILES - 1 - tile  # tiles behind the last one are the last one once more; they are not stored

    unit_tile = tl.arange(0, U * T)
    in_tile = tl.minimum(unit_tile % T, behind) * (PIECES * PIECE_BYTES)
    words_at = tl.arange(0, 512)[None, :]
    # Scales are loaded as they are used: [U 2 T, 128], a lane's row r or r + 8.
    unit_half = tl.arange(0, 2 * U * T)
    lane = tl.arange(0, 128)
    half_in_tile = tl.minimum(unit_half % T, behind) * (PIECES * PIECE_BYTES)
    scale_row = ((unit_half // T % 2) * 8)[:, None] + (lane // 32 * 16 + lane // 4 % 8)[None, :]

    column = tl.arange(0, WIDTH * U)
    index = tl.arange(0, N)
    values_at = x + _rows(order, first, count, index, TOP_K, GATE_UP, ROUTED)[:, None] * COLUMNS + column[None, :]
    sums = tl.zeros((64 * T, N), tl.float32)
    following = tl.minimum(unit_half // (2 * T), UNITS - 1)
    scale = _scales(base, following, half_in_tile, scale_row, PIECE, ROUTED)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        unit = step * U + unit_tile // T
        at = in_tile + unit // PER_PIECE * PIECE_BYTES + unit % PER_PIECE * 2048
        pointers = (base + at).to(tl.pointer_type(tl.int32))[:, None] + words_at
        if WHOLE:
            words = tl.load(pointers)
            values = tl.load(values_at + step * (WIDTH * U))
        else:
            words = tl.load(pointers, mask=(unit < UNITS)[:, None], other=0)
            inside = (step * (WIDTH * U) + column < COLUMNS)[None, :]
            values = tl.load(values_at + step * (WIDTH * U), mask=inside, other=0.0)
        if ROUTED:
            operand = _fp4_operand(words, scale, T, U)
        else:
            factor = ops.decode_ue8m0(scale) * ops.E4M3_IN_BF16
            factor = tl.permute(tl.reshape(factor, (U, 2, T, 4, 8, 4)), (0, 2, 3, 4, 5, 1))
            operand = fp8_operand(words, factor, T, U)
        following = tl.minimum((step + 1) * U + unit_half // (2 * T), UNITS - 1)
        scale = _scales(base, following, half_in_tile, scale_row, PIECE, ROUTED)
        sums = ops.dot(operand, values.T, sums)
    _finish(sums, out, order, route_weights, first, count, index, TILES, LIMIT, GATE_UP, ROUTED, T, N)


@triton.jit
def _rows(order, first, count, index, TOP_K: tl.constexpr, GATE_UP: tl.constexpr, ROUTED: tl.constexpr):
    """int64 rows of the activations that places `index` of a block read; behind the last place, the last one's."""
    place = first + tl.minimum(index, count - 1)
    if GATE_UP and ROUTED:
        place = tl.load(order + place) // TOP_K
    return place.to(tl.int64)


@triton.jit
def _finish(
    sums, out, order, route_weights, first, count, index,
    TILES: tl.constexpr, LIMIT: tl.constexpr, GATE_UP: tl.constexpr, ROUTED: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """`sums` float32 [64 T, N] of places `index` become h, or the experts' outputs, and are stored."""
    tile = tl.program_id(0) * T
    place = first + tl.minimum(index, count - 1)
    visit = place
    if ROUTED:
        visit = tl.load(order + place)
    if GATE_UP:
        INNER: tl.constexpr = 32 * TILES
        gate, up = tl.split(tl.permute(tl.reshape(sums, (4 * T, 2, 8, N)), (0, 2, 3, 1)))
        gate = tl.minimum(ops.round_bf16(gate), LIMIT)
        up = tl.minimum(tl.maximum(ops.round_bf16(up), -LIMIT), LIMIT)
        h = gate / (1.0 + tl.exp(-gate)) * up
        if ROUTED:
            h *= tl.load(route_weights + visit)[None, None, :]
        h = ops.round_bf16(tl.reshape(h, (T, 32, N)))
        code = ops.fp8_scale_code(tl.max(tl.abs(h), 1))[:, None, :]
        h = ops.encode_e4m3(h * ((254 - code) << 23).to(tl.float32, bitcast=True))
        h = ops.decode_e4m3(h) * ops.decode_ue8m0(code)
        h = tl.permute(tl.reshape(h, (2 * T, 4, 2, 2, N)), (0, 3, 1, 2, 4))  # operand order
        column = tile * 32 + tl.arange(0, 32 * T)
        out += place.to(tl.int64)[None, :] * INNER + column[:, None]
        inside = (index < count)[None, :] & (column < INNER)[:, None]
        tl.store(out, tl.reshape(h, (32 * T, N)).to(tl.bfloat16), mask=inside)
    else:
        HIDDEN: tl.constexpr = 64 * TILES
        column = tile * 64 + tl.arange(0, 64 * T)
        out += visit.to(tl.int64)[None, :] * HIDDEN + column[:, None]
        tl.store(out, ops.to_bf16(sums), mask=(index < count)[None, :] & (column < HIDDEN)[:, None])


@triton.jit
def _scales(base, unit, in_tile, row, PIECE: tl.constexpr, ROUTED: tl.constexpr):
    """UE8M0 codes of `row` in `unit`: one (fp8), or those of the unit's two groups in an int16 (fp4)."""
    GROUPS: tl.constexpr = PIECE // 32
    WORD: tl.constexpr = 4 if GROUPS % 4 == 0 else 2 if GROUPS % 2 == 0 else 1
    EACH: tl.constexpr = 2 if ROUTED else 1  # groups of a unit
    PER_PIECE: tl.constexpr = GROUPS // EACH
    PIECE_BYTES: tl.constexpr = 2048 * PER_PIECE + 2 * PIECE
    group = unit % PER_PIECE * EACH
    at = in_tile + unit // PER_PIECE * PIECE_BYTES + 2048 * PER_PIECE + group // WORD * (64 * WORD) + group % WORD
    pointers = base + (at[:, None] + row * WORD)
    if ROUTED:
        return tl.load(pointers.to(tl.pointer_type(tl.int16)))
    else:
        return tl.load(pointers)


@triton.jit
def _fp4_operand(words, scale, T: tl.constexpr, U: tl.constexpr):
    """bf16 [64 T, 64 U] of fp4 units, columns in operand order. `scale` int16 [2 U T, 128]: codes of two groups."""
    words = tl.reshape(words, (U, T, 4, 8, 4, 2, 2))
    scale = tl.permute(tl.reshape(scale, (U, 2, T, 4, 8, 4)), (0, 2, 3, 4, 5, 1)).to(tl.int32)
    scale = tl.join(scale & 255, (scale >> 8) & 255)  # unit, tile, warp, r, q, half, group
    # e2m1 bits where bf16 has its own are 2^-126 of the value, so the factor is 2^(code - 1).
    factor = (tl.maximum(scale + 126, 0) << 23).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.permute(factor, (0, 1, 2, 3, 4, 6, 5)))
    low_values = tl.join(ops.bf16_pairs(_bits(words, 12)), ops.bf16_pairs(_bits(words, 4)))
    high_values = tl.join(ops.bf16_pairs(_bits(words, 8)), ops.bf16_pairs(_bits(words, 0)))
    low_values *= tl.reshape(low, (U, T, 4, 8, 4, 2, 1, 1, 1)).to(low_values.dtype)
    high_values *= tl.reshape(high, (U, T, 4, 8, 4, 2, 1, 1, 1)).to(low_values.dtype)
    v = tl.join(low_values, high_values)  # unit, tile, warp, r, q, group, part, a, b, half
    return tl.reshape(tl.permute(v, (1, 2, 9, 3, 0, 5, 6, 8, 4, 7)), (64 * T, 64 * U))


@triton.jit
def _bits(words, SHIFT: tl.constexpr):
    """The e2m1 codes that `SHIFT` brings to the top of both halves of `words`, as bits of bf16."""
    sign = (words << SHIFT) & -2147450880  # 0x80008000
    if SHIFT >= 6:
        return sign | ((words << (SHIFT - 6)) & 0x01C001C0)
    else:
        return sign | ((words >> (6 - SHIFT)) & 0x01C001C0)


# -- what the released model compiles -------------------------------------------------------------------------------


def _released(rows: int, *, gate_up: bool, routed: bool) -> ops.Build:
    shape = Shape(5120, 576, 384, 6, 1.5)
    size = block_rows(rows, shape) if routed else shared_rows(rows)
    cut = choose_cut(size, gate_up=gate_up, routed=routed)
    arguments = {"weights": "*u8", "x": "*bf16", "out": "*bf16", "rows": "i32"}
    if routed:
        arguments |= {"order": "*i32", "blocks": "*i32"}
    if routed and gate_up:
        arguments["route_weights"] = "*fp32"
    absent = dict.fromkeys({"order", "blocks", "route_weights"} - set(arguments))
    chosen = constants(shape, size, cut, gate_up=gate_up, routed=routed)
    return ops.Build(_product, arguments, {**chosen, **absent}, cut.warps, cut.stages)


KERNELS = [
    *(
        _released(rows, gate_up=gate_up, routed=routed)
        for rows in (6, 4096)
        for gate_up in (True, False)
        for routed in (True, False)
    ),
    ops.Build(
        _route,
        {"logits": "*fp32", "bias": "*fp32", "slots": "*i32", "chosen": "*i32", "weights": "*fp32", "rows": "i32"},
        {"EXPERTS": 384, "PADDED": 512, "TOP_K": 6, "SCALING": 1.5, "BLOCK": 4},
    ),
    ops.Build(
        _place,
        {"chosen": "*i32", "counts": "*i32", "order": "*i32", "blocks": "*i32", "visits": "i32", "num_blocks": "i32"},
        {"EXPERTS": 384, "PADDED": 512, "SIZE": 128, "CHUNK": 4096},
    ),
]
