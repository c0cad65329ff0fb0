"""Compressor and indexer as CUDA launches (sections 6 and 7 of `docs/model.md`); `reference.py` is the contract.

Owns the packing of wk, the scratch of a choice and the launches of `compress.cu`, `score.cu`, `select.cu`. The dense
products in front (compressor, wq_b, weights_proj) and every buffer belong to the caller.

`compress` is one launch. `choose` is one that scores and one that selects for each wave: what the scores of all rows
would take is bounded by cutting the rows into waves, which share the scratch and run one after another; as many are
launched as the longest contexts could need, and those that find nothing to do end at once. Up to 22 rows a million
tokens are one wave. All sizes that depend on positions are read on the device, so launches can be captured once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import FP8_BLOCK, KV_GROUP, ModelConfig

TILE = 32  # entries that a warp scores at once; a row's scratch is whole tiles
GROUP_ROWS = 8  # rows of a request that are scored together
WAVE_KEYS = 24 * 2**20  # scores of a wave: 96 MiB, and what one group may have beyond
MAX_ROWS = 256  # as in choose.cuh
_COMPRESS_ROWS = 8  # of a block
_BINS = 2048
_PLAN_BYTES = 12 * MAX_ROWS * 4 + MAX_ROWS // 8 + 3 * 32 * 4 + 8

_PAGES = [("page_table", "const i32*"), ("pages_per_slot", "int")]
_ROWS = [("rows", "int"), ("row_position", "const i32*"), ("row_slot", "const i32*")]

_COMPRESS = jit.Source(
    "stages/indexer/compress.cu",
    {
        "compress": jit.Params(
            "Compress",
            [
                *_ROWS,
                *_PAGES,
                ("early", "int"),
                ("raw", "const float*"),
                ("raw_stride", "int"),
                ("raw_column", "int"),
                ("ring", "float*"),
                ("ring_length", "int"),
                ("norm", "const bf16*"),
                ("wk", "const bf16*"),
                ("k_norm", "const bf16*"),
                ("frequencies", "const float*"),
                ("kv_codes", "u8*"),
                ("kv_scales", "u8*"),
                ("key_codes", "u8*"),
                ("key_scales", "u8*"),
            ],
        )
    },
    hot=["compress"],
)
_SCORE = jit.Source(
    "stages/indexer/score.cu",
    {
        "score": jit.Params(
            "Score",
            [
                *_ROWS,
                *_PAGES,
                ("early", "int"),
                ("wave", "int"),
                ("wave_keys", "int"),
                ("query", "const bf16*"),
                ("query_stride", "int"),
                ("query_column", "int"),
                ("weights", "const float*"),
                ("weights_stride", "int"),
                ("weights_column", "int"),
                ("frequencies", "const float*"),
                ("key_codes", "const u8*"),
                ("key_scales", "const u8*"),
                ("candidates", "const i32*"),
                ("keys", "u32*"),
                ("block_keys", "u32*"),
            ],
        )
    },
    hot=["score"],
)
_SELECT = jit.Source(
    "stages/indexer/select.cu",
    {
        "select_best": jit.Params(
            "Select",
            [
                *_ROWS,
                ("early", "int"),
                ("wave", "int"),
                ("wave_keys", "int"),
                ("ranks", "int"),
                ("candidates", "const i32*"),
                ("keys", "const u32*"),
                ("block_keys", "const u32*"),
                ("chosen", "i32*"),
                ("block_list", "i32*"),
            ],
        )
    },
    hot=["select_best"],
)


# ---- what the caller provides -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """The paged cache of a KV source. All tensors uint8 but the table; an entry is at [page, entry % entries_per_page].

    kv_codes: [pages, entries_per_page, head_dim / 2] e2m1, low nibble = even column
    kv_scales: [pages, entries_per_page, head_dim / 16] E4M3
    key_codes, key_scales: [pages, entries_per_page, index_head_dim / 2 and / 32] e2m1 and UE8M0
    page_table: i32 [slots, pages_per_slot]
    """

    kv_codes: Tensor
    kv_scales: Tensor
    key_codes: Tensor
    key_scales: Tensor
    page_table: Tensor

    @property
    def entries_per_page(self) -> int:
        """Entries of a page: its tokens divided by the source's ratio."""
        return self.kv_codes.shape[1]


