"""Compressor and two-level indexer in Triton: any number of rows, NVIDIA and AMD (sections 6, 7 of `docs/model.md`).

Owns the order of a choice and the memory that it takes. `compress` writes entries and index keys; `queries` makes the
index queries of a layer; `choose` scores, marks candidate blocks and keeps the best. Scores of all rows at once would
take gigabytes, so rows are cut into parts whose scores fit a budget; how many follows from the longest context, which
the host knows, and nothing waits for the device.

Numerics: index queries and keys are exact in bf16, dot products and the weighted sum over heads are float32 in a fixed
order, which depends on neither the other rows nor the cut. The scale of the head weights is left out, since it cannot
change an order. So a choice differs from the reference's only among scores that lie within the rounding of a float32
sum of `index_n_heads` terms of the kth best; values whose sums float32 holds give the reference's choice exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK, KV_GROUP, ModelConfig
from flashstep.stages import triton_ops as ops
from flashstep.stages.attention.portable import Batch, as_float, load_turns, rotate, turns, write_ring
from flashstep.stages.indexer.cuda import Cache
from flashstep.stages.triton_ops import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    dot,
    encode_e2m1,
    encode_e4m3,
    round_bf16,
    to_bf16,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip

SCORE_BYTES = 256 * 2**20  # of the scores that exist at a time

_PRODUCTS = ("raw", "query", "weights")  # what dense products give: columns of wider rows
_VISIBLE, _BLOCKS, _CANDIDATES = 0, 1, 2  # what a row's scores belong to: `_count`


# ---- compressor ---------------------------------------------------------------------------------------------------


def compress(
    config: ModelConfig,
    source: int,
    *,
    batch: Batch,
    raw: Tensor,
    ring: Tensor,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    cache: Cache,
) -> None:
    """Write the entry and index key of every group that a row closes, then the raw ring.

    In `reference.py`: the rounding of `project_raw`, `pool`, `kv_entry` and `index_key`.

    source: the KV source's layer number. raw: [rows, parts * head_dim] f32, k and z, or (ratio 1) the latent, which is
    rounded to bf16 here. ring: f32 [slots, ring, parts, head_dim], at p % ring; a group's earlier positions come from
    the rows of this forward where they are in it, else from here. norm, k_norm: bf16. wk: [index_head_dim, head_dim]
    bf16. frequencies: [rope / 2] f32 of the compressed layers. Inactive rows write nothing.
    """
    ratio, rows = config.compress_ratios[source], len(batch)
    parts = 1 if ratio == 1 else 2
    dim, index_dim, page = config.head_dim, config.index_head_dim, cache.entries_per_page
    _check(
        ("raw", raw, (rows, parts * dim)),
        ("ring", ring, (*ring.shape[:2], parts, dim)),
        ("norm", norm, (dim,)),
        ("wk", wk, (index_dim, dim)),
        ("k_norm", k_norm, (index_dim,)),
        ("frequencies", frequencies, (config.qk_rope_head_dim // 2,)),
        ("kv_codes", cache.kv_codes, (len(cache.kv_codes), page, dim // 2)),
        ("kv_scales", cache.kv_scales, (len(cache.kv_codes), page, dim // KV_GROUP)),
        ("key_codes", cache.key_codes, (len(cache.kv_codes), page, index_dim // 2)),
        ("key_scales", cache.key_scales, (len(cache.kv_codes), page, index_dim // FP8_BLOCK)),
    )
    if not rows:
        return
    if ratio == 1:
        raw = raw.bfloat16().float()
    _compress[(triton.cdiv(rows, 16),)](
        batch.positions,
        batch.slots,
        batch.first,
        rows,
        raw,
        raw.stride(0),
        ring,
        ring.shape[1],
        norm,
        wk,
        k_norm,
        turns(batch.positions - (ratio - 1), frequencies),
        cache.page_table,
        cache.page_table.shape[1],
        cache.kv_codes,
        cache.kv_scales,
        cache.key_codes,
        cache.key_scales,
        config.rms_norm_eps,
        RATIO=ratio,
        PARTS=parts,
        HEAD_DIM=dim,
        INDEX_DIM=index_dim,
        ROPE=config.qk_rope_head_dim,
        PAGE=page,
        ROWS=16,
        COLUMNS=min(dim, 128),
        num_warps=4,
    )
    write_ring(raw, batch, ring)


@triton.jit
def _compress(
    positions,
    slots,
    first,
    rows,
    raw,
    stride,
    ring,
    length,
    norm,
    wk,
    k_norm,
    turn,
    page_table,
    pages_per_slot,
    kv_codes,
    kv_scales,
    key_codes,
    key_scales,
    eps,
    RATIO: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS rows; even and odd columns are kept apart, so that pairs turn and codes pack element by element."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    position = tl.load(positions + row, mask=row < rows, other=0)
    start = tl.load(first + row, mask=row < rows, other=0)
    closes = (slot >= 0) & ((position + 1) % RATIO == 0)
    entry = position // RATIO
    page = tl.load(page_table + slot * pages_per_slot + entry // PAGE, mask=closes, other=0)
    place = page.to(tl.int64) * PAGE + entry % PAGE

    pair = tl.arange(0, COLUMNS // 16)[:, None] * 8 + tl.arange(0, 8)[None, :]  # a scale serves 8 pairs
    squares = tl.zeros([ROWS], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, COLUMNS):
        at = column + 2 * pair
        even = _pool(raw, stride, ring, length, row, slot, position, start, closes, at, RATIO, PARTS, HEAD_DIM)
        odd = _pool(raw, stride, ring, length, row, slot, position, start, closes, at + 1, RATIO, PARTS, HEAD_DIM)
        squares += tl.sum(tl.sum(even * even + odd * odd, 2), 1)
    inverse = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None, None]

    output = tl.arange(0, INDEX_DIM // 2)
    key_even = tl.zeros([ROWS, INDEX_DIM // 2], tl.float32)
    key_odd = tl.zeros([ROWS, INDEX_DIM // 2], tl.float32)
    for column in tl.static_range(0, HEAD_DIM, COLUMNS):
        at = column + 2 * pair
        even = _pool(raw, stride, ring, length, row, slot, position, start, closes, at, RATIO, PARTS, HEAD_DIM)
        odd = _pool(raw, stride, ring, length, row, slot, position, start, closes, at + 1, RATIO, PARTS, HEAD_DIM)
        even = to_bf16(tl.load(norm + at).to(tl.float32)[None, :, :] * even * inverse)
        odd = to_bf16(tl.load(norm + at + 1).to(tl.float32)[None, :, :] * odd * inverse)

        # The index key is made of the latent before it turns.
        flat_even = tl.reshape(even, [ROWS, COLUMNS // 2])
        flat_odd = tl.reshape(odd, [ROWS, COLUMNS // 2])
        weight = wk + 2 * output[None, :] * HEAD_DIM + column + 2 * tl.arange(0, COLUMNS // 2)[:, None]
        key_even = dot(flat_even, tl.load(weight), key_even)
        key_even = dot(flat_odd, tl.load(weight + 1), key_even)
        key_odd = dot(flat_even, tl.load(weight + HEAD_DIM), key_odd)
        key_odd = dot(flat_odd, tl.load(weight + HEAD_DIM + 1), key_odd)

        turning = (column + 2 * pair - (HEAD_DIM - ROPE)) // 2
        table = turn + (row * ROPE)[:, None, None]
        cos, sin = load_row_turns(table, turning[None, :, :], (row < rows)[:, None, None])
        even, odd = rotate(even.to(tl.float32), odd.to(tl.float32), cos, sin)
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
        amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2)
        scale = encode_e4m3(tl.minimum(tl.div_rn(tl.maximum(amax, 6 * 2.0**-9), 6.0), 448.0)).to(tl.int32)
        # Thresholds are compared with `x / scale`; a product of so few bits is exact, so x / scale and its float32
        # quotient lie on the same side of each.
        size = decode_e4m3(scale)[:, :, None]
        codes = encode_e2m1(tl.div_rn(even, size)) | (encode_e2m1(tl.div_rn(odd, size)) << 4)
        to = (place * (HEAD_DIM // 2))[:, None, None] + column // 2 + pair[None, :, :]
        tl.store(kv_codes + to, codes.to(tl.uint8), mask=closes[:, None, None])
        to = (place * (HEAD_DIM // 16))[:, None] + column // 16 + tl.arange(0, COLUMNS // 16)[None, :]
        tl.store(kv_scales + to, scale.to(tl.uint8), mask=closes[:, None])

    key_even = round_bf16(key_even)
    key_odd = round_bf16(key_odd)
    squares = tl.sum(key_even * key_even + key_odd * key_odd, 1)
    inverse = (1.0 / tl.sqrt_rn(squares / INDEX_DIM + eps))[:, None]
    key_even = to_bf16(tl.load(k_norm + 2 * output).to(tl.float32)[None, :] * key_even * inverse)
    key_odd = to_bf16(tl.load(k_norm + 2 * output + 1).to(tl.float32)[None, :] * key_odd * inverse)
    turning = output - (INDEX_DIM - ROPE) // 2
    cos, sin = load_row_turns(turn + (row * ROPE)[:, None], turning[None, :], (row < rows)[:, None])
    even, odd = rotate(key_even.to(tl.float32), key_odd.to(tl.float32), cos, sin)
    even = tl.reshape(even.to(tl.float32), [ROWS, INDEX_DIM // 32, 16])
    odd = tl.reshape(odd.to(tl.float32), [ROWS, INDEX_DIM // 32, 16])
    exponent, shrink = _index_scale(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2))
    codes = encode_e2m1(even * shrink[:, :, None]) | (encode_e2m1(odd * shrink[:, :, None]) << 4)
    group = tl.arange(0, INDEX_DIM // 32)
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    to = (place * (INDEX_DIM // 2))[:, None, None] + byte[None, :, :]
    tl.store(key_codes + to, codes.to(tl.uint8), mask=closes[:, None, None])
    to = (place * (INDEX_DIM // 32))[:, None] + group[None, :]
    tl.store(key_scales + to, exponent.to(tl.uint8), mask=closes[:, None])


@triton.jit
def _pool(
    raw,
    stride,
    ring,
    length,
    row,
    slot,
    position,
    start,
    closes,
    column,
    RATIO: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Columns `column` of the latents that the rows close, before their norm: per channel, a softmax over tokens."""
    if RATIO == 1:
        pooled = _raw(raw, stride, ring, length, row, slot, position, start, closes, column, 0, 0, PARTS, HEAD_DIM)
    else:
        highest = _raw(raw, stride, ring, length, row, slot, position, start, closes, column, 0, 1, PARTS, HEAD_DIM)
        for back in tl.static_range(1, RATIO):
            z = _raw(raw, stride, ring, length, row, slot, position, start, closes, column, back, 1, PARTS, HEAD_DIM)
            highest = tl.maximum(highest, z)
        weights = tl.zeros_like(highest)
        values = tl.zeros_like(highest)
        for back in tl.static_range(RATIO):
            k = _raw(raw, stride, ring, length, row, slot, position, start, closes, column, back, 0, PARTS, HEAD_DIM)
            z = _raw(raw, stride, ring, length, row, slot, position, start, closes, column, back, 1, PARTS, HEAD_DIM)
            weight = tl.exp(z - highest)
            weights += weight
            values += k * weight
        pooled = round_bf16(tl.div_rn(values, weights))
    return pooled


