"""The boundary between two sublayers on a GPU: launches of `boundary.cu` and `mixes.cu`, and packing for them.

A boundary joins in one kernel what `reference.py` and `model.py` do one after another: the sum over ranks, `expand`,
the Engram's `inject`, the draft's taps, `collapse`, the norm and the quantization of the next sublayer's input. The
dot products behind the mixes (`mixes.cuh`) run beside the sublayer, on spare blocks of its first kernel, or with many
rows in a kernel of their own; the boundary adds their slices and computes pre, post and comb.

Values round as in the reference, after float32 arithmetic. The order of a row's sums depends on the tiling, which
the number of rows of the bucket decides, and on nothing else of the batch.

Shapes: R rows of the bucket, hc copies, Rt = ceil(R / 8). Fragments as in `common.cuh`; their rows beyond R are not
written. Inactive rows (row_slot -1) count as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import FP8_BLOCK, ModelConfig

MIX_RECORD = 28  # floats per (row, slice) of the mixes' partial sums
MIX_SHARED_BYTES = 2 * 8 * 8 * MIX_RECORD * 4  # of a block that runs `mixes_block`
_MIX_CHUNK = 64  # columns of a warp
_MIX_WARPS = 8  # a slice's chunks, at most

_BLOCKS = 264  # that run at once: two a multiprocessor
_ENGRAM_BLOCKS = 132  # those with an Engram hold twice the registers
_MOST_ROWS = 8

_FROM_EMBEDDING, _FROM_SUBLAYER, _FROM_MAIN = range(3)

_BOUNDARY = jit.Source(
    "stages/boundary/boundary.cu",
    {
        "boundary": jit.Params(
            "Boundary",
            [
                ("rows", "int"),
                ("row_slot", "const i32*"),  # [R], -1: inactive; null: all are active
                ("row_token", "const i32*"),  # [R]
                ("embedding", "const bf16*"),  # [vocab, hidden]
                ("mailbox", "const float*"),  # [world, R, hidden]
                ("stream_in", "const bf16*"),  # [R, hc, hidden]
                ("stream_out", "bf16*"),  # [R, hc, hidden]; null: not wanted
                ("mixes", "const float*"),  # [R, slices, 28]
                ("mix_base", "const float*"),  # [24]
                ("mix_scale", "const float*"),  # [3]
                ("engram_kv", "const float*"),  # [world, R, hc + 1, hidden]
                ("query_weight", "const bf16*"),  # [hc, hidden]
                ("key_weight", "const bf16*"),  # [hc, hidden]
                ("taps", "bf16*"),  # [R, TAP_COLUMNS]; null: no tap here
                ("tap_codes", "u8*"),  # fragments of columns tap_begin..tap_end of the taps
                ("tap_scales", "u8*"),
                ("tap_column", "int"),  # of this layer in the taps
                ("tap_begin", "int"),
                ("tap_end", "int"),
                ("norm_weight", "const bf16*"),  # [hidden]; null: no collapse
                ("hidden_out", "bf16*"),  # [R, hidden]: collapsed, before the norm; null: not wanted
                ("x_codes", "u8*"),  # fp8 fragments of the normed; null: not wanted
                ("x_scales", "u8*"),
                ("x_bf16", "bf16*"),  # bf16 fragments of the normed; null: not wanted
            ],
        )
    },
    hot=["boundary"],
)
_MIXES = jit.Source(
    "stages/boundary/mixes.cu",
    {
        "mixes": jit.Params(
            "MixesOfRows",
            [
                ("stream", "const bf16*"),  # [R, hc, hidden]
                ("fn", "const float*"),  # packed by `pack_fn`
                ("partials", "float*"),  # [R, slices, 28]
                ("slices", "int"),
                ("rows", "int"),
                ("rows_per_block", "int"),
            ],
        )
    },
    hot=["mixes"],
)


# -- packing ----------------------------------------------------------------------------------------------------------


def pack_fn(fn: Tensor) -> Tensor:
    """`hc_*_fn` [24, hc * hidden] float32 as the lanes of `mixes.cuh` read it: [hc * hidden / 64, 12, 128], contiguous.

    A chunk of 64 columns is read in 4 steps of 16 and 3 thirds of 8 outputs; in each, lane 4 r + q holds output r of
    the third and 4 neighbouring columns, such that a lane's columns of two steps are 8 neighbours.
    """
    parts = fn.unflatten(1, (-1, 2, 4, 2, 4)).unflatten(0, (3, 8))  # third, r, chunk, half, q, step, column
    return parts.permute(2, 3, 5, 0, 1, 4, 6).reshape(-1, 12, 128).contiguous()


def unpack_fn(packed: Tensor) -> Tensor:
    """Inverse of `pack_fn`."""
    parts = packed.reshape(-1, 2, 2, 3, 8, 4, 4)
    return parts.permute(3, 4, 0, 1, 5, 2, 6).reshape(24, -1).contiguous()


# -- mixes ------------------------------------------------------------------------------------------------------------


def mix_slices(config: ModelConfig) -> int:
    """The fewest slices of the mixes: as many columns each as a block's registers hold of fn."""
    return -(-_mix_chunks(config) // _MIX_WARPS)


def mixes(
    device: torch.device, config: ModelConfig, *, stream: Tensor, fn: Tensor, partials: Tensor
) -> list[jit.Launch]:
    """The partial sums of all rows in a kernel of their own, on every multiprocessor.

    stream: bf16 [R, hc, hidden]. fn: from `pack_fn`. partials: float32 [R, slices, 28], written but for the last three.
    """
    rows, slices = partials.shape[0], partials.shape[1]
    chunks = _mix_chunks(config)
    _check("stream", stream, (rows, config.hc_mult, config.hidden_size))
    _check("fn", fn, (chunks, 12, 128))
    _check("partials", partials, (rows, slices, MIX_RECORD))
    if not mix_slices(config) <= slices <= chunks:
        raise ValueError(f"{slices} slices of the mixes: expected {mix_slices(config)}..{chunks}")
    # Two blocks a multiprocessor, each with a share of the rows in whole tiles of 8.
    tiles = -(-rows // 8)
    rows_per_block = -(-tiles // max(1, 264 // slices)) * 8
    module = _MIXES.build(device, HIDDEN=config.hidden_size, HC=config.hc_mult)
    return [
        module.launch(
            "mixes",
            grid=slices * -(-rows // rows_per_block),
            block=32 * _MIX_WARPS,
            shared=MIX_SHARED_BYTES,
            stage="boundary",
            nbytes=fn.nbytes,
            stream=stream,
            fn=fn,
            partials=partials,
            slices=slices,
            rows=rows,
            rows_per_block=rows_per_block,
        )
    ]


def _mix_chunks(config: ModelConfig) -> int:
    return config.hc_mult * config.hidden_size // _MIX_CHUNK


# -- boundary ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Blocks of a row's cluster (1, 2, 4 or 8), and pieces of 4 columns that a thread holds."""

    cluster: int
    pieces: int

    def workers(self, hidden: int) -> int:
        """Threads of a block that hold columns; ValueError where `hidden` does not divide so."""
        workers = hidden // (self.cluster * 4 * self.pieces)
        if hidden % (FP8_BLOCK * self.cluster) or workers * self.cluster * 4 * self.pieces != hidden or workers % 8:
            raise ValueError(f"{self}: {hidden} columns do not divide into whole scale groups")
        if workers > 992:
            raise ValueError(f"{self}: {workers} threads for {hidden} columns, more than a block has")
        return workers


def tiling(hidden: int, rows: int) -> Tiling:
    """How `rows` rows are spread: 8 blocks a row while they all run at once, then 4 (or what divides `hidden`)."""
    for cluster in (8, 4, 2, 1):
        smaller = any(hidden % (FP8_BLOCK * c) == 0 for c in (4, 2, 1) if c < cluster)
        if hidden % (FP8_BLOCK * cluster) or (cluster == 8 and rows * cluster > _BLOCKS and smaller):
            continue
        for pieces in (1, 2, 4, 8):
            try:
                Tiling(cluster, pieces).workers(hidden)
            except ValueError:
                continue
            return Tiling(cluster, pieces)
    raise ValueError(f"hidden_size {hidden}: no tiling")


def rows_per_cluster(rows: int, cluster: int, *, engram: bool) -> int:
    """Rows that a cluster takes one after another, such that all clusters run at once; at most _MOST_ROWS."""
    clusters = (_ENGRAM_BLOCKS if engram else _BLOCKS) // cluster
    return min(-(-rows // clusters), _MOST_ROWS)


@dataclass(frozen=True)
class Collapsed:
    """What is wanted of the collapsed rows: their norm's weight, and where results go (None: not wanted)."""

    norm_weight: Tensor  # bf16 [hidden]
    codes: Tensor | None = None  # fp8 fragments u8 [Rt, hidden / 16, 8, 16]
    scales: Tensor | None = None  # UE8M0 u8 [Rt, hidden / 32, 8]
    bf16: Tensor | None = None  # bf16 fragments [Rt, hidden / 8, 8, 8]
    hidden: Tensor | None = None  # bf16 [R, hidden]: before the norm


@dataclass(frozen=True)
class Taps:
    """The draft's taps: means over the copies of the stream that enters a target layer.

    The same buffers serve all target layers; `column` says where this one writes. The rank's columns `begin`..`end` of
    the concatenation are written as fp8 too, for its part of main_proj.
    """

    values: Tensor | None  # bf16 [R, taps * hidden]
    column: int
    codes: Tensor | None = None  # fp8 fragments u8 [Rt, (end - begin) / 16, 8, 16]
    scales: Tensor | None = None  # UE8M0 u8 [Rt, (end - begin) / 32, 8]
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Inject:
    """The Engram of the layer behind the boundary: partial keys and values, and its weights."""

    kv: Tensor  # float32 [world, R, (hc + 1) * hidden]
    query_weight: Tensor  # bf16 [hc, hidden]
    key_weight: Tensor  # bf16 [hc, hidden]


@dataclass(frozen=True)
class Mixing:
    """Mixes of the sublayer in front of the boundary: partial sums and what turns them into coefficients."""

    partials: Tensor  # float32 [R, slices, 28]
    base: Tensor  # float32 [24]
    scale: Tensor  # float32 [3]


def boundary(
    device: torch.device,
    config: ModelConfig,
    *,
    mailbox: Tensor,
    mixing: Mixing,
    stream_in: Tensor,
    stream_out: Tensor | None,
    row_slot: Tensor | None,
    inject: Inject | None = None,
    taps: Taps | None = None,
    collapsed: Collapsed | None = None,
    mixes_early: bool = False,
    tile: Tiling | None = None,
) -> list[jit.Launch]:
    """From a sublayer's output to the next one's input.

    mailbox: float32 [world, R, hidden], the ranks' partial outputs. stream_in: bf16 [R, hc, hidden], what stood in
    front of the sublayer; stream_out: what comes out (may be `stream_in`), Engram included. row_slot: int32 [R].
    In this order: y = the ranks' sum, expand, inject, taps, collapse with the `pre` of `mixing`, norm, quantize.

    mixes_early: the kernel launched before this one calls launch_dependents only after its own wait. Then whatever
    the kernels before that one wrote is complete when this one starts, and mixes, stream and row_slot (which the last
    kernel must not have written) are read and turned into coefficients before the wait.
    """
    world, rows, hidden = mailbox.shape
    _check("mailbox", mailbox, (world, rows, config.hidden_size))
    _check("stream_in", stream_in, (rows, config.hc_mult, hidden))
    slices = mixing.partials.shape[1]
    _check("partials", mixing.partials, (rows, slices, MIX_RECORD))
    _check("base", mixing.base, (_outputs(config),))
    _check("scale", mixing.scale, (3,))
    return _launch(
        device,
        config,
        rows,
        tile,
        {"SOURCE": _FROM_SUBLAYER, "WORLD": world, "SLICES": slices, "MIXES_EARLY": mixes_early},
        inject=inject,
        taps=taps,
        collapsed=collapsed,
        row_slot=row_slot,
        mailbox=mailbox,
        stream_in=stream_in,
        stream_out=stream_out,
        mixes=mixing.partials,
        mix_base=mixing.base,
        mix_scale=mixing.scale,
    )


def embed(
    device: torch.device,
    config: ModelConfig,
    *,
    row_token: Tensor,
    row_slot: Tensor | None,
    embedding: Tensor,
    stream_out: Tensor,
    inject: Inject | None = None,
    taps: Taps | None = None,
    collapsed: Collapsed | None = None,
    tile: Tiling | None = None,
) -> list[jit.Launch]:
    """The first boundary, of the backbone or of the draft: the embedding in every copy; the collapse takes copy 0.

    row_token: int32 [R]. embedding: bf16 [vocab, hidden]. The rest as in `boundary`.
    """
    rows = row_token.shape[0]
    _check("embedding", embedding, (config.vocab_size, config.hidden_size))
    return _launch(
        device,
        config,
        rows,
        tile,
        {"SOURCE": _FROM_EMBEDDING, "WORLD": inject.kv.shape[0] if inject else 1, "SLICES": 1, "MIXES_EARLY": False},
        inject=inject,
        taps=taps,
        collapsed=collapsed,
        row_slot=row_slot,
        row_token=row_token,
        embedding=embedding,
        stream_out=stream_out,
    )


def main(
    device: torch.device,
    config: ModelConfig,
    *,
    mailbox: Tensor,
    row_slot: Tensor | None,
    collapsed: Collapsed,
    tile: Tiling | None = None,
) -> list[jit.Launch]:
    """The draft's `main`: the sum of main_proj's partial outputs `mailbox` float32 [world, R, hidden], normed."""
    world, rows, _ = mailbox.shape
    _check("mailbox", mailbox, (world, rows, config.hidden_size))
    return _launch(
        device,
        config,
        rows,
        tile,
        {"SOURCE": _FROM_MAIN, "WORLD": world, "SLICES": 1, "MIXES_EARLY": False},
        collapsed=collapsed,
        row_slot=row_slot,
        mailbox=mailbox,
    )


def _launch(
    device: torch.device,
    config: ModelConfig,
    rows: int,
    tile: Tiling | None,
    kind: dict[str, int | bool],
    *,
    inject: Inject | None = None,
    taps: Taps | None = None,
    collapsed: Collapsed | None = None,
    **fields: Tensor | None,
) -> list[jit.Launch]:
    hc, hidden = config.hc_mult, config.hidden_size
    tile = tile or tiling(hidden, rows)
    each = rows_per_cluster(rows, tile.cluster, engram=inject is not None)
    sizes = _Sizes.of(config)
    tap_columns = hidden * sizes.taps
    if (stream_out := fields.get("stream_out")) is not None:
        _check("stream_out", stream_out, (rows, hc, hidden))
    if (row_slot := fields.get("row_slot")) is not None:
        _check("row_slot", row_slot, (rows,))
    if inject:
        world = kind["WORLD"]
        _check("engram kv", inject.kv, (world, rows, (hc + 1) * hidden))
        _check("query_weight", inject.query_weight, (hc, hidden))
        _check("key_weight", inject.key_weight, (hc, hidden))
    if taps:
        if taps.values is not None:
            _check("taps", taps.values, (rows, tap_columns))
        _check_fp8("taps", taps.codes, taps.scales, rows, taps.end - taps.begin)
        if taps.begin % FP8_BLOCK or taps.end % FP8_BLOCK or not 0 <= taps.column <= tap_columns - hidden:
            raise ValueError(f"taps: columns {taps.begin}..{taps.end} and {taps.column} of {tap_columns}")
    if collapsed:
        _check("norm_weight", collapsed.norm_weight, (hidden,))
        _check_fp8("x", collapsed.codes, collapsed.scales, rows, hidden)
        if collapsed.bf16 is not None:
            _check("x bf16", collapsed.bf16, (-(-rows // 8), hidden // 8, 8, 8))
        if collapsed.hidden is not None:
            _check("hidden", collapsed.hidden, (rows, hidden))
    constants, threads, shared = _constants(sizes, tile, each, kind, engram=inject is not None)
    values: dict[str, Any] = {name: fields.get(name) for name in _BOUNDARY.kernels["boundary"].fields}
    values |= {
        "engram_kv": inject.kv if inject else None,
        "query_weight": inject.query_weight if inject else None,
        "key_weight": inject.key_weight if inject else None,
        "taps": taps.values if taps else None,
        "tap_codes": taps.codes if taps else None,
        "tap_scales": taps.scales if taps else None,
        "norm_weight": collapsed.norm_weight if collapsed else None,
        "hidden_out": collapsed.hidden if collapsed else None,
        "x_codes": collapsed.codes if collapsed else None,
        "x_scales": collapsed.scales if collapsed else None,
        "x_bf16": collapsed.bf16 if collapsed else None,
    }
    numbers = {
        "rows": rows,
        "tap_column": taps.column if taps else 0,
        "tap_begin": taps.begin if taps else 0,
        "tap_end": taps.end if taps else 0,
    }
    nbytes = 2 * hidden * ((collapsed is not None) + (2 * hc if inject else 0))
    return [
        _BOUNDARY.build(device, **constants).launch(
            "boundary",
            grid=-(-rows // each) * tile.cluster,
            block=threads,
            shared=shared,
            cluster=tile.cluster,
            stage="boundary",
            nbytes=nbytes,
            **(values | numbers),
        )
    ]


class _Sizes(NamedTuple):
    """What the kernels are compiled with, of a model."""

    hidden: int
    hc: int
    sinkhorn_iterations: int
    hc_eps: float
    norm_eps: float
    taps: int

    @classmethod
    def of(cls, config: ModelConfig) -> _Sizes:
        return cls(
            config.hidden_size,
            config.hc_mult,
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
            len(config.dspark_target_layer_ids),
        )


def _constants(
    sizes: _Sizes, tile: Tiling, rows: int, kind: dict[str, int | bool], *, engram: bool
) -> tuple[dict[str, jit.Constant], int, int]:
    """Constants of `boundary.cu`, threads of a block, bytes of its shared memory. `rows`: of a cluster."""
    hc, columns = sizes.hc, sizes.hidden // tile.cluster
    warps = -(-tile.workers(sizes.hidden) // 32)
    threads = 32 * (warps + (rows if kind["SOURCE"] == _FROM_SUBLAYER else 0))
    turns = 2 if engram or rows == 1 else 4
    sums = turns * (3 * hc if engram else 1) * tile.cluster * warps
    shared = 4 * sums + 8 * (turns + 2 * rows) + 4 * rows * (2 * hc + hc * hc) + 32  # the last for alignment
    # Several rows of a cluster are copied at once, where that leaves room for the other block of a multiprocessor.
    copies = rows * columns * (2 * hc + 4 * kind["WORLD"])
    room = jit.MAX_SHARED // (1 if engram or threads > 512 else 2) - 1024 - shared
    copied = kind["SOURCE"] == _FROM_SUBLAYER and rows > 1 and copies <= room and columns * 2 % 16 == 0
    if copied:
        shared += copies
    constants: dict[str, jit.Constant] = {
        **kind,
        "HIDDEN": sizes.hidden,
        "HC": hc,
        "THREADS": threads,
        "SHARED_BYTES": shared,
        "CLUSTER": tile.cluster,
        "PIECES": tile.pieces,
        "ROWS": rows,
        "COPIED": copied,
        "ENGRAM": engram,
        "SINKHORN_ITERATIONS": sizes.sinkhorn_iterations,
        "HC_EPS": sizes.hc_eps,
        "NORM_EPS": sizes.norm_eps,
        "TAP_COLUMNS": sizes.hidden * sizes.taps,
    }
    return constants, threads, shared


def _outputs(config: ModelConfig) -> int:
    return (2 + config.hc_mult) * config.hc_mult


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")


def _check_fp8(name: str, codes: Tensor | None, scales: Tensor | None, rows: int, columns: int) -> None:
    if (codes is None) != (scales is None):
        raise ValueError(f"{name}: codes and scales go together")
    if codes is not None and scales is not None:
        tiles = -(-rows // 8)
        _check(f"{name} codes", codes, (tiles, columns // 16, 8, 16))
        _check(f"{name} scales", scales, (tiles, columns // FP8_BLOCK, 8))


# What a step of 4 ranks at the released sizes compiles, for the test that all of it compiles without spills.
_RELEASED = _Sizes(hidden=5120, hc=4, sinkhorn_iterations=20, hc_eps=1e-6, norm_eps=1e-20, taps=3)
SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    (_MIXES, {"HIDDEN": _RELEASED.hidden, "HC": _RELEASED.hc}),
    *(
        (
            _BOUNDARY,
            _constants(
                _RELEASED,
                tiling(_RELEASED.hidden, rows),
                rows_per_cluster(rows, tiling(_RELEASED.hidden, rows).cluster, engram=engram),
                {"SOURCE": source, "WORLD": 4, "SLICES": 40, "MIXES_EARLY": source == _FROM_SUBLAYER},
                engram=engram,
            )[0],
        )
        for rows in (6, 48, 192)
        for source, engram in (
            (_FROM_EMBEDDING, False),
            (_FROM_SUBLAYER, False),
            (_FROM_SUBLAYER, True),
            (_FROM_MAIN, False),
        )
    ),
]
