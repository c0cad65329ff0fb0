"""The launches of skinny products: `product.cuh` for the chain, `stream.cu` for big weights, `quantize.cu`.

Owns the choice of a launch's shape and the check of every operand. Leaves to the caller: all buffers, and which
products share a launch. Layouts: activations in `common.cuh`, weights in `pack.py`, whose names are found here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashstep import jit
from flashstep.stages.boundary.cuda import MIX_SHARED_BYTES
from flashstep.stages.dense.pack import GROUP, TILE, Kind, PackedWeight
from flashstep.stages.dense.pack import pack_bf16 as pack_bf16
from flashstep.stages.dense.pack import pack_fp8 as pack_fp8
from flashstep.stages.dense.pack import random_packed as random_packed
from flashstep.stages.dense.pack import unpack_bf16 as unpack_bf16
from flashstep.stages.dense.pack import unpack_fp8 as unpack_fp8

PROLOGUE_ROWS = 8  # up to here a product can quantize its input itself
MAX_ROWS = 192
MAX_SEGMENTS = 5
MAX_PEERS = 8

# The kinds and output forms of operands.cuh, output.cuh and product.cuh.
_FP8, _FP8_AT_BF16, _BF16 = range(3)
_TO_BF16, _TO_F32, _TO_PEERS, _TO_FRAGMENTS, _TO_SCORES, _TO_SQUARED = range(6)
_NO_PROLOGUE, _QUANTIZE, _NORM_QUANTIZE = range(3)
_HELD, _HELD_ALONE = 12, 16  # units of mma.sync in a warp's registers: two blocks a multiprocessor, or one
_GROUP_BYTES = {_FP8: 516, _FP8_AT_BF16: 516, _BF16: 1024}

_PRODUCT = [
    ("weight", f"const u8*[{MAX_SEGMENTS}]"),
    ("x", f"const void*[{MAX_SEGMENTS}]"),
    ("x_scales", f"const u8*[{MAX_SEGMENTS}]"),
    ("out", f"void*[{MAX_SEGMENTS}]"),
    ("out_scales", f"u8*[{MAX_SEGMENTS}]"),
    ("peers", f"float*[{MAX_PEERS}]"),
    ("squares", "float*"),
    ("x_squares", "const float*"),
    ("norm", "const float*"),
    ("rows", "int"),
]
_MIXES = [("stream", "const bf16*"), ("fn", "const float*"), ("partials", "float*"), ("slices", "int")]
_WINDOW = [
    ("low", "const bf16*"),
    ("low_stride", "int"),
    ("low_column", "int"),
    ("kv_norm", "const bf16*"),
    ("window_eps", "float"),
    ("frequencies", "const float*"),
    ("row_position", "const i32*"),
    ("row_slot", "const i32*"),
    ("window_codes", "u8*"),
    ("window_scales", "u8*"),
    ("ring", "int"),
]
PRODUCT = jit.Source("stages/dense/product.cu", {"product": jit.Params("Product", _PRODUCT)}, hot=["product"])
PRODUCT_MIXES = jit.Source(
    "stages/dense/product_mixes.cu",
    {"product_mixes": jit.Params("ProductMixes", _PRODUCT + _MIXES)},
    hot=["product_mixes"],
)
PRODUCT_WINDOW = jit.Source(
    "stages/dense/product_window.cu",
    {"product_window": jit.Params("ProductWindow", _PRODUCT + _WINDOW)},
    hot=["product_window"],
)
STREAM = jit.Source(
    "stages/dense/stream.cu",
    {
        "stream": jit.Params(
            "Stream",
            [
                ("weight", "const u8*"),
                ("x", "const void*"),
                ("x_scales", "const u8*"),
                ("out", "void*"),
                ("peers", f"float*[{MAX_PEERS}]"),
                ("rows", "int"),
            ],
        )
    },
    hot=["stream"],
)
_QUANTIZE_FIELDS = [
    ("x", "const bf16*"),
    ("squares", "const float*"),
    ("norm", "const float*"),
    ("codes", "u8*"),
    ("scales", "u8*"),
    ("rows", "int"),
]
QUANTIZE = jit.Source(
    "stages/dense/quantize.cu", {"quantize": jit.Params("Quantize", _QUANTIZE_FIELDS)}, hot=["quantize"]
)
QUANTIZE_WINDOW = jit.Source(
    "stages/dense/quantize_window.cu",
    {"quantize_window": jit.Params("QuantizeWindow", _QUANTIZE_FIELDS + _WINDOW)},
    hot=["quantize_window"],
)


# ---- operands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8:
    """fp8 fragments: `codes` uint8 [row tiles, columns / 16, 8, 16], `scales` uint8 [row tiles, columns / 32, 8].

    As an output of a product, the results from column `column` (a multiple of 32) on: rounded to bf16, then quantized.
    """

    codes: Tensor
    scales: Tensor
    column: int = 0

    @property
    def columns(self) -> int:
        """Columns of a row."""
        return self.codes.shape[1] * 16


@dataclass(frozen=True)
class Bf16:
    """bf16 fragments: `values` bfloat16 or 16-bit integers [row tiles, columns / 8, 8, 8]."""

    values: Tensor

    @property
    def columns(self) -> int:
        """Columns of a row."""
        return self.values.shape[1] * 8


@dataclass(frozen=True)
class Latent:
    """bf16 rows `values` [rows, stride] whose first columns (as many as the weight has) are quantized for the product.

    `norm` float32 [columns]: behind an RMS norm with `eps`, whose `squares` the product that wrote the rows has left
    (`Rows.squares`). Above PROLOGUE_ROWS rows a kernel of its own in front of the product writes `scratch`: fragments
    of at least that many rows, exactly the weight's columns.
    """

    values: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    squares: Tensor | None = None
    scratch: Fp8 | None = None


@dataclass(frozen=True)
class Rows:
    """Row-major output: `values` [rows, stride] bfloat16 or float32, results from column `column` on.

    `squares` float32 [rows, a multiple of 4]: place i becomes the sum of the squares of results 32 i .. 32 i + 31 as
    rounded to bfloat16, for the norm in front of the next product. Of one segment of a launch.
    """

    values: Tensor
    column: int = 0
    squares: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """A router's scores, sqrt(softplus(result)): `values` float32 [rows, stride], results from column `column` on."""

    values: Tensor
    column: int = 0


