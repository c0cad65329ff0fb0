"""Window entries and sparse attention in Triton: any number of rows, on NVIDIA and AMD (section 5 of `docs/model.md`).

Owns the rotation table, the order in which a chunk's window entries are made, attended to and stored, and the kernels.
The functions of `reference` that these replace: `entries` is the norm of the latent and `window_entry`; `attend` is the
rotation of `project_q`, `attend`, and the rotation back of `project_out`.

A forward may be longer than the window's ring. So its rows attend to the entries of this forward where these stand,
in `Entries`, and to the ring for what was there before; the ring is written afterwards, each place by one row.

Numerics of `attend`: entries are exact in bf16 (kept as 2^-64 of their values, which lets one product decode a code),
scores, softmax and sums are float32. Probabilities are rounded to bf16 against the maximum of the entries seen so far
instead of the row's. Either rounding moves a probability by at most 2^-9 of itself, so the result stays within
2^-8 (sum_j p_j |v_j|) / (sum_j p_j + sink) of the reference, before the two roundings of the output which both share.
A row's bits do not depend on the other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK
from flashstep.stages import triton_ops as ops
from flashstep.stages.attention.cuda import Block, Chosen
from flashstep.stages.triton_ops import decode_e4m3, dot, encode_e4m3, fp8_scale_code, round_bf16, to_bf16

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Of a program. On an H200, 4,096 rows x 16 heads x 640 entries: 32 entries and 4 warps 2.1 ms; 64 entries 1.9 ms, but
# registers spill; 8 warps 2.5 ms; loads of two tiles in flight (stages) 8% to 50% more.
HEADS, ENTRIES, WARPS = 16, 32, 4


# ---- rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Where the rows of a forward stand; the rows of a request are consecutive, at consecutive positions.

    positions, slots: [rows] i32; rows of a negative slot are inactive. first: [rows] i32, the first row of the row's
    request.
    """

    positions: Tensor
    slots: Tensor
    first: Tensor

    @classmethod
    def of(cls, positions: Tensor, slots: Tensor) -> Batch:
        """Find the first rows on the device; `positions` and `slots` are [rows] i32."""
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        follows = torch.zeros_like(slots, dtype=torch.bool)
        follows[1:] = (slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)
        first = torch.where(follows, 0, rows).cummax(0).values if len(rows) else rows
        return cls(positions, slots, first)

    def __len__(self) -> int:
        return len(self.slots)