@dataclass(frozen=True)
class Product:
    """Columns of a dense product's output: `column` and what follows of `values` [rows, stride], row-major."""

    values: Tensor
    column: int = 0


@dataclass(frozen=True)
class Scratch:
    """What a choice needs between its launches; one serves all layers, and all buckets of fewer rows.

    Its size depends on rows and the longest context: with keys = ceil(max_model_len / TILE) * TILE, `wave_keys` +
    GROUP_ROWS * keys scores of 4 bytes (or rows * keys, if that is less than `wave_keys`), and the same again divided
    by candidate_block_size. `nbytes` adds it up.
    """

    keys: Tensor  # int32
    block_keys: Tensor  # int32
    rows: int
    wave_keys: int
    max_model_len: int

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        rows: int,
        max_model_len: int,
        device: torch.device,
        *,
        wave_keys: int = WAVE_KEYS,
    ) -> Scratch:
        """Scratch for up to `rows` rows with contexts of up to `max_model_len` tokens."""
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in a choice: at most {MAX_ROWS}")
        row_keys = _round_up(max_model_len, TILE)
        wave_keys = _round_up(wave_keys, TILE)
        num_keys = min(rows * row_keys, wave_keys + GROUP_ROWS * row_keys)
        return cls(
            keys=torch.empty(num_keys, dtype=torch.int32, device=device),
            block_keys=torch.empty(num_keys // config.candidate_block_size, dtype=torch.int32, device=device),
            rows=rows,
            wave_keys=wave_keys,
            max_model_len=max_model_len,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.keys.nbytes + self.block_keys.nbytes


@dataclass(frozen=True)
class Geometry:
    """How the launches of a choice are cut. Results do not depend on it."""

    multiprocessors: int
    score_warps: int = (
        8  # of a block; two blocks a multiprocessor, one and the next kernel's where there is little to do
    )
    select_threads: int = 512
    select_keys: int = 16  # keys that a thread of the selection keeps in registers
    cluster: int = 8  # most blocks for one row's selection, a power of two

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Geometry:
        """What suits `device`."""
        if jit.emulated(device):
            return cls(4, score_warps=2, select_threads=128, select_keys=2, cluster=2)
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def ranks(self, items: int) -> int:
        """Blocks for each of `items` selections: as many as run at the same time, a power of two."""
        ranks = self.cluster
        while ranks > 1 and items * ranks > self.multiprocessors:
            ranks //= 2
        return ranks


def pack_wk(weight: Tensor) -> Tensor:
    """wk [index_head_dim, head_dim] bf16 as units (common.cuh): [index_head_dim / 16, head_dim / 16, 256]."""
    outputs, inputs = weight.shape
    units = weight.view(outputs // 16, 2, 8, inputs // 16, 2, 4, 2)  # [.., row / 8, row % 8, .., column / 8, q, pair]
    return units.permute(0, 3, 2, 5, 4, 1, 6).reshape(outputs // 16, inputs // 16, 256).contiguous()


def unpack_wk(packed: Tensor) -> Tensor:
    """Inverse of `pack_wk`."""
    outputs, inputs = packed.shape[:2]
    units = packed.view(outputs, inputs, 8, 4, 2, 2, 2)
    return units.permute(0, 5, 2, 1, 4, 3, 6).reshape(outputs * 16, inputs * 16)


# ---- launches -----------------------------------------------------------------------------------------------------


def compress(
    config: ModelConfig,
    source: int,
    *,
    row_position: Tensor,
    row_slot: Tensor,
    raw: Product,
    ring: Tensor,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    cache: Cache,
    early: bool = False,
) -> list[jit.Launch]:
    """Write the raw ring, and the entry and index key of every group that a row closes.

    In `reference.py`: the rounding of `project_raw`, `pool`, `kv_entry` and `index_key`.

    source: the KV source's layer number.
    row_position, row_slot: i32 [rows], a request's rows one after another; a row of slot -1 writes nothing.
    raw: float32 columns k and z, head_dim each, or (ratio 1) the latent, which is rounded to bf16 here.
    ring: float32 [slots, ring, parts, head_dim], at p % ring; a group's earlier positions come from the rows of this
        forward where they are in it, else from here.
    norm, k_norm: bf16. wk: of `pack_wk`. frequencies: float32 [rope / 2] of the compressed layers.
    early: whether row_position, row_slot and the page table may be read before the kernels in front have ended.
    """
    ratio = config.compress_ratios[source]
    parts = 1 if ratio == 1 else 2
    rows = len(row_position)
    _check(
        _shape("ring", ring, (None, None, parts, config.head_dim)),
        _shape("raw", raw.values, (rows, None)),
        _columns("raw", raw, parts * config.head_dim),
        None if (raw.column | raw.values.shape[1]) % 2 == 0 else "raw: column and stride must be even",
        _shape("wk", wk, (config.index_head_dim // 16, config.head_dim // 16, 256)),
        _shape("norm", norm, (config.head_dim,)),
        _shape("k_norm", k_norm, (config.index_head_dim,)),
        _shape("frequencies", frequencies, (config.qk_rope_head_dim // 2,)),
        *_cache_problems(config, cache),
    )
    module = _COMPRESS.build(row_position.device, **_Sizes.of(config).compress(ratio, cache.entries_per_page))
    return [
        module.launch(
            "compress",
            grid=-(-rows // _COMPRESS_ROWS),
            block=_COMPRESS_ROWS * 64,
            shared=_compress_shared(config),
            stage="indexer",
            nbytes=wk.nbytes,
            rows=rows,
            row_position=row_position,
            row_slot=row_slot,
            page_table=cache.page_table,
            pages_per_slot=cache.page_table.shape[1],
            early=int(early),
            raw=raw.values,
            raw_stride=raw.values.shape[1],
            raw_column=raw.column,
            ring=ring,
            ring_length=ring.shape[1],
            norm=norm,
            wk=wk,
            k_norm=k_norm,
            frequencies=frequencies,
            kv_codes=cache.kv_codes,
            kv_scales=cache.kv_scales,
            key_codes=cache.key_codes,
            key_scales=cache.key_scales,
        )
    ]


def choose(
    config: ModelConfig,
    layer: int,
    *,
    row_position: Tensor,
    row_slot: Tensor,
    query: Product,
    weights: Product,
    frequencies: Tensor,
    cache: Cache,
    scratch: Scratch,
    chosen: Tensor,
    candidates: Tensor | None = None,
    early: bool = False,
    geometry: Geometry | None = None,
) -> list[jit.Launch]:
    """The choice of index source `layer`: `reference.index_query`, `score`, `choose` and `candidates`.

    row_position, row_slot: i32 [rows], the rows of a request consecutive.
    query: bf16 columns, wq_b q_r [index_heads * index_head_dim], not rotated.
    weights: float32 columns, weights_proj x [index_heads], rounded to bf16 here.
    frequencies: float32 [rope / 2] of the compressed layers.
    cache: of the layer's KV source, with what `compress` wrote of these rows.
    chosen: i32 [rows, index_topk], written: entries ascending, -1 pads; all -1 where the slot is -1.
    candidates: i32 [rows, candidate_topk_blocks], ascending blocks, -1 pads; written by the candidate source, read by
        the index sources above it, not used by those below.
    early: whether row_position, row_slot, the page table and whatever earlier layers and forwards wrote may be read
        before the kernels in front have ended, as `attention.cuda.Early.STATE`.

    A row's choice depends neither on the other rows nor on the geometry. Scores are float32 sums in a fixed order.
    """
    role = _role(config, layer)
    rows, heads = len(row_position), config.index_n_heads
    source = config.kv_source(layer)
    assert source is not None
    needs_candidates = role != _PLAIN
    _check(
        _shape("query", query.values, (rows, None)),
        _columns("query", query, heads * config.index_head_dim),
        None if (query.column | query.values.shape[1]) % 8 == 0 else "query: column and stride must be multiples of 8",
        _shape("weights", weights.values, (rows, None)),
        _columns("weights", weights, heads),
        _shape("frequencies", frequencies, (config.qk_rope_head_dim // 2,)),
        _shape("chosen", chosen, (rows, config.index_topk)),
        "candidates: missing" if needs_candidates and candidates is None else None,
        None if candidates is None else _shape("candidates", candidates, (rows, config.candidate_topk_blocks)),
        None if rows <= scratch.rows else f"scratch: made for {scratch.rows} rows, found {rows}",
        *_cache_problems(config, cache),
    )
    device = row_position.device
    geometry = geometry or Geometry.of(device)
    sizes, ratio = _Sizes.of(config), config.compress_ratios[source]
    score_module = _SCORE.build(device, **sizes.score(role, ratio, cache.entries_per_page, geometry))
    select_module = _SELECT.build(device, **sizes.select(role, ratio, geometry))
    items = 2 * rows if role == _SOURCE else rows
    ranks = geometry.ranks(items)
    launches = []
    read, written = (None, candidates) if role == _SOURCE else (candidates if role == _CONSUMER else None, None)
    for wave in range(waves(config, layer, rows, scratch)):
        launches.append(
            score_module.launch(
                "score",
                grid=geometry.multiprocessors * (2 if geometry.score_warps <= 8 else 1),
                block=geometry.score_warps * 32,
                shared=_score_shared(config, role),
                stage="indexer",
                rows=rows,
                row_position=row_position,
                row_slot=row_slot,
                page_table=cache.page_table,
                pages_per_slot=cache.page_table.shape[1],
                early=int(early),
                wave=wave,
                wave_keys=scratch.wave_keys,
                query=query.values,
                query_stride=query.values.shape[1],
                query_column=query.column,
                weights=weights.values,
                weights_stride=weights.values.shape[1],
                weights_column=weights.column,
                frequencies=frequencies,
                key_codes=cache.key_codes,
                key_scales=cache.key_scales,
                candidates=read,
                keys=scratch.keys,
                block_keys=scratch.block_keys,
            )
        )
        launches.append(
            select_module.launch(
                "select_best",
                grid=items * ranks,
                block=geometry.select_threads,
                shared=_select_shared(),
                cluster=ranks,
                stage="indexer",
                rows=rows,
                row_position=row_position,
                row_slot=row_slot,
                early=int(early),
                wave=wave,
                wave_keys=scratch.wave_keys,
                ranks=ranks,
                candidates=read,
                keys=scratch.keys,
                block_keys=scratch.block_keys,
                chosen=chosen,
                block_list=written,
            )
        )
    return launches


def waves(config: ModelConfig, layer: int, rows: int, scratch: Scratch) -> int:
    """How often `choose` scores and selects: enough for `rows` rows of the longest context."""
    source = config.kv_source(layer)
    assert source is not None
    entries = scratch.max_model_len // config.compress_ratios[source]
    if _role(config, layer) == _CONSUMER:
        entries = min(entries, config.candidate_topk_blocks * config.candidate_block_size)
    return max(1, -(-rows * _round_up(entries, TILE) // scratch.wave_keys))


# ---- constants ----------------------------------------------------------------------------------------------------

_PLAIN, _SOURCE, _CONSUMER = 0, 1, 2  # as in choose.cuh


class _Sizes(NamedTuple):
    head_dim: int
    index_heads: int
    index_head_dim: int
    rope_dims: int
    topk: int
    candidate_blocks: int
    block_entries: int
    rms_eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> _Sizes:
        return cls(
            config.head_dim,
            config.index_n_heads,
            config.index_head_dim,
            config.qk_rope_head_dim,
            config.index_topk,
            config.candidate_topk_blocks,
            config.candidate_block_size,
            config.rms_norm_eps,
        )

    def compress(self, ratio: int, entries_per_page: int) -> dict[str, jit.Constant]:
        return {
            "HEAD_DIM": self.head_dim,
            "INDEX_HEAD_DIM": self.index_head_dim,
            "ROPE_DIMS": self.rope_dims,
            "RATIO": ratio,
            "ENTRIES_PER_PAGE": entries_per_page,
            "RMS_EPS": float(self.rms_eps),
        }

    def score(self, role: int, ratio: int, entries_per_page: int, geometry: Geometry) -> dict[str, jit.Constant]:
        return {
            **self._choice(role, ratio),
            "HEADS": self.index_heads,
            "INDEX_HEAD_DIM": self.index_head_dim,
            "ROPE_DIMS": self.rope_dims,
            "WEIGHT_SCALE": self.index_head_dim**-0.5 * self.index_heads**-0.5,
            "ENTRIES_PER_PAGE": entries_per_page,
            "WARPS": geometry.score_warps,
        }

    def select(self, role: int, ratio: int, geometry: Geometry) -> dict[str, jit.Constant]:
        return {**self._choice(role, ratio), "THREADS": geometry.select_threads, "KEYS": geometry.select_keys}

    def _choice(self, role: int, ratio: int) -> dict[str, jit.Constant]:
        return {
            "ROLE": role,
            "RATIO": ratio,
            "TOPK": self.topk,
            "CANDIDATE_BLOCKS": self.candidate_blocks,
            "BLOCK_ENTRIES": self.block_entries,
        }


def _role(config: ModelConfig, layer: int) -> int:
    if layer == config.candidate_source_layer_id:
        return _SOURCE
    return _CONSUMER if config.uses_candidates(layer) else _PLAIN


# Bytes of the kernels' Shared structs.


def _compress_shared(config: ModelConfig) -> int:
    wk = config.index_head_dim * config.head_dim * 2
    row = (config.head_dim // 2 + 4 + 2 * config.index_head_dim + config.qk_rope_head_dim + 2) * 4
    return _round_up(wk + _COMPRESS_ROWS * row + 8, 128)


def _score_shared(config: ModelConfig, role: int) -> int:
    rows, heads = 1 if role == _CONSUMER else GROUP_ROWS, _round_up(config.index_n_heads, 8)
    queries = rows * (heads * config.index_head_dim * 2 + heads * 4 + config.qk_rope_head_dim * 4)
    return _round_up(queries + _PLAN_BYTES + 8, 128)


def _select_shared() -> int:
    return _PLAN_BYTES + 3 * _BINS * 4 + 2 * 32 * 4 + 4 * 4


# ---- helpers ------------------------------------------------------------------------------------------------------


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _shape(name: str, tensor: Tensor, wanted: tuple[int | None, ...]) -> str | None:
    found = tuple(tensor.shape)
    if len(found) == len(wanted) and all(w in (None, f) for f, w in zip(found, wanted, strict=True)):
        return None
    return f"{name}: shape {found}, wanted {tuple('any' if w is None else w for w in wanted)}"


def _columns(name: str, product: Product, width: int) -> str | None:
    if product.column + width <= product.values.shape[1]:
        return None
    return f"{name}: columns {product.column}..{product.column + width - 1} of {product.values.shape[1]}"


def _cache_problems(config: ModelConfig, cache: Cache) -> list[str | None]:
    per_page = cache.entries_per_page
    wanted = {
        "kv_codes": config.head_dim // 2,
        "kv_scales": config.head_dim // KV_GROUP,
        "key_codes": config.index_head_dim // 2,
        "key_scales": config.index_head_dim // FP8_BLOCK,
    }
    return [_shape(name, getattr(cache, name), (None, per_page, width)) for name, width in wanted.items()]


def _check(*problems: str | None) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ValueError("indexer: " + "; ".join(found))


_RELEASED = _Sizes(512, 32, 128, 64, 512, 2048, 8, 1e-20)
_H200 = Geometry(132)
SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    *((_COMPRESS, _RELEASED.compress(ratio, 128 // ratio)) for ratio in (1, 2)),
    *(
        pair
        for role, ratio in ((_PLAIN, 2), (_SOURCE, 1), (_CONSUMER, 1))
        for pair in (
            (_SCORE, _RELEASED.score(role, ratio, 128 // ratio, _H200)),
            (_SELECT, _RELEASED.select(role, ratio, _H200)),
        )
    ),
]