@dataclass(frozen=True)
class Peers:
    """Partial sums float32 [rows, stride] on every peer (this device among them), as results of one launch."""

    values: Sequence[Tensor]
    column: int = 0


@dataclass(frozen=True)
class Segment:
    """One product of a launch. fp8 weights with `Bf16` activations are decoded to bf16 (exactly)."""

    weight: PackedWeight
    x: Fp8 | Bf16 | Latent
    out: Rows | Scores | Peers | Fp8


@dataclass(frozen=True)
class Mixes:
    """Slices of hyper-connection mixes on further blocks of a launch: the fields of `Mixes` in boundary/mixes.cuh.

    `stream` bf16 [rows, hc, hidden], `fn` packed by boundary, `partials` float32 [rows, slices, 28].
    """

    stream: Tensor
    fn: Tensor
    partials: Tensor
    slices: int


@dataclass(frozen=True)
class Window:
    """Window entries on a further block a row: the fields of `WindowWrite` in attention/window.cuh.

    `low` bf16 [rows, stride] holds the latents from `column` on; `ring` 0: `codes`, `scales` are [rows, ..].
    """

    low: Tensor
    column: int
    kv_norm: Tensor
    eps: float
    frequencies: Tensor
    row_position: Tensor
    row_slot: Tensor
    codes: Tensor
    scales: Tensor
    ring: int

    @property
    def constants(self) -> dict[str, jit.Constant]:
        """What kernels that write the entries are compiled with."""
        return {"HEAD_DIM": self.codes.shape[-1], "ROPE": 2 * self.frequencies.shape[0]}

    @property
    def fields(self) -> dict[str, Any]:
        """Their parameters."""
        return {
            "low": self.low,
            "low_stride": self.low.shape[1],
            "low_column": self.column,
            "kv_norm": self.kv_norm,
            "window_eps": self.eps,
            "frequencies": self.frequencies,
            "row_position": self.row_position,
            "row_slot": self.row_slot,
            "window_codes": self.codes,
            "window_scales": self.scales,
            "ring": self.ring,
        }


@dataclass(frozen=True)
class Shape:
    """How a product is cut. `tiles_*`: tiles of 16 outputs a block, by weight kind; `cluster`: blocks that share K.

    `row_tiles`: tiles of 8 rows a pass. `wgmma`: where the machine has it, use it: up to 8 rows for fp8 x fp8, with 4
    `tiles_fp8`; above for all kinds, with 4 tiles or 8.
    """

    warps: int = 8
    blocks_per_sm: int = 2
    cluster: int = 1
    tiles_fp8: int = 1
    tiles_bf16: int = 1
    row_tiles: int = 1
    wgmma: bool = False


# ---- launches -------------------------------------------------------------------------------------------------------