def turns(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotations [rows, rope / 2, 2] f32 (cosine, sine) of `positions` [rows] by `frequencies` [rope / 2] f32.

    The angle is the float32 product, as in `ops.Rope.at`; its cosine and sine are rounded once. One table serves all
    layers of a class.
    """
    angles = (positions.float().unsqueeze(-1) * frequencies).double()
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


# ---- window entries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entries:
    """Window entries, one a row: codes [rows, head_dim] u8 (e4m3) and scales [rows, head_dim / 32] u8 (UE8M0)."""

    codes: Tensor
    scales: Tensor


def entries(latents: Tensor, norm: Tensor, turn: Tensor, *, eps: float) -> Entries:
    """Norm, rotate and encode `latents` [rows, head_dim] bf16, whose rows may stand apart.

    norm: [head_dim] bf16. turn: `turns` of the rows. Inactive rows give an entry that nobody reads.
    """
    rows, head_dim = latents.shape
    rope = 2 * turn.shape[1]
    if latents.stride(1) != 1 or len(turn) != rows or norm.shape != (head_dim,):
        raise ValueError(
            f"latents {tuple(latents.shape)} of strides {latents.stride()}, norm {tuple(norm.shape)}, turns of "
            f"{len(turn)} rows: expected contiguous columns, a norm of {head_dim} and {rows} rows"
        )
    codes = torch.empty(rows, head_dim, dtype=torch.uint8, device=latents.device)
    scales = torch.empty(rows, head_dim // FP8_BLOCK, dtype=torch.uint8, device=latents.device)
    if rows:
        _entries[(rows,)](
            latents, latents.stride(0), norm, turn, codes, scales, eps, HEAD_DIM=head_dim, ROPE=rope, num_warps=1
        )
    return Entries(codes, scales)


def write_window(new: Entries, batch: Batch, codes: Tensor, scales: Tensor) -> None:
    """Store entries at their positions of one layer's ring: `codes` [slots, ring, head_dim], `scales` [.., / 32].

    Rows of a negative slot write nothing; nor does a row whose place a later row of its request takes.
    """
    write_ring(new.codes, batch, codes)
    write_ring(new.scales, batch, scales)


def write_ring(values: Tensor, batch: Batch, ring: Tensor) -> None:
    """Store `values` [rows, width] at their positions of `ring` [slots, ring, ...], as `write_window` does."""
    rows, width = len(batch), ring[0, 0].numel()
    fits = values.dtype == ring.dtype and values.shape == (rows, width)
    if not (fits and values.stride(1) == 1 and ring.is_contiguous()):
        raise ValueError(
            f"values {tuple(values.shape)} {values.dtype} for {rows} rows of a ring {tuple(ring.shape)} {ring.dtype}: "
            f"expected [{rows}, {width}] of one dtype, contiguous columns and ring"
        )
    if rows:
        _write_ring[(rows,)](
            values,
            values.stride(0),
            batch.positions,
            batch.slots,
            ring,
            rows,
            ring.shape[1],
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=1,
        )


@triton.jit
def _entries(latents, stride, norm, turn, codes, scales, eps, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HEAD_DIM // 32)[:, None] * 16 + tl.arange(0, 16)[None, :]  # a scale serves 16 pairs
    at = latents + row * stride + 2 * pair
    even = tl.load(at).to(tl.float32)
    odd = tl.load(at + 1).to(tl.float32)
    mean = tl.sum(tl.sum(even * even + odd * odd, 1), 0) / HEAD_DIM
    inverse = 1.0 / tl.sqrt_rn(mean + eps)
    even = round_bf16(tl.load(norm + 2 * pair).to(tl.float32) * even * inverse)
    odd = round_bf16(tl.load(norm + 2 * pair + 1).to(tl.float32) * odd * inverse)
    cos, sin = load_turns(turn + row * ROPE, pair - (HEAD_DIM - ROPE) // 2)
    even, odd = rotate(even, odd, cos, sin)
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    exponent = fp8_scale_code(amax)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    even = encode_e4m3(even * shrink)
    odd = encode_e4m3(odd * shrink)
    to = codes + row * HEAD_DIM + 2 * pair
    tl.store(to, even.to(tl.uint8))
    tl.store(to + 1, odd.to(tl.uint8))
    tl.store(scales + row * (HEAD_DIM // 32) + tl.arange(0, HEAD_DIM // 32), exponent.to(tl.uint8))


@triton.jit
def _write_ring(values, stride, positions, slots, ring, rows, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    later = row + length  # the row that would take this place, if it is of the same request
    inside = later < rows
    taken = tl.load(slots + later, mask=inside, other=-1) == slot
    taken = taken & (tl.load(positions + later, mask=inside, other=-1) == position + length)
    column = tl.arange(0, PADDED)
    place = (slot * length + position % length).to(tl.int64)
    write = column < tl.where((slot < 0) | taken, 0, WIDTH)
    value = tl.load(values + row.to(tl.int64) * stride + column, mask=write, other=0)
    tl.store(ring + place * WIDTH + column, value, mask=write)


# ---- attention ----------------------------------------------------------------------------------------------------


def attend(
    q: Tensor,
    window_codes: Tensor,
    window_scales: Tensor,
    own: Entries,
    batch: Batch,
    *,
    turn: Tensor,
    sink: Tensor,
    window: int,
    chosen: Chosen | None = None,
    block: Block | None = None,
) -> Tensor:
    """Attention of every row over its window and its chosen entries, or over its window and its draft block.

    q: [rows, heads, head_dim] bf16, not rotated. window_codes, window_scales: this layer's ring, [slots, ring,
    head_dim] e4m3 and [slots, ring, head_dim / 32] UE8M0, as the forwards before left it. own: the rows' own entries.
    turn: `turns` of the rows. sink: [heads] f32. chosen: [rows, topk] entries, no more than (position + 1) // ratio of
    them are looked at. block: a draft's; its `codes` and `scales` are `own`, the ring holds all committed positions.
    Returns [rows, heads, head_dim] bf16, rotated back; zeros for inactive rows.
    """
    rows, heads, head_dim = q.shape
    _check(q, window_codes, window_scales, own, batch, turn, sink, chosen, block)
    out = torch.empty_like(q)
    if not rows:
        return out
    _attend[(rows, -(-heads // HEADS))](
        q.view(torch.int32),
        turn,
        batch.positions,
        batch.slots,
        batch.first,
        block.last if block else None,
        window_codes.view(torch.int32),
        window_scales,
        own.codes.view(torch.int32),
        own.scales,
        chosen.entries if chosen else None,
        chosen.codes.view(torch.int16) if chosen else None,
        chosen.scales if chosen else None,
        chosen.page_table if chosen else None,
        sink,
        out.view(torch.int32),
        heads,
        window_codes.shape[1],
        chosen.entries.shape[1] if chosen else 0,
        chosen.page_table.shape[1] if chosen else 0,
        **attend_constants(
            head_dim,
            2 * turn.shape[1],
            window,
            chosen.ratio if chosen else 0,
            chosen.codes.shape[1] if chosen else 1,
            block.size if block else 0,
        ),
        num_warps=WARPS,
    )
    return out


def attend_constants(
    head_dim: int, rope: int, window: int, ratio: int = 0, page: int = 1, block: int = 0
) -> dict[str, int | float]:
    """What the attention kernel is compiled with. ratio: 0, or of the chosen entries; page: entries of a page."""
    return {
        "HEAD_DIM": head_dim,
        "ROPE": rope,
        "WINDOW": window,
        "RATIO": ratio,
        "PAGE": page,
        "BLOCK": block,
        "SCALE": head_dim**-0.5 * math.log2(math.e) * 2.0**64,
        "HEADS": HEADS,
        "ENTRIES": ENTRIES,
    }


def _check(
    q: Tensor,
    window_codes: Tensor,
    window_scales: Tensor,
    own: Entries,
    batch: Batch,
    turn: Tensor,
    sink: Tensor,
    chosen: Chosen | None,
    block: Block | None,
) -> None:
    rows, heads, head_dim = q.shape
    if chosen is not None and block is not None:
        raise ValueError("draft rows attend to their window and block alone: give chosen entries or a block, not both")
    if head_dim % 64 or head_dim & (head_dim - 1):
        raise ValueError(f"heads of {head_dim}: a power of two, at least 64")
    expected: list[tuple[str, Tensor, tuple[int, ...]]] = [
        ("window_codes", window_codes, (*window_codes.shape[:2], head_dim)),
        ("window_scales", window_scales, (*window_codes.shape[:2], head_dim // FP8_BLOCK)),
        ("own.codes", own.codes, (rows, head_dim)),
        ("own.scales", own.scales, (rows, head_dim // FP8_BLOCK)),
        ("positions", batch.positions, (rows,)),
        ("turn", turn, (rows, turn.shape[1], 2)),
        ("sink", sink, (heads,)),
    ]
    if chosen is not None:
        pages, page = chosen.codes.shape[:2]
        expected += [
            ("chosen.entries", chosen.entries, (rows, chosen.entries.shape[1])),
            ("chosen.codes", chosen.codes, (pages, page, head_dim // 2)),
            ("chosen.scales", chosen.scales, (pages, page, head_dim // 16)),
        ]
    if block is not None:
        expected.append(("block.last", block.last, (rows,)))
    for name, tensor, shape in (("q", q, tuple(q.shape)), *expected):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: expected {shape}, contiguous")


@triton.jit
def _attend(
    q,
    turn,
    positions,
    slots,
    first,
    lasts,
    window_codes,
    window_scales,
    own_codes,
    own_scales,
    chosen,
    entry_codes,
    entry_scales,
    page_table,
    sinks,
    out,
    heads,
    ring,
    topk,
    pages_per_slot,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One row and 16 heads. Columns 4i + c, c = 0..3, of queries, entries and outputs are kept in tensors of their own:
    a word of codes then gives one value to each, without exchange between threads, and pairs turn element by element.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    QUARTER: tl.constexpr = HEAD_DIM // 4
    slot = tl.load(slots + row)
    position = tl.load(positions + row)

    # Queries, rotated.
    quad = tl.arange(0, QUARTER)
    here = (row.to(tl.int64) * heads + head)[:, None] * (HEAD_DIM // 2) + 2 * quad[None, :]
    exists = (head < heads)[:, None]
    low = tl.load(q + here, mask=exists, other=0)
    high = tl.load(q + here + 1, mask=exists, other=0)
    cos0, sin0 = load_turns(turn + row * ROPE, 2 * quad - (HEAD_DIM - ROPE) // 2)
    cos1, sin1 = load_turns(turn + row * ROPE, 2 * quad + 1 - (HEAD_DIM - ROPE) // 2)
    cos0, sin0, cos1, sin1 = cos0[None, :], sin0[None, :], cos1[None, :], sin1[None, :]
    q0, q1 = rotate(as_float(low << 16), as_float(low & -65536), cos0, sin0)
    q2, q3 = rotate(as_float(high << 16), as_float(high & -65536), cos1, sin1)

    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    o0 = tl.zeros([QUARTER, HEADS], tl.float32)
    o1 = tl.zeros([QUARTER, HEADS], tl.float32)
    o2 = tl.zeros([QUARTER, HEADS], tl.float32)
    o3 = tl.zeros([QUARTER, HEADS], tl.float32)

    # The window, in front of it the draft block: entries of this forward from `own`, others from the ring.
    n = tl.arange(0, ENTRIES)
    group = tl.arange(0, HEAD_DIM // 32)[None, :, None]
    word = group * 8 + tl.arange(0, 8)[None, None, :]
    last = position
    if BLOCK:
        last = tl.load(lasts + row)
    oldest = tl.maximum(last - (WINDOW - 1), 0)
    count = tl.where(slot < 0, 0, last - oldest + 1 + BLOCK)
    for start in tl.range(0, count, ENTRIES, num_stages=1):
        number = start + n
        at = oldest + number - BLOCK
        if BLOCK:
            is_own = number < BLOCK
            own_row = row // BLOCK * BLOCK + number
        else:
            own_row = row - (last - at)
            is_own = own_row >= tl.load(first + row)
        inside = number < count
        from_own = (inside & is_own)[:, None, None]
        from_ring = (inside & (is_own == 0))[:, None, None]
        own_row = own_row[:, None, None].to(tl.int64)
        place = (slot * ring + at % ring)[:, None, None].to(tl.int64)
        codes = tl.load(window_codes + place * QUARTER + word, mask=from_ring, other=0)
        codes |= tl.load(own_codes + own_row * QUARTER + word, mask=from_own, other=0)
        scale = tl.load(window_scales + place * (HEAD_DIM // 32) + group, mask=from_ring, other=0)
        scale |= tl.load(own_scales + own_row * (HEAD_DIM // 32) + group, mask=from_own, other=0)
        scale = as_float((tl.minimum(scale.to(tl.int32), 198) + 56) << 23)
        scale = tl.where(inside[:, None, None], scale, 0.0)
        highest, total, o0, o1, o2, o3 = _tile(
            q0,
            q1,
            q2,
            q3,
            _expand_fp8(codes << 24, scale, ENTRIES, QUARTER),
            _expand_fp8(codes << 16, scale, ENTRIES, QUARTER),
            _expand_fp8(codes << 8, scale, ENTRIES, QUARTER),
            _expand_fp8(codes, scale, ENTRIES, QUARTER),
            inside,
            highest,
            total,
            o0,
            o1,
            o2,
            o3,
            SCALE,
        )

    if RATIO:
        group = tl.arange(0, HEAD_DIM // 16)[None, :, None]
        word = group * 4 + tl.arange(0, 4)[None, None, :]
        count = tl.where(slot < 0, 0, tl.minimum(topk, (position + 1) // RATIO))
        for start in tl.range(0, count, ENTRIES, num_stages=1):
            inside = start + n < count
            entry = tl.load(chosen + row.to(tl.int64) * topk + start + n, mask=inside, other=-1)
            valid = entry >= 0
            page = tl.load(page_table + slot * pages_per_slot + entry // PAGE, mask=valid, other=0)
            place = (page.to(tl.int64) * PAGE + entry % PAGE)[:, None, None]
            codes = tl.load(entry_codes + place * QUARTER + word, mask=valid[:, None, None], other=0).to(tl.int32)
            scale = tl.load(entry_scales + place * (HEAD_DIM // 16) + group, mask=valid[:, None, None], other=0)
            scale = decode_e4m3(scale.to(tl.int32)) * 4611686018427387904.0  # 2^62
            # A mask that is not read from memory keeps the compiler from decoding the codes once for each product.
            scale = tl.where(inside[:, None, None], scale, 0.0)
            highest, total, o0, o1, o2, o3 = _tile(
                q0,
                q1,
                q2,
                q3,
                _expand_fp4(codes << 28, scale, ENTRIES, QUARTER),
                _expand_fp4(codes << 24, scale, ENTRIES, QUARTER),
                _expand_fp4(codes << 20, scale, ENTRIES, QUARTER),
                _expand_fp4(codes << 16, scale, ENTRIES, QUARTER),
                valid,
                highest,
                total,
                o0,
                o1,
                o2,
                o3,
                SCALE,
            )

    # The sink joins the sum; 2^64 gives the entries their size back.
    sink = tl.load(sinks + head, mask=head < heads, other=0.0) * 1.4426950408889634
    total += tl.exp2(sink - tl.where(highest == float("-inf"), 0.0, highest))
    factor = tl.where(highest == float("-inf"), 0.0, 18446744073709551616.0 / total)[None, :]
    o0 = tl.trans(to_bf16(o0 * factor)).to(tl.float32)
    o1 = tl.trans(to_bf16(o1 * factor)).to(tl.float32)
    o2 = tl.trans(to_bf16(o2 * factor)).to(tl.float32)
    o3 = tl.trans(to_bf16(o3 * factor)).to(tl.float32)
    o0, o1 = rotate(o0, o1, cos0, -sin0)
    o2, o3 = rotate(o2, o3, cos1, -sin1)
    tl.store(out + here, _pack(o0, o1), mask=exists)
    tl.store(out + here + 1, _pack(o2, o3), mask=exists)


@triton.jit
def _tile(q0, q1, q2, q3, k0, k1, k2, k3, valid, highest, total, o0, o1, o2, o3, SCALE: tl.constexpr):
    """Softmax over a tile of entries k [entries, columns], in base 2, joined to what came before."""
    s = dot(k0, tl.trans(q0), tl.zeros([k0.shape[0], q0.shape[0]], tl.float32))
    s = dot(k1, tl.trans(q1), s)
    s = dot(k2, tl.trans(q2), s)
    s = dot(k3, tl.trans(q3), s)
    s = tl.where(valid[:, None], s * SCALE, float("-inf"))
    before, highest = highest, tl.maximum(highest, tl.max(s, 0))
    against = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(s - against[None, :])
    shrink = tl.exp2(before - against)
    total = total * shrink + tl.sum(p, 0)
    p = to_bf16(p)
    o0 = dot(tl.trans(k0), p, o0 * shrink[None, :])
    o1 = dot(tl.trans(k1), p, o1 * shrink[None, :])
    o2 = dot(tl.trans(k2), p, o2 * shrink[None, :])
    o3 = dot(tl.trans(k3), p, o3 * shrink[None, :])
    return highest, total, o0, o1, o2, o3


@triton.jit
def _expand_fp8(bits, scale, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr):
    """The e4m3 codes in the top bytes of `bits` as bf16: their bits are 2^-120 of their values in float32."""
    value = as_float((bits >> 4) & -0x78100000) * scale
    return tl.reshape(value.to(tl.bfloat16), [ENTRIES, COLUMNS])


@triton.jit
def _expand_fp4(bits, scale, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr):
    """The e2m1 codes in the top 4 bits of `bits` as bf16: their bits are 2^-126 of their values in float32."""
    value = as_float((bits >> 6) & -0x7E400000) * scale
    return tl.reshape(value.to(tl.bfloat16), [ENTRIES, COLUMNS])


@triton.jit
def _pack(even, odd):
    """Two bf16 in a word, `even` low."""
    low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)


# ---- shared by the kernels of attention and indexer ---------------------------------------------------------------


@triton.jit
def as_float(bits):
    """float32 of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_turns(turn, pair):
    """Cosine and sine of pairs `pair` of a row's table; pairs below 0 stay."""
    cos = tl.load(turn + 2 * pair, mask=pair >= 0, other=1.0)
    sin = tl.load(turn + 2 * pair + 1, mask=pair >= 0, other=0.0)
    return cos, sin