@triton.jit
def _raw(
    raw,
    stride,
    ring,
    length,
    row,
    slot,
    position,
    start,
    closes,
    column,
    back: tl.constexpr,
    part: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[rows, ...] of what the position `back` before each row gave: from this forward's rows, or from the ring."""
    here = row - back >= start
    at = (row - back).to(tl.int64) * stride + part * HEAD_DIM
    value = tl.load(raw + at[:, None, None] + column[None, :, :], mask=(closes & here)[:, None, None], other=0.0)
    if back > 0:
        at = ((slot * length + (position - back) % length).to(tl.int64) * PARTS + part) * HEAD_DIM
        earlier = (closes & (here == 0))[:, None, None]
        value += tl.load(ring + at[:, None, None] + column[None, :, :], mask=earlier, other=0.0)
    return value


# ---- index queries ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queries:
    """Index queries as the score kernels read them.

    values: [rows, padded heads, index_head_dim] bf16, rotated and quantized, the even columns first. weights: [rows,
    padded heads] f32, of bf16 values. Heads are padded to a power of two with zeros.
    """

    values: Tensor
    weights: Tensor


def queries(config: ModelConfig, query: Tensor, weights: Tensor, turn: Tensor) -> Queries:
    """Rotate and quantize `query` [rows, index_heads * index_head_dim] bf16, and round `weights` [rows, index_heads].

    turn: `turns` of the rows, for the compressed layers. weights: `weights_proj x` in f32, rounded to bf16 here.
    """
    heads, dim = config.index_n_heads, config.index_head_dim
    rows, padded = len(query), triton.next_power_of_2(heads)
    _check(
        ("query", query, (rows, heads * dim)),
        ("weights", weights, (rows, heads)),
        ("turn", turn, (rows, config.qk_rope_head_dim // 2, 2)),
    )
    values = torch.empty(rows, padded, dim, dtype=torch.bfloat16, device=query.device)
    rounded = torch.empty(rows, padded, dtype=torch.float32, device=query.device)
    if rows:
        _queries[(rows,)](
            query,
            query.stride(0),
            weights,
            weights.stride(0),
            turn,
            values,
            rounded,
            HEADS=heads,
            PADDED=padded,
            DIM=dim,
            ROPE=config.qk_rope_head_dim,
            num_warps=4,
        )
    return Queries(values, rounded)


@triton.jit
def _queries(
    query,
    query_stride,
    weights,
    weights_stride,
    turn,
    values,
    rounded,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED)
    pair = tl.arange(0, DIM // 32)[:, None] * 16 + tl.arange(0, 16)[None, :]  # a scale serves 16 pairs
    at = query + row * query_stride + head[:, None, None] * DIM + 2 * pair[None, :, :]
    exists = (head < HEADS)[:, None, None]
    even = tl.load(at, mask=exists, other=0).to(tl.float32)
    odd = tl.load(at + 1, mask=exists, other=0).to(tl.float32)
    cos, sin = load_turns(turn + row * ROPE, pair - (DIM - ROPE) // 2)
    even, odd = rotate(even, odd, cos[None, :, :], sin[None, :, :])
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    exponent, shrink = _index_scale(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2))
    scale = decode_ue8m0(exponent)[:, :, None]
    to = values + (row * PADDED + head)[:, None, None] * DIM + pair[None, :, :]
    tl.store(to, (decode_e2m1(encode_e2m1(even * shrink[:, :, None])) * scale).to(tl.bfloat16))
    tl.store(to + DIM // 2, (decode_e2m1(encode_e2m1(odd * shrink[:, :, None])) * scale).to(tl.bfloat16))
    weight = tl.load(weights + row * weights_stride + head, mask=head < HEADS, other=0.0)
    tl.store(rounded + row * PADDED + head, round_bf16(weight))


# ---- choice -------------------------------------------------------------------------------------------------------


def choose(
    config: ModelConfig,
    layer: int,
    *,
    batch: Batch,
    query: Queries,
    cache: Cache,
    longest: int,
    candidates: Tensor | None = None,
    score_bytes: int = SCORE_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """The choice of index source `layer`: `reference.score`, `choose` and `candidates`.

    cache: of the layer's KV source, with what `compress` wrote of these rows. longest: tokens of the longest context
    in the batch, 1 + its last position, or more. candidates: [rows, candidate_topk_blocks] i32 as the candidate source
    returned it, for the index sources above it.

    Returns the entries [rows, index_topk] i32, ascending, -1 pads (all -1 where the slot is negative), and the
    candidates for the layers above.
    """
    source = config.kv_source(layer)
    assert source is not None
    ratio, size, rows = config.compress_ratios[source], config.candidate_block_size, len(batch)
    is_source = layer == config.candidate_source_layer_id
    if config.uses_candidates(layer) and candidates is None:
        raise ValueError(f"index source {layer} chooses inside the blocks of layer {config.candidate_source_layer_id}")
    span = max(1, longest // ratio)
    # With so few entries every block is a candidate.
    gathers = config.uses_candidates(layer) and span > config.candidate_topk_blocks * size
    if gathers:
        span = config.candidate_topk_blocks * size
    shape = _Shape.of(batch.slots.device)
    stride = triton.cdiv(span, shape.entries) * shape.entries
    part = min(rows, max(1, score_bytes // (stride * 4)))
    device = batch.slots.device
    chosen = torch.empty(rows, config.index_topk, dtype=torch.int32, device=device)
    if is_source:
        candidates = torch.empty(rows, config.candidate_topk_blocks, dtype=torch.int32, device=device)
    scores = torch.empty(part, stride, device=device)
    blocks = torch.empty(part, triton.cdiv(span, size), device=device) if is_source else None
    for begin in range(0, rows, max(part, 1)):
        cut = slice(begin, begin + part)
        piece = _Piece(
            config,
            ratio,
            batch.positions[cut],
            batch.slots[cut],
            query.values[cut],
            query.weights[cut],
            cache,
            candidates[cut] if candidates is not None else None,
            shape,
        )
        if gathers:
            piece.score_candidates(scores, span)
        else:
            piece.score(scores, span)
        if blocks is not None:
            piece.mark(scores, blocks)
        piece.select(scores, chosen[cut], config.index_topk, _CANDIDATES if gathers else _VISIBLE)
    return chosen, candidates


@dataclass(frozen=True)
class _Shape:
    """How the kernels of a choice are cut; results do not depend on it.

    entries, product_rows: of a product of the scores. rows: that share the keys of a program. span: candidate entries
    of a program. tile: scores that a selection reads at a time. All programs have `warps`.

    On an H200, 4,096 rows against 32K entries: 2 rows a product with 4 warps 315 TFLOP/s, 4 rows with 8 warps 193;
    selection with tiles of 1,024 scores 0.82 ms, of 4,096 (8 warps) 1.7 ms.
    """

    entries: int = 128
    product_rows: int = 2
    rows: int = 32
    span: int = 2048
    tile: int = 1024
    warps: int = 4

    @classmethod
    def of(cls, device: torch.device) -> _Shape:
        if device.type == "cpu":
            return cls(64, 2, 8, 128, 128, 1)
        return cls()


@dataclass(frozen=True)
class _Piece:
    """Rows of a choice whose scores exist together."""

    config: ModelConfig
    ratio: int
    positions: Tensor
    slots: Tensor
    query: Tensor
    weights: Tensor
    cache: Cache
    candidates: Tensor | None
    shape: _Shape

    def score(self, scores: Tensor, span: int) -> None:
        """Scores of all visible entries: `scores` [rows, entries], not written beyond the visible ones' tiles."""
        rows, shape = len(self.slots), self.shape
        grid = (triton.cdiv(span, shape.entries), triton.cdiv(rows, shape.rows))
        _score[grid](
            self.positions,
            self.slots,
            rows,
            self.query,
            self.weights,
            *self._keys(),
            scores,
            scores.stride(0),
            **self._dims(),
            ENTRIES=shape.entries,
            PRODUCT_ROWS=shape.product_rows,
            ROWS=shape.rows,
            num_warps=shape.warps,
        )

    def score_candidates(self, scores: Tensor, span: int) -> None:
        """Scores of the entries in the rows' candidate blocks, in their order; minus infinity where not visible."""
        assert self.candidates is not None
        rows, shape = len(self.slots), self.shape
        _score_candidates[(rows, triton.cdiv(span, shape.span))](
            self.positions,
            self.slots,
            self.query,
            self.weights,
            *self._keys(),
            self.candidates,
            scores,
            scores.stride(0),
            **self._dims(),
            CANDIDATES=self.config.candidate_topk_blocks,
            SIZE=self.config.candidate_block_size,
            ENTRIES=shape.entries,
            SPAN=shape.span,
            num_warps=shape.warps,
        )

    def mark(self, scores: Tensor, blocks: Tensor) -> None:
        """Fill `candidates` with the best blocks; `blocks` [rows, blocks] holds the blocks' scores meanwhile."""
        assert self.candidates is not None
        tile = self.shape.tile // self.config.candidate_block_size
        _best_of_blocks[(len(self.slots), triton.cdiv(blocks.shape[1], tile))](
            self.positions,
            self.slots,
            scores,
            scores.stride(0),
            blocks,
            blocks.stride(0),
            RATIO=self.ratio,
            SIZE=self.config.candidate_block_size,
            BLOCKS=tile,
            num_warps=self.shape.warps,
        )
        self.select(blocks, self.candidates, self.config.candidate_topk_blocks, _BLOCKS)

    def select(self, scores: Tensor, best: Tensor, k: int, kind: int) -> None:
        """The `k` best of each row of `scores`, as `best` [rows, k], ascending, -1 pads."""
        _select[(len(self.slots),)](
            self.positions,
            self.slots,
            scores,
            scores.stride(0),
            self.candidates if kind == _CANDIDATES else None,
            best,
            k,
            KIND=kind,
            RATIO=self.ratio,
            SIZE=self.config.candidate_block_size,
            CANDIDATES=self.config.candidate_topk_blocks,
            PADDED=triton.next_power_of_2(k),
            TILE=self.shape.tile,
            num_warps=self.shape.warps,
        )

    def _keys(self) -> tuple[Tensor, Tensor, Tensor, int]:
        cache = self.cache
        return cache.key_codes, cache.key_scales, cache.page_table, cache.page_table.shape[1]

    def _dims(self) -> dict[str, int]:
        return {
            "RATIO": self.ratio,
            "HEADS": self.query.shape[1],
            "DIM": self.query.shape[2],
            "PAGE": self.cache.entries_per_page,
        }


@triton.jit
def _score(
    positions,
    slots,
    rows,
    query,
    weights,
    key_codes,
    key_scales,
    page_table,
    pages_per_slot,
    scores,
    stride,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRODUCT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile of entries against ROWS rows: the keys of each request among them are decoded once."""
    begin = tl.program_id(1) * ROWS
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = begin + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    visible = _visible(tl.load(positions + row, mask=row < rows, other=0), slot, RATIO)
    for number in range(begin, tl.minimum(begin + ROWS, rows)):
        current = tl.load(slots + number)
        is_new = number == begin
        if number > begin:
            is_new = tl.load(slots + number - 1) != current
        count = tl.max(tl.where((slot == current) & (row >= number), visible, 0), 0)
        if is_new & (count > tl.program_id(0) * ENTRIES):
            even, odd = _load_keys(
                entry, entry < count, current, key_codes, key_scales, page_table, pages_per_slot, DIM, PAGE, ENTRIES
            )
            for product in range((number - begin) // PRODUCT_ROWS * PRODUCT_ROWS + begin, begin + ROWS, PRODUCT_ROWS):
                mine = product + tl.arange(0, PRODUCT_ROWS)
                mine_slot = tl.load(slots + mine, mask=mine < rows, other=-1)
                found = (mine_slot == current) & (mine >= number)
                if tl.max(found.to(tl.int32), 0) > 0:
                    head = product * HEADS + tl.arange(0, PRODUCT_ROWS * HEADS)
                    exists = head < rows * HEADS
                    at = query + head[:, None].to(tl.int64) * DIM + tl.arange(0, DIM // 2)[None, :]
                    q_even = tl.load(at, mask=exists[:, None], other=0)
                    q_odd = tl.load(at + DIM // 2, mask=exists[:, None], other=0)
                    dots = dot(even, tl.trans(q_even), tl.zeros([ENTRIES, PRODUCT_ROWS * HEADS], tl.float32))
                    dots = dot(odd, tl.trans(q_odd), dots)
                    weight = tl.load(weights + head, mask=exists, other=0.0)
                    dots = tl.maximum(dots, 0.0) * weight[None, :]
                    sums = tl.sum(tl.reshape(dots, [ENTRIES, PRODUCT_ROWS, HEADS]), 2)
                    to = scores + mine[None, :].to(tl.int64) * stride + entry[:, None]
                    tl.store(to, sums * 18446744073709551616.0, mask=found[None, :])


@triton.jit
def _score_candidates(
    positions,
    slots,
    query,
    weights,
    key_codes,
    key_scales,
    page_table,
    pages_per_slot,
    candidates,
    scores,
    stride,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """A row and SPAN of the entries in its candidate blocks."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    visible = _visible(tl.load(positions + row), slot, RATIO)
    count = tl.minimum((visible + SIZE - 1) // SIZE, CANDIDATES) * SIZE
    head = row.to(tl.int64) * HEADS + tl.arange(0, HEADS)
    at = query + head[:, None] * DIM + tl.arange(0, DIM // 2)[None, :]
    q_even = tl.trans(tl.load(at))
    q_odd = tl.trans(tl.load(at + DIM // 2))
    weight = tl.load(weights + head)
    begin = tl.program_id(1) * SPAN
    for start in range(begin, tl.minimum(begin + SPAN, count), ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        block = tl.load(candidates + row.to(tl.int64) * CANDIDATES + number // SIZE, mask=number < count, other=-1)
        entry = block * SIZE + number % SIZE
        valid = (block >= 0) & (entry < visible)
        even, odd = _load_keys(
            entry, valid, slot, key_codes, key_scales, page_table, pages_per_slot, DIM, PAGE, ENTRIES
        )
        dots = dot(even, q_even, tl.zeros([ENTRIES, HEADS], tl.float32))
        dots = dot(odd, q_odd, dots)
        sums = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], 1)
        sums = tl.where(valid, sums * 18446744073709551616.0, float("-inf"))
        tl.store(scores + row.to(tl.int64) * stride + number, sums, mask=number < count)


@triton.jit
def _best_of_blocks(
    positions,
    slots,
    scores,
    stride,
    blocks,
    block_stride,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Each block scores its best visible entry; infinity for the block of the newest one."""
    row = tl.program_id(0)
    visible = _visible(tl.load(positions + row), tl.load(slots + row), RATIO)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    entry = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(scores + row.to(tl.int64) * stride + entry, mask=entry < visible, other=float("-inf"))
    best = tl.where(block == (visible - 1) // SIZE, float("inf"), tl.max(value, 1))
    tl.store(blocks + row.to(tl.int64) * block_stride + block, best, mask=block * SIZE < visible)


@triton.jit
def _select(
    positions,
    slots,
    scores,
    stride,
    candidates,
    best,
    k,
    KIND: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The k best scores of a row, -inf being none; of equal ones the first.

    The kth best is found by cutting an interval of float32 values, as ordered integers, into four until no value lies
    between its ends: `low` has at least k scores that are not below it, `high` fewer, namely `above`.
    """
    row = tl.program_id(0)
    visible = _visible(tl.load(positions + row), tl.load(slots + row), RATIO)
    count = visible
    if KIND == 1:
        count = (visible + SIZE - 1) // SIZE
    if KIND == 2:
        count = tl.minimum((visible + SIZE - 1) // SIZE, CANDIDATES) * SIZE
    at = scores + row.to(tl.int64) * stride
    n = tl.arange(0, TILE)

    found = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        x = tl.load(at + start + n, mask=start + n < count, other=float("-inf"))
        found += (x > float("-inf")).to(tl.int32)
    reached = tl.sum(found, 0)  # scores not below `low`
    above = reached * 0
    low = reached.to(tl.int64) * 0 - 0x7F800000  # the lowest finite value: minus infinity is -0x7F800001
    high = low * 0 + 0x7F800001  # behind infinity
    while (reached > k) & (high - low > 1):
        quarter = (high - low + 3) // 4
        cut1 = low + quarter
        cut2 = tl.minimum(cut1 + quarter, high - 1)
        cut3 = tl.minimum(cut2 + quarter, high - 1)
        cut1 = tl.minimum(cut1, high - 1)
        value1, value2, value3 = _value(cut1), _value(cut2), _value(cut3)
        found1 = tl.zeros([TILE], tl.int32)
        found2 = tl.zeros([TILE], tl.int32)
        found3 = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):
            x = tl.load(at + start + n, mask=start + n < count, other=float("-inf"))
            found1 += (x >= value1).to(tl.int32)
            found2 += (x >= value2).to(tl.int32)
            found3 += (x >= value3).to(tl.int32)
        count1, count2, count3 = tl.sum(found1, 0), tl.sum(found2, 0), tl.sum(found3, 0)
        if count3 >= k:
            low = cut3
            reached = count3
        elif count2 >= k:
            low = cut2
            reached = count2
            high = cut3
            above = count3
        elif count1 >= k:
            low = cut1
            reached = count1
            high = cut2
            above = count2
        else:
            high = cut1
            above = count1

    border = _value(low)
    equals = tl.where(reached > k, k - above, reached)  # how many that equal the border are kept
    written = reached * 0
    passed = reached * 0
    for start in range(0, count, TILE):
        x = tl.load(at + start + n, mask=start + n < count, other=float("-inf"))
        # Both counts run in one scan: a tile has less than 2^15 scores.
        if tl.max(x, 0) >= border:
            over = x > border
            equal = x == border
            running = tl.cumsum(over.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
            rank = passed + (running >> 16)  # of an equal one, from 1
            keep = over | (equal & (rank <= equals))
            place = written + (running & 0xFFFF) + tl.minimum(rank, equals) - tl.minimum(passed, equals) - 1
            if KIND == 2:
                number = start + n
                block = tl.load(candidates + row.to(tl.int64) * CANDIDATES + number // SIZE, mask=keep, other=0)
                number = block * SIZE + number % SIZE
            else:
                number = start + n
            tl.store(best + row.to(tl.int64) * k + place, number, mask=keep)
            new_over = tl.sum(over.to(tl.int32), 0)
            new_equal = tl.sum(equal.to(tl.int32), 0)
            written += new_over + tl.minimum(passed + new_equal, equals) - tl.minimum(passed, equals)
            passed += new_equal
    rest = tl.arange(0, PADDED)
    tl.store(best + row.to(tl.int64) * k + rest, tl.full([PADDED], -1, tl.int32), mask=(rest >= written) & (rest < k))


# ---- in kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _visible(position, slot, RATIO: tl.constexpr):
    """How many entries a row sees; none where it is inactive."""
    return tl.where(slot < 0, 0, (position + 1) // RATIO)


@triton.jit
def _load_keys(
    entry,
    valid,
    slot,
    key_codes,
    key_scales,
    page_table,
    pages_per_slot,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Index keys as bf16, 2^-64 of their values: even and odd columns, [entries, index_head_dim / 2] each."""
    page = tl.load(page_table + slot * pages_per_slot + entry // PAGE, mask=valid, other=0)
    place = (page.to(tl.int64) * PAGE + entry % PAGE)[:, None, None]
    group = tl.arange(0, DIM // 32)[None, :, None]
    byte = group * 16 + tl.arange(0, 16)[None, None, :]
    codes = tl.load(key_codes + place * (DIM // 2) + byte, mask=valid[:, None, None], other=0).to(tl.int32)
    scale = tl.load(key_scales + place * (DIM // 32) + group, mask=valid[:, None, None], other=0).to(tl.int32)
    scale = as_float((tl.minimum(scale, 192) + 62) << 23)  # 2^62 of it
    even = as_float(((codes << 28) >> 6) & -0x7E400000) * scale  # the bits are 2^-126 of the code's value
    odd = as_float(((codes << 24) >> 6) & -0x7E400000) * scale
    return tl.reshape(even.to(tl.bfloat16), [ENTRIES, DIM // 2]), tl.reshape(odd.to(tl.bfloat16), [ENTRIES, DIM // 2])


@triton.jit
def _index_scale(amax):
    """UE8M0 code of an index key's or query's group, and the inverse of that scale."""
    size = tl.maximum(amax, 6 * 2.0**-126) * (1 / 6.0)
    exponent = (size.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return exponent, as_float((254 - exponent) << 23)


@triton.jit
def _value(ordered):
    """float32 of an integer that is ordered as the floats are."""
    bits = ordered.to(tl.int32)
    return as_float(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def load_row_turns(turn, pair, exists):
    """`load_turns` of several rows, where they exist."""
    cos = tl.load(turn + 2 * pair, mask=exists & (pair >= 0), other=1.0)
    sin = tl.load(turn + 2 * pair + 1, mask=exists & (pair >= 0), other=0.0)
    return cos, sin


# ---- helpers ------------------------------------------------------------------------------------------------------


def _check(*wanted: tuple[str, Tensor, tuple[int, ...]]) -> None:
    """Each tensor has its shape and is contiguous, but for the rows of products, which may stand apart."""
    for name, tensor, shape in wanted:
        inner = tensor[0] if len(tensor) and name in _PRODUCTS else tensor
        if tuple(tensor.shape) != shape or not inner.is_contiguous():
            raise ValueError(f"indexer: {name} has the shape {tuple(tensor.shape)}: expected {shape}, contiguous")


# ---- what the released model compiles -----------------------------------------------------------------------------

_ROWS = {"positions": "*i32", "slots": "*i32"}
_PAGES = {"page_table": "*i32", "pages_per_slot": "i32:16"}
_KEYS = {**_ROWS, **_PAGES, "key_codes": "*u8", "key_scales": "*u8"}
_QUERY = {"query": "*bf16", "weights": "*fp32", "scores": "*fp32", "stride": "i32:16"}
_RELEASED = _Shape()


def _released_compress(ratio: int) -> ops.Build:
    return ops.Build(
        _compress,
        {
            **_ROWS,
            **_PAGES,
            "first": "*i32",
            "rows": "i32:16",
            "raw": "*fp32",
            "stride": "i32:16",
            "ring": "*fp32",
            "length": "i32",
            "norm": "*bf16",
            "wk": "*bf16",
            "k_norm": "*bf16",
            "turn": "*fp32",
            "eps": "fp32",
            "kv_codes": "*u8",
            "kv_scales": "*u8",
            "key_codes": "*u8",
            "key_scales": "*u8",
        },
        {
            "RATIO": ratio,
            "PARTS": ratio,
            "HEAD_DIM": 512,
            "INDEX_DIM": 128,
            "ROPE": 64,
            "PAGE": 128 // ratio,
            "ROWS": 16,
            "COLUMNS": 128,
        },
    )


def _released_choice(ratio: int) -> list[ops.Build]:
    sizes = {"RATIO": ratio, "HEADS": 32, "DIM": 128, "PAGE": 128 // ratio}
    of_candidates = {"SIZE": 8, "CANDIDATES": 2048}
    tile = {"RATIO": ratio, "TILE": _RELEASED.tile}
    selections = [(_VISIBLE, 512)] if ratio == 2 else [(_VISIBLE, 512), (_BLOCKS, 2048), (_CANDIDATES, 512)]
    builds = [
        ops.Build(
            _score,
            {**_KEYS, **_QUERY, "rows": "i32:16"},
            {
                **sizes,
                "ENTRIES": _RELEASED.entries,
                "PRODUCT_ROWS": _RELEASED.product_rows,
                "ROWS": _RELEASED.rows,
            },
            _RELEASED.warps,
        )
    ]
    for kind, k in selections:
        builds.append(
            ops.Build(
                _select,
                {
                    **_ROWS,
                    "scores": "*fp32",
                    "stride": "i32:16",
                    "best": "*i32",
                    "k": "i32:16",
                    **({"candidates": "*i32"} if kind == _CANDIDATES else {}),
                },
                {
                    **tile,
                    **of_candidates,
                    "KIND": kind,
                    "PADDED": k,
                    **({} if kind == _CANDIDATES else {"candidates": None}),
                },
                _RELEASED.warps,
            )
        )
    if ratio == 1:
        builds += [
            ops.Build(
                _score_candidates,
                {**_KEYS, **_QUERY, "candidates": "*i32"},
                {**sizes, **of_candidates, "ENTRIES": _RELEASED.entries, "SPAN": _RELEASED.span},
                _RELEASED.warps,
            ),
            ops.Build(
                _best_of_blocks,
                {**_ROWS, "scores": "*fp32", "stride": "i32:16", "blocks": "*fp32", "block_stride": "i32"},
                {"RATIO": ratio, "SIZE": 8, "BLOCKS": _RELEASED.tile // 8},
                _RELEASED.warps,
            ),
        ]
    return builds


KERNELS = [
    _released_compress(1),
    _released_compress(2),
    ops.Build(
        _queries,
        {
            "query": "*bf16",
            "query_stride": "i32:16",
            "weights": "*fp32",
            "weights_stride": "i32:16",
            "turn": "*fp32",
            "values": "*bf16",
            "rounded": "*fp32",
        },
        {"HEADS": 32, "PADDED": 32, "DIM": 128, "ROPE": 64},
    ),
    *_released_choice(1),
    *_released_choice(2),
]