_SLICE = 40  # groups of K a block takes by wgmma: 80 registers of weights, two blocks fit a multiprocessor
# More rows, a block alone on its multiprocessor: groups whose weights a lane holds, and tiles of 8 rows of a pass.
_WIDE_FP8, _WIDE_BF16, _WIDE_TILES = 32, 20, 6
_UNITS = 20  # of a warp by mma.sync: what exceeds its registers is decoded in shared memory, 8 KB a unit
_RESIDENT_BLOCKS = 264  # two on each of 132 multiprocessors
_MULTIPROCESSORS = 132


def product(
    device: torch.device,
    segments: Sequence[Segment],
    rows: int,
    *,
    stage: str,
    extra: Mixes | Window | None = None,
    shape: Shape | None = None,
    late_trigger: bool = False,
    wgmma: bool = True,
) -> list[jit.Launch]:
    """The launches that compute all `segments`, which share the number of columns, for `rows` rows.

    One launch, or two where a `Latent` has more rows than the prologue takes. Rows from `rows` on are never written.
    `shape` replaces the choice of `choose_shape`, to which `wgmma` goes. `late_trigger`: the kernel behind may start
    when this one's wait is over instead of at once, so that what waits there stays out of the way of what comes before.
    ValueError where operands do not fit each other.
    """
    _check(segments, rows)
    launches = []
    x = segments[0].x
    if isinstance(x, Latent) and rows > PROLOGUE_ROWS:
        if x.scratch is None:
            raise ValueError(f"{rows} rows of a Latent need scratch")
        window = extra if isinstance(extra, Window) else None  # not behind the product's waves of blocks
        launches += quantize(device, x, x.scratch, rows, stage=stage, window=window)
        extra = None if window else extra
        segments = [replace(segment, x=x.scratch) for segment in segments]
    shape = shape or choose_shape(segments, rows, wgmma=wgmma and has_wgmma(device))
    plan = plan_product(segments, rows, extra, shape, late_trigger=late_trigger)
    return [*launches, plan.launch(device, stage)]


@dataclass(frozen=True)
class Plan:
    """A launch before it is compiled."""

    source: jit.Source
    kernel: str
    constants: dict[str, jit.Constant]
    fields: dict[str, Any]
    grid: int
    block: int
    shared: int
    cluster: int
    nbytes: int

    def launch(self, device: torch.device, stage: str) -> jit.Launch:
        """Compile and bind."""
        return self.source.build(device, **self.constants).launch(
            self.kernel,
            grid=self.grid,
            block=self.block,
            shared=self.shared,
            cluster=self.cluster,
            stage=stage,
            nbytes=self.nbytes,
            **self.fields,
        )