@triton.jit
def rotate(even, odd, cos, sin):
    """Pairs of float32 turned, rounded to bf16."""
    return to_bf16(even * cos - odd * sin), to_bf16(even * sin + odd * cos)


# ---- what the released model compiles -----------------------------------------------------------------------------

_ROWS = {"positions": "*i32", "slots": "*i32"}


def _released(**constants: int) -> ops.Build:
    """`_attend` of a rank of four."""
    names = ["q", "turn", "first", "window_codes", "window_scales", "own_codes", "own_scales", "sinks", "out"]
    if constants.get("ratio"):
        names += ["chosen", "entry_codes", "entry_scales", "page_table"]
    if constants.get("block"):
        names += ["lasts"]
    types = {"turn": "*fp32", "sinks": "*fp32", "entry_codes": "*i16"}
    pointers = {name: types.get(name, "*u8" if name.endswith("scales") else "*i32") for name in names}
    missing = {"chosen", "entry_codes", "entry_scales", "page_table", "lasts"} - pointers.keys()
    numbers = {"heads": "i32:16", "ring": "i32", "topk": "i32:16", "pages_per_slot": "i32:16"}
    return ops.Build(
        _attend,
        {**_ROWS, **pointers, **numbers},
        {**attend_constants(512, 64, 128, **constants), **dict.fromkeys(missing)},
        WARPS,
    )


KERNELS = [
    ops.Build(
        _entries,
        {
            "latents": "*bf16",
            "norm": "*bf16",
            "turn": "*fp32",
            "codes": "*u8",
            "scales": "*u8",
            "stride": "i32:16",
            "eps": "fp32",
        },
        {"HEAD_DIM": 512, "ROPE": 64},
        1,
    ),
    *(
        ops.Build(
            _write_ring,
            {**_ROWS, "values": kind, "ring": kind, "stride": "i32:16", "rows": "i32", "length": "i32"},
            {"WIDTH": width, "PADDED": width},
            1,
        )
        for kind, width in (("*u8", 512), ("*u8", 16), ("*fp32", 512), ("*fp32", 1024))
    ),
    _released(ratio=1, page=128),
    _released(ratio=2, page=64),
    _released(),
    _released(block=5),
]