def plan_product(
    segments: Sequence[Segment],
    rows: int,
    extra: Mixes | Window | None,
    shape: Shape,
    *,
    late_trigger: bool = False,
) -> Plan:
    """The launch of `product`; needs no device."""
    columns = _check(segments, rows)
    x = segments[0].x
    prologue = _NO_PROLOGUE if not isinstance(x, Latent) else _QUANTIZE if x.norm is None else _NORM_QUANTIZE

    constants: dict[str, jit.Constant] = {
        "COLUMNS": columns,
        "SEGMENTS": len(segments),
        "WARPS": shape.warps,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
        "CLUSTER": shape.cluster,
        "TILES_FP8": shape.tiles_fp8,
        "TILES_BF16": shape.tiles_bf16,
        "ROW_TILES": shape.row_tiles,
        "PASSES": -(-rows // (8 * shape.row_tiles)),
        "PROLOGUE": prologue,
        "X_STRIDE": x.values.shape[1] if isinstance(x, Latent) else 0,
        "X_SQUARES": x.squares.shape[1] if isinstance(x, Latent) and x.squares is not None else 0,
        "EPS": float(x.eps) if isinstance(x, Latent) else 0.0,
        "WGMMA": shape.wgmma,
        "LATE_TRIGGER": late_trigger,
        "PEERS": 0,
        "SQUARES": 0,
    }
    fields: dict[str, Any] = {name: [] for name in ("weight", "x", "x_scales", "out", "out_scales", "peers")}
    fields["squares"] = None
    blocks = 0
    for s in range(MAX_SEGMENTS):
        described = dict.fromkeys(("KIND", "OUTPUTS", "FORM", "STRIDE", "COLUMN"), 0)
        if s < len(segments):
            segment = segments[s]
            kind = _kind(segment)
            described = {"KIND": kind, "OUTPUTS": segment.weight.outputs, **_output(segment.out, fields, constants)}
            fields["weight"].append(segment.weight.data)
            fields["x"].append(segment.x.codes if isinstance(segment.x, Fp8) else segment.x.values)
            fields["x_scales"].append(segment.x.scales if isinstance(segment.x, Fp8) else None)
            blocks += -(-segment.weight.outputs // (TILE * _tiles(shape, kind))) * shape.cluster
        constants.update({f"{name}_{s}": value for name, value in described.items()})
    fields["norm"] = x.norm if isinstance(x, Latent) else None
    fields["x_squares"] = x.squares if isinstance(x, Latent) else None
    fields["rows"] = rows
    nbytes = sum(segment.weight.nbytes for segment in segments)
    shared = _product_shared(segments, columns, shape, prologue, rows)
    constants["SHARED"] = shared

    source, kernel = PRODUCT, "product"
    if isinstance(extra, Mixes):
        source, kernel = PRODUCT_MIXES, "product_mixes"
        hc, hidden = extra.stream.shape[1:]
        constants.update(HC=hc, HIDDEN=hidden)
        fields.update(stream=extra.stream, fn=extra.fn, partials=extra.partials, slices=extra.slices)
        shared = max(shared, MIX_SHARED_BYTES)
        nbytes += extra.fn.numel() * 4
        # Blocks that would wait for room take two slices each instead.
        mixing = extra.slices if blocks + extra.slices <= _RESIDENT_BLOCKS else -(-extra.slices // 2)
        blocks += -(-mixing // shape.cluster) * shape.cluster
    elif isinstance(extra, Window):
        source, kernel = PRODUCT_WINDOW, "product_window"
        constants.update(extra.constants)
        fields.update(extra.fields)
        blocks += -(-rows // shape.cluster) * shape.cluster
    return Plan(source, kernel, constants, fields, blocks, 32 * shape.warps, shared, shape.cluster, nbytes)


def choose_shape(segments: Sequence[Segment], rows: int, *, wgmma: bool = True) -> Shape:
    """How to cut a launch: as few blocks share K as its weights fit registers, and multiprocessors are busy evenly.

    `wgmma`: use it where the machine has it.
    """
    if wgmma and rows > PROLOGUE_ROWS:
        if (wide := _wide_shape(segments, rows)) is not None:
            return wide
        wgmma = False
    kinds = {_kind(segment) for segment in segments}
    groups = -(-segments[0].weight.columns // GROUP)
    few = rows <= PROLOGUE_ROWS
    row_tiles = -(-rows // 8)
    tiles = {_FP8: 4, _FP8_AT_BF16: 4, _BF16: 1 if kinds == {_BF16} else 2}

    def units(kind: int, cluster: int) -> int:
        return tiles[kind] * -(-_slice(groups, cluster, 8) // 8)

    def fits(cluster: int) -> bool:
        by_wgmma = wgmma and _FP8 in kinds
        most = max((units(kind, cluster) for kind in kinds if not (kind == _FP8 and wgmma)), default=0)
        return most <= _UNITS and not (by_wgmma and _slice(groups, cluster, 8) > _SLICE)

    def time(cluster: int) -> int:
        """Of the busiest multiprocessor, in groups of K; two blocks of few rows share one without loss."""
        blocks = _blocks(segments, tiles) * cluster
        return -(-blocks // (2 * _MULTIPROCESSORS if few else _MULTIPROCESSORS)) * (_slice(groups, cluster, 8) + 8)

    # On an H200, few rows: wo_b took 4.6 us in clusters of three and 2.9 in clusters of two; clusters of eight made low
    # take 5.5 us in the step instead of 3.0, wo_a 6.5 instead of 3.4.
    clusters = [1] if few and isinstance(segments[0].x, Latent) else [1, 2, 4] if few else [1, 2, 4, 8]
    options = [cluster for cluster in clusters if fits(cluster)]
    if not options:  # long rows behind a norm: one tile, half of whose units lie in shared memory
        grouped = any(isinstance(segment.out, Fp8) or _squares(segment.out) is not None for segment in segments)
        return Shape(
            cluster=clusters[-1], row_tiles=1 if few else min(row_tiles, 3), tiles_fp8=2 if grouped else 1, tiles_bf16=1
        )
    return Shape(
        blocks_per_sm=2 if few else 1,
        cluster=min(options, key=time),
        tiles_fp8=4,
        tiles_bf16=tiles[_BF16],
        row_tiles=min(row_tiles, 3),
        wgmma=wgmma and _FP8 in kinds,
    )


def _wide_shape(segments: Sequence[Segment], rows: int) -> Shape | None:
    """Of wide.cuh, by a fit to times of 8 shapes at 48 and 192 rows on an H200; None for more columns than it takes."""
    kinds = {_kind(segment) for segment in segments}
    columns = _check(segments, rows)
    most_groups = _WIDE_FP8 if kinds == {_FP8} else _WIDE_BF16
    row_tiles = -(-rows // 8)
    options: list[tuple[float, Shape]] = []
    for tiles in (4, 8):
        for cluster in (1, 2, 4, 8):
            part = _slice(columns // GROUP, cluster, 8)
            lane_groups = part * tiles // 8
            if lane_groups > most_groups:
                continue
            passes = -(-row_tiles // _WIDE_TILES)
            if passes > 1 and lane_groups > 24:  # weights take half the registers: fewer rows a pass
                passes = -(-row_tiles // (_WIDE_TILES - 1))
            while True:
                each = -(-row_tiles // passes)
                shape = Shape(
                    blocks_per_sm=1, cluster=cluster, tiles_fp8=tiles, tiles_bf16=tiles, row_tiles=each, wgmma=True
                )
                shared = _product_shared(segments, columns, shape, _NO_PROLOGUE, rows)
                if shared <= jit.MAX_SHARED or each == 1:
                    break
                passes += 1
            if shared > jit.MAX_SHARED:
                continue
            waves = -(-_blocks(segments, dict.fromkeys(kinds, tiles)) * cluster // _MULTIPROCESSORS)
            # Microseconds of a full pass: products, copies of activations, exchange of sums.
            pass_us = 0.08 * lane_groups + 0.016 * part * (1 if kinds == {_FP8} else 2)
            pass_us += {1: 0.0, 2: 0.5, 4: 0.6, 8: 1.5}[cluster]
            options.append((waves * (1.5 + passes * (0.6 + pass_us * each / _WIDE_TILES)), shape))
    return min(options, key=lambda option: option[0])[1] if options else None


def _blocks(segments: Sequence[Segment], tiles: dict[int, int]) -> int:
    """Blocks, or clusters, that divide the outputs of all segments among them."""
    return sum(-(-segment.weight.outputs // (TILE * tiles[_kind(segment)])) for segment in segments)


def stream_product(
    device: torch.device,
    weight: PackedWeight,
    x: Fp8 | Bf16,
    out: Rows | Peers,
    rows: int,
    *,
    stage: str,
    tiles: int | None = None,
    blocks: int | None = None,
) -> list[jit.Launch]:
    """One product whose weight is large (head, main_proj, Engram wkv): persistent blocks, a ring of stages.

    `tiles` (1, 2, 4 or 8 tiles of 16 outputs a round) and `blocks` replace the choice, which is a product of the
    chain's kind where that is faster. ValueError as for `product`.
    """
    segment = Segment(weight, x, out)
    # The ring copies activation scales by 16 bytes. For many rows wgmma is worth more than the ring.
    impossible = isinstance(x, Fp8) and x.columns % (2 * GROUP) != 0
    slower = isinstance(x, Fp8) and rows > PROLOGUE_ROWS and has_wgmma(device)
    if impossible or (slower and tiles is None and blocks is None):
        return product(device, [segment], rows, stage=stage)
    plan = plan_stream(segment, rows, blocks or _multiprocessors(device), tiles)
    return [plan.launch(device, stage)]


def plan_stream(segment: Segment, rows: int, blocks: int, tiles: int | None = None) -> Plan:
    """The launch of `stream_product`; needs no device."""
    columns, kind = _check([segment], rows), _kind(segment)
    weight, x = segment.weight, segment.x
    count = -(-weight.outputs // TILE)
    blocks = min(blocks, count)
    if tiles is None:
        tiles = next((t for t in (8, 4) if count >= 2 * t * blocks), 2 if count < 2 * blocks else 4)
    row_tiles = -(-rows // 8)
    stage_groups = min((64 if kind != _BF16 else 32) // tiles, 16)
    if row_tiles > 8:
        stage_groups = max(stage_groups // 2, 2 if kind == _BF16 else 4)
    fragment = 256 + 8 if kind == _FP8 else 512
    stage_bytes = stage_groups * (tiles * _GROUP_BYTES[kind] + row_tiles * fragment)
    sums = 8 * 8 * 20 * 4
    stages = min(8, (jit.MAX_SHARED - sums - 1024) // stage_bytes)
    shared = stages * stage_bytes + sums + 16 * stages
    fields: dict[str, Any] = {"out": [], "out_scales": [], "peers": []}
    constants: dict[str, jit.Constant] = {
        "COLUMNS": columns,
        "KIND": kind,
        "OUTPUTS": weight.outputs,
        "PEERS": 0,
        "SQUARES": 0,
        "ROW_TILES": row_tiles,
        "TILES": tiles,
        "STAGE_GROUPS": stage_groups,
        "STAGES": stages,
        "SHARED": shared,
    }
    constants.update(_output(segment.out, fields, constants))
    launch_fields = {
        "weight": weight.data,
        "x": x.codes if isinstance(x, Fp8) else x.values,
        "x_scales": x.scales if isinstance(x, Fp8) else None,
        "out": fields["out"][0],
        "peers": fields["peers"],
        "rows": rows,
    }
    return Plan(STREAM, "stream", constants, launch_fields, blocks, 288, shared, 1, weight.nbytes)


def quantize(
    device: torch.device, x: Latent, out: Fp8, rows: int, *, stage: str, window: Window | None = None
) -> list[jit.Launch]:
    """fp8 fragments `out` of the first columns (as many as `out` has) of `x`, behind its norm if it has one.

    The bits are those of a product's prologue. Rows from `rows` on are not written. `window`: its entries too.
    """
    columns = out.columns
    if x.norm is not None:
        _check_squares(x, columns, rows)
    if columns > x.values.shape[1] or x.values.shape[0] < rows or (x.norm is not None and x.norm.numel() != columns):
        raise ValueError(f"{columns} columns of {rows} rows from {tuple(x.values.shape)}, norm of {x.norm is not None}")
    if x.values.shape[1] % 8:
        raise ValueError(f"rows of {x.values.shape[1]} columns: expected a multiple of 8")
    constants: dict[str, jit.Constant] = {
        "COLUMNS": columns,
        "X_STRIDE": x.values.shape[1],
        "NORM": x.norm is not None,
        "SQUARES": 0 if x.squares is None else x.squares.shape[1],
        "EPS": float(x.eps),
    }
    fields: dict[str, Any] = {
        "x": x.values,
        "squares": x.squares,
        "norm": x.norm,
        "codes": out.codes,
        "scales": out.scales,
        "rows": rows,
    }
    grid = -(-rows // 8) * -(-columns // 256)
    if window is not None:
        constants.update(window.constants)
        fields.update(window.fields)
        grid += rows
    module = (QUANTIZE if window is None else QUANTIZE_WINDOW).build(device, **constants)
    return [
        module.launch(
            "quantize" if window is None else "quantize_window",
            grid=grid,
            block=256,
            shared=1024,
            cluster=1,
            stage=stage,
            nbytes=0,
            **fields,
        )
    ]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _check(segments: Sequence[Segment], rows: int) -> int:
    """The columns that all segments share, rounded up to whole groups."""
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise ValueError(f"{len(segments)} segments: expected 1..{MAX_SEGMENTS}")
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows: expected 1..{MAX_ROWS}")
    widths = {segment.weight.columns for segment in segments}
    if len(widths) > 1:
        raise ValueError(f"weights of one launch have {sorted(widths)} columns: expected one number")
    columns = -(-segments[0].weight.columns // GROUP) * GROUP
    latents = {id(segment.x) for segment in segments if isinstance(segment.x, Latent)}
    if latents and (len(latents) > 1 or not all(isinstance(segment.x, Latent) for segment in segments)):
        raise ValueError("a Latent is the input of all segments of its launch")
    row_tiles = -(-rows // 8)
    for segment in segments:
        x, out = segment.x, segment.out
        if isinstance(x, Latent):
            if x.values.shape[0] < rows or x.values.shape[1] < columns or x.values.shape[1] % 8:
                raise ValueError(f"Latent {tuple(x.values.shape)}: expected {rows} rows, {columns} columns or more")
            if x.norm is not None:
                _check_squares(x, columns, rows)
        else:
            tensor = x.codes if isinstance(x, Fp8) else x.values
            wanted = (columns // 16, 8, 16) if isinstance(x, Fp8) else (columns // 8, 8, 8)
            if tuple(tensor.shape[1:]) != wanted or tensor.shape[0] < row_tiles:
                raise ValueError(f"activations {tuple(tensor.shape)}: expected [{row_tiles} or more, *{wanted}]")
            if isinstance(x, Fp8) and tuple(x.scales.shape) != (tensor.shape[0], columns // 32, 8):
                raise ValueError(f"scales {tuple(x.scales.shape)}: expected {(tensor.shape[0], columns // 32, 8)}")
        outputs = segment.weight.outputs
        if isinstance(out, Fp8):
            if outputs % GROUP or out.column % GROUP or out.column + outputs > out.columns:
                raise ValueError(
                    f"{outputs} outputs at column {out.column} of {out.columns} fp8: not whole groups of 32"
                )
            continue
        if isinstance(out, Rows) and out.squares is not None:
            shape = tuple(out.squares.shape)
            if out.values.dtype != torch.bfloat16 or outputs % GROUP:
                raise ValueError(f"squares of {outputs} results in {out.values.dtype}: expected whole groups, bfloat16")
            if shape[0] < rows or shape[1] * GROUP < outputs or shape[1] % 4:
                raise ValueError(
                    f"squares {shape}: expected {rows} rows of {outputs // GROUP} or more, a multiple of 4"
                )
        for tensor in out.values if isinstance(out, Peers) else [out.values]:
            if tensor.shape[0] < rows or tensor.shape[1] < out.column + outputs:
                raise ValueError(f"output {tuple(tensor.shape)}: expected {rows} x {out.column + outputs} or more")
    return columns


def _squares(out: Rows | Scores | Peers | Fp8) -> Tensor | None:
    return out.squares if isinstance(out, Rows) else None


def _check_squares(x: Latent, columns: int, rows: int) -> None:
    """Of a Latent behind a norm."""
    assert x.norm is not None
    if x.norm.shape != (columns,):
        raise ValueError(f"norm {tuple(x.norm.shape)}: expected {columns}")
    shape = None if x.squares is None else tuple(x.squares.shape)
    if shape is None or shape[0] < rows or shape[1] * GROUP < columns or shape[1] % 4:
        raise ValueError(f"squares {shape}: a norm needs {rows} rows of {columns // GROUP} or more, a multiple of 4")


def _kind(segment: Segment) -> int:
    if segment.weight.kind == "bf16":
        if not isinstance(segment.x, Bf16):
            raise ValueError("bf16 weights take bf16 activations")
        return _BF16
    return _FP8_AT_BF16 if isinstance(segment.x, Bf16) else _FP8


def _output(
    out: Rows | Scores | Peers | Fp8, fields: dict[str, Any], constants: dict[str, jit.Constant]
) -> dict[str, int]:
    """Append the output's pointers to `fields`; its FORM, STRIDE and COLUMN."""
    if isinstance(out, Peers):
        if fields["peers"]:
            raise ValueError("one segment of a launch goes to peers")
        fields["peers"] = list(out.values)
        fields["out"].append(None)
        constants["PEERS"] = len(out.values)
        form, stride = _TO_PEERS, out.values[0].shape[1]
    elif isinstance(out, Fp8):
        fields["out"].append(out.codes)
        form, stride = _TO_FRAGMENTS, out.columns
    elif isinstance(out, Scores):
        fields["out"].append(out.values)
        form, stride = _TO_SCORES, out.values.shape[1]
    elif out.squares is not None:
        if fields["squares"] is not None:
            raise ValueError("one segment of a launch leaves squares")
        fields["out"].append(out.values)
        fields["squares"] = out.squares
        constants["SQUARES"] = out.squares.shape[1]
        form, stride = _TO_SQUARED, out.values.shape[1]
    else:
        fields["out"].append(out.values)
        form, stride = _TO_BF16 if out.values.dtype == torch.bfloat16 else _TO_F32, out.values.shape[1]
    fields["out_scales"].append(out.scales if isinstance(out, Fp8) else None)
    return {"FORM": form, "STRIDE": stride, "COLUMN": out.column}


def _tiles(shape: Shape, kind: int) -> int:
    return shape.tiles_bf16 if kind == _BF16 else shape.tiles_fp8


def _slice(groups: int, cluster: int, warps: int) -> int:
    """Groups of a block (product.cuh, SLICE)."""
    warpgroups, share = warps // 4, -(-groups // cluster)
    return -(-share // warpgroups) * warpgroups


def _product_shared(segments: Sequence[Segment], columns: int, shape: Shape, prologue: int, rows: int) -> int:
    """Bytes of shared memory (product.cuh checks that they are enough)."""
    groups, passes = columns // GROUP, -(-rows // (8 * shape.row_tiles))
    part = _slice(groups, shape.cluster, shape.warps)
    held = _HELD if shape.blocks_per_sm > 1 else _HELD_ALONE
    buffers = 2 if passes > 1 else 1
    sums = mail = activations = over = 0
    wide = shape.wgmma and rows > PROLOGUE_ROWS
    for kind in {_kind(segment) for segment in segments}:
        by_wgmma = shape.wgmma and not wide and kind == _FP8
        tiles = _tiles(shape, kind)
        items = shape.row_tiles * 8 * tiles * 4
        share = -(-(items // 8) // shape.cluster) * 8
        senders = shape.cluster * (shape.warps // 4 if by_wgmma else 1)
        parts = shape.warps // tiles if wide else shape.warps // 4 if by_wgmma else shape.warps
        sums = max(sums, parts * shape.row_tiles * 8 * (16 * tiles + 4) * 4)
        if shape.cluster > 1:
            mail = max(mail, buffers * senders * share * 16)
        if wide:
            group = 256 + 32 if kind == _FP8 else 512
            activations = max(activations, buffers * shape.row_tiles * part * group + shape.warps * part * 4)
        elif by_wgmma:
            activations = max(activations, part * (256 + 32) + part * 16)
        else:
            units = tiles * -(-part // shape.warps)
            over = max(over, shape.warps * (units - min(units, held)) * 1024)
            if prologue != _NO_PROLOGUE:
                activations = max(activations, part * (256 + 8))
    norm = columns * 4 + 256 if prologue == _NORM_QUANTIZE else 0  # weights, sums of squares
    return sums + mail + norm + 32 + -(-activations // 16) * 16 + over


def has_wgmma(device: torch.device) -> bool:
    """Whether kernels of `device` may use wgmma."""
    return jit.emulated(device) or torch.cuda.get_device_capability(device)[0] == 9


def _multiprocessors(device: torch.device) -> int:
    if jit.emulated(device):
        return 4  # so that tests see blocks of several rounds
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- what a step compiles -------------------------------------------------------------------------------------------


def _released(rows: int, *, wgmma: bool = True) -> list[Plan]:
    """The launches of one rank of four at the released sizes, for the test that all of it compiles without spills."""

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def weight(outputs: int, columns: int, kind: Kind = "fp8") -> PackedWeight:
        groups = columns // GROUP
        return PackedWeight(empty(outputs // TILE, groups * (516 if kind == "fp8" else 1024)), outputs, columns, kind)

    tiles = -(-rows // 8)

    def fp8(columns: int) -> Fp8:
        return Fp8(empty(tiles, columns // 16, 8, 16), empty(tiles, columns // 32, 8))

    def bf16(columns: int) -> Bf16:
        return Bf16(empty(tiles, columns // 8, 8, 8, dtype=torch.bfloat16))

    def floats(columns: int) -> Tensor:
        return empty(rows, columns, dtype=torch.float32)

    low = empty(rows, 1280 + 512, dtype=torch.bfloat16)
    x, x_bf16 = fp8(5120), bf16(5120)
    squares = floats(40)
    plain = [
        Segment(weight(1280, 5120), x, Rows(low, squares=squares)),
        Segment(weight(512, 5120), x, Rows(low, 1280)),
    ]
    source = [Segment(weight(n, 5120, "bf16"), x_bf16, Rows(floats(n))) for n in (512, 512, 32)]
    mixes = Mixes(empty(rows, 4, 5120, dtype=torch.bfloat16), floats(1), floats(1), 40)
    latent = Latent(low, floats(1280)[0], 1e-20, squares) if rows <= PROLOGUE_ROWS else fp8(1280)
    queries = [Segment(weight(n, 1280), latent, Rows(empty(rows, n, dtype=torch.bfloat16))) for n in (8192, 4096)]
    ints = empty(rows, dtype=torch.int32)
    window = Window(low, 1280, empty(512, dtype=torch.bfloat16), 1e-20, floats(32)[0], ints, ints,
                    empty(8, 160, 512), empty(8, 160, 16), 160)  # fmt: skip
    u = fp8(2048)
    wo_a = [Segment(weight(1024, 4096), bf16(4096), replace(u, column=1024 * g)) for g in range(2)]
    peers = Peers([floats(5120)] * 4)
    plans = [
        plan_product(segments, rows, extra, choose_shape(segments, rows, wgmma=wgmma))
        for segments, extra in (
            (plain, mixes),
            (plain + source, mixes),
            (queries[:1], window if rows <= PROLOGUE_ROWS else None),
            (queries, window if rows <= PROLOGUE_ROWS else None),
            (wo_a, None),
            ([Segment(weight(5120, 2048), u, peers)], None),
            ([Segment(weight(384, 5120, "bf16"), x_bf16, Scores(floats(384)))], mixes),
        )
    ]
    return plans + [
        plan_stream(segment, rows, 132)
        for segment in (
            Segment(weight(32320, 5120, "bf16"), x_bf16, Rows(floats(32320))),
            Segment(weight(25600, 1536), fp8(1536), Peers([floats(25600)] * 4)),
            Segment(weight(5120, 3840), fp8(3840), peers),
        )
    ]


SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    *((plan.source, plan.constants) for rows in (6, 48, 192) for plan in _released(rows)),
    *((plan.source, plan.constants) for rows in (6, 48) for plan in _released(rows, wgmma=False)[:7]),
    (
        QUANTIZE_WINDOW,
        {
            "COLUMNS": 1280,
            "X_STRIDE": 1792,
            "NORM": True,
            "SQUARES": 40,
            "EPS": 1e-20,
            "HEAD_DIM": 512,
            "ROPE": 64,
        },
    ),
    (QUANTIZE, {"COLUMNS": 1280, "X_STRIDE": 1792, "NORM": True, "SQUARES": 40, "EPS": 1e-20}),
    (QUANTIZE, {"COLUMNS": 1536, "X_STRIDE": 1536, "NORM": False, "SQUARES": 0, "EPS": 0.0}),
]
