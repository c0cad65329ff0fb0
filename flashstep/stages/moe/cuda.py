"""Routing and experts for CUDA devices: packing of weights, scratch, launches.

Up to 8 rows take one kernel, `experts.cu`. More rows take four: `route`, `gather` (the list of pairs: an expert and up
to 8 of its rows, with an operand tile each), `gate_up`, `down`. The shared expert is in the same launches, as pairs of
its own that come first.

Sums over K are split over the blocks by the number of distinct experts, so a row's last float32 bits (and what they
round to) depend on which other rows are in the step; equal steps give equal bits. h stays in scratch and has no format
outside this folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstep import jit

MAX_ROWS = 192
TILE_ROWS = 8  # rows of an operand tile; up to so many rows need no gather
ZEROS = ("arrivals", "partial")  # scratch of up to 8 rows that starts as zeros and is left so
_GATHER_THREADS = 512
_GATHERED = ("chosen", "chosen_weights", "list", "pair_rows", "pair_weights", "operands")  # scratch that it touches
_ROUTED_PIECES = (256, 192, 320, 128, 64)  # columns of K in a packed piece, by preference
_SHARED_PIECES = (128, 96, 160, 64, 32)

ROUTE = jit.Source(
    "stages/moe/route.cu",
    kernels={
        "route": jit.Params(
            "Route",
            [
                ("scores", "const float*"),
                ("bias", "const float*"),
                ("row_slot", "const i32*"),
                ("chosen", "i32*"),
                ("chosen_weights", "float*"),
                ("rows", "int"),
            ],
        ),
        "gather": jit.Params(
            "Gather",
            [
                ("chosen", "const i32*"),
                ("chosen_weights", "const float*"),
                ("x_codes", "const u8*"),
                ("x_scales", "const u8*"),
                ("list", "i32*"),
                ("pair_rows", "i32*"),
                ("pair_weights", "float*"),
                ("operands", "u8*"),
                ("rows", "int"),
            ],
        ),
    },
)
EXPERTS = jit.Source(
    "stages/moe/experts.cu",
    kernels={
        "experts": jit.Params(
            "Experts",
            [
                ("scores", "const float*"),
                ("bias", "const float*"),
                ("row_slot", "const i32*"),
                ("x_codes", "const u8*"),
                ("x_scales", "const u8*"),
                ("gate_up", "const u8*"),
                ("shared_gate_up", "const u8*"),
                ("down", "const u8*"),
                ("shared_down", "const u8*"),
                ("list", "i32*"),
                ("h", "u8*"),
                ("partial", "float*"),
                ("arrivals", "u32*"),
                ("out", "float*[8]"),
                ("peers", "int"),
                ("rows", "int"),
            ],
        )
    },
    hot=["experts"],
)
GATE_UP = jit.Source(
    "stages/moe/gate_up.cu",
    kernels={
        "gate_up": jit.Params(
            "GateUp",
            [
                ("operands", "const u8*"),
                ("routed", "const u8*"),
                ("shared_expert", "const u8*"),
                ("list", "const i32*"),
                ("pair_weights", "const float*"),
                ("h", "u8*"),
                ("partial", "float*"),
                ("arrivals", "u32*"),
                ("rows", "int"),
            ],
        )
    },
    hot=["gate_up"],
)
DOWN = jit.Source(
    "stages/moe/down.cu",
    kernels={
        "down": jit.Params(
            "Down",
            [
                ("routed", "const u8*"),
                ("shared_expert", "const u8*"),
                ("list", "const i32*"),
                ("pair_rows", "const i32*"),
                ("h", "const u8*"),
                ("partial", "float*"),
                ("arrivals", "u32*"),
                ("out", "float*[8]"),
                ("peers", "int"),
                ("rows", "int"),
            ],
        )
    },
    hot=["down"],
)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The experts of one layer, of one rank.

    hidden: model width. inner: intermediate columns of this rank. experts, top_k: routed ones. scaling: of the route
    weights. limit: clamp of gate and up.
    """

    hidden: int
    inner: int
    experts: int
    top_k: int
    scaling: float
    limit: float = 10.0

    def __post_init__(self) -> None:
        wrong = [
            text
            for bad, text in (
                (self.hidden % 64, f"hidden {self.hidden}: a multiple of 64"),
                (self.inner % 32, f"inner {self.inner}: a multiple of 32"),
                (self.inner % 64 and self.inner > 320, f"inner {self.inner}: above 320 a multiple of 64"),
                (not 1 <= self.top_k <= min(8, self.experts), f"top_k {self.top_k}: 1..8, at most the experts"),
                (self.experts > _GATHER_THREADS, f"{self.experts} experts: at most {_GATHER_THREADS}"),
            )
            if bad
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Tuning:
    """How a product kernel is built: warpgroups that multiply, stages of its ring, packed pieces of K in a stage."""

    warpgroups: int
    stages: int
    pieces: int


def few_tuning(shape: Shape) -> Tuning:
    """The default for up to 8 rows; pieces are those of a unit of gate and up."""
    build = _few_build(shape, Tuning(3, 1, _pieces(shape.hidden, 2)), True, False)
    stage = _few_build(shape, Tuning(3, 2, _pieces(shape.hidden, 2)), True, False).shared_bytes - build.shared_bytes
    return Tuning(3, min(9, 1 + (jit.MAX_SHARED - build.shared_bytes) // stage), _pieces(shape.hidden, 2))


def gate_up_tuning(shape: Shape) -> Tuning:
    """The default for gate/up of more rows; on an H200 three warpgroups and two pieces took a tenth less time."""
    pieces = _pieces(shape.hidden, 2)
    return Tuning(next(n for n in (3, 2, 1) if shape.inner // 32 % n == 0), 4 // pieces, pieces)


def down_tuning(shape: Shape, rows: int) -> Tuning:
    """The default for down of more rows, which need the shared memory for their sums: fewer warpgroups multiply."""
    pieces = _pieces(shape.inner, 3)
    most = 4 if rows <= 48 else 2
    warpgroups = next(n for n in (most, 2, 1) if shape.hidden // 64 % n == 0)
    return Tuning(warpgroups, 5 if pieces == 1 else 2, pieces)


def _pieces(columns: int, most: int) -> int:
    """The most pieces of K, up to `most`, that stages of routed and of shared weights can both hold."""
    routed, shared = (-(-columns // piece(columns)) for piece in (routed_piece, shared_piece))
    return next(n for n in range(most, 0, -1) if routed % n == 0 and shared % n == 0)


def routed_piece(columns: int) -> int:
    """Columns of K in a packed fp4 piece of weights with `columns` inputs, which zeros fill up to whole pieces."""
    padded = -(-columns // 64) * 64
    return next(piece for piece in _ROUTED_PIECES if padded % piece == 0 and (columns % 64 == 0 or padded == piece))


def shared_piece(columns: int) -> int:
    """Columns of K in a packed fp8 piece of weights with `columns` inputs."""
    return next(piece for piece in _SHARED_PIECES if columns % piece == 0)


def routed_piece_bytes(piece: int) -> int:
    """Bytes of a packed fp4 piece of 64 rows and `piece` columns, scales included."""
    return 32 * piece + 2 * piece


def shared_piece_bytes(piece: int) -> int:
    """Bytes of a packed fp8 piece of 64 rows and `piece` columns, scales included."""
    return 64 * piece + 2 * piece


def max_pairs(shape: Shape, rows: int) -> int:
    """Most routed pairs (expert, up to 8 rows) that `rows` rows can make."""
    distinct = min(shape.experts, rows * shape.top_k)
    return distinct if rows <= TILE_ROWS else (rows * shape.top_k + 7 * distinct) // 8


def expected_experts(shape: Shape, rows: int) -> float:
    """Distinct experts of `rows` rows that choose uniformly."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)


# ---- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Packed weights of a layer, uint8: routed [experts, tiles, pieces, bytes], shared [tiles, pieces, bytes]."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor


def pack_gate_up(w1: Tensor, w3: Tensor, s1: Tensor, s3: Tensor) -> Tensor:
    """fp4 gate and up of `n` experts: [n, inner, hidden / 2] bytes, scales [n, inner, hidden / 32] -> packed uint8."""
    return _pack_fp4(_interleave(w1, w3), _interleave(s1, s3))


def pack_down(w2: Tensor, s2: Tensor) -> Tensor:
    """fp4 down of `n` experts: [n, hidden, inner / 2] bytes, scales [n, hidden, inner / 32] -> packed uint8."""
    return _pack_fp4(_split_rows(w2), _split_rows(s2))


def pack_shared_gate_up(w1: Tensor, w3: Tensor, s1: Tensor, s3: Tensor) -> Tensor:
    """fp8 gate and up: [inner, hidden], scales [ceil(inner / 32), hidden / 32] -> packed uint8."""
    rows = w1.shape[0]
    scales = _interleave(_spread_rows(s1, rows)[None], _spread_rows(s3, rows)[None])
    return _pack_fp8(_interleave(w1[None], w3[None]), scales)[0]


def pack_shared_down(w2: Tensor, s2: Tensor) -> Tensor:
    """fp8 down: [hidden, inner], scales [hidden / 32, ceil(inner / 32)] -> packed uint8."""
    return _pack_fp8(_split_rows(w2[None]), _split_rows(_spread_rows(s2, w2.shape[0])[None]))[0]


def unpack_gate_up(packed: Tensor, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inverse of `pack_gate_up`: w1, w3, s1, s3 as uint8."""
    codes, scales = _unpack_fp4(packed, hidden)
    (w1, w3), (s1, s3) = _deinterleave(codes), _deinterleave(scales)
    return w1, w3, s1, s3


def unpack_down(packed: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_down`: w2, s2 as uint8."""
    codes, scales = _unpack_fp4(packed, inner)
    return _join_rows(codes), _join_rows(scales)


def unpack_shared_gate_up(packed: Tensor, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inverse of `pack_shared_gate_up`, codes and scales as uint8."""
    codes, scales = _unpack_fp8(packed[None], hidden)
    (w1, w3), (s1, s3) = _deinterleave(codes), _deinterleave(scales)
    return w1[0], w3[0], s1[0, ::32], s3[0, ::32]


def unpack_shared_down(packed: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_shared_down`, codes and scales as uint8."""
    codes, scales = _unpack_fp8(packed[None], inner)
    return _join_rows(codes)[0], _join_rows(scales)[0, ::32]


def random_packed(device: torch.device, shape: Shape, generator: torch.Generator | None = None) -> Weights:
    """Random packed weights of a layer, made on `device`: every fp4 code, scales of two powers; fp8 codes without NaN.

    Products of inputs of order one are of order one.
    """

    def product(lead: tuple[int, ...], tiles: int, columns: int, fp4: bool) -> Tensor:
        piece = routed_piece(columns) if fp4 else shared_piece(columns)
        size = (routed_piece_bytes if fp4 else shared_piece_bytes)(piece)
        pieces = -(-columns // piece)
        packed = torch.empty((*lead, tiles, pieces, size), dtype=torch.uint8, device=device)
        packed.view(torch.int64).random_(-(2**63), None, generator=generator)
        scales = packed[..., -2 * piece :]
        rms = 2.9 if fp4 else 65.0  # of codes drawn uniformly (fp8: of those that the mask leaves)
        middle = 127 - round(math.log2(rms * columns**0.5))
        if fp4:
            scales.bitwise_and_(1).add_(middle)
        else:
            scales.fill_(middle)  # rows of a block of 32 share their scale
            packed[..., : -2 * piece].bitwise_and_(0xF7)
        return packed

    gate_up_tiles, down_tiles, lead = shape.inner // 32, shape.hidden // 64, (shape.experts,)
    return Weights(
        product(lead, gate_up_tiles, shape.hidden, True),
        product(lead, down_tiles, shape.inner, True),
        product((), gate_up_tiles, shape.hidden, False),
        product((), down_tiles, shape.inner, False),
    )


# Rows of a packed tile of 64 are [warp 4][half 2][8]: a lane holds rows r and r + 8 of its warp's 16. For gate/up the
# halves are gate and up of the same columns.


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[n, rows, k] twice -> [n, tiles, 4, 2, 8, k]."""
    return torch.stack([part.view(torch.uint8).unflatten(1, (-1, 4, 8)) for part in (gate, up)], 3)


def _deinterleave(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :, :, 0].flatten(1, 3), rows[:, :, :, 1].flatten(1, 3)


def _split_rows(weight: Tensor) -> Tensor:
    """[n, rows, k] -> [n, tiles, 4, 2, 8, k]."""
    return weight.view(torch.uint8).unflatten(1, (-1, 4, 2, 8))


def _join_rows(rows: Tensor) -> Tensor:
    return rows.flatten(1, 4)


def _spread_rows(scale: Tensor, rows: int) -> Tensor:
    """One scale per row from one per 32 rows."""
    return scale.view(torch.uint8).repeat_interleave(32, 0)[:rows]


def _word(groups: int) -> int:
    """Scales of a row that lie together."""
    return 4 if groups % 4 == 0 else 2 if groups % 2 == 0 else 1


def _pack_scales(scales: Tensor, groups: int) -> Tensor:
    """[n, tiles, 4, 2, 8, K / 32] -> [n, tiles, pieces, bytes]."""
    split = scales.flatten(2, 4).unflatten(3, (-1, groups // _word(groups), _word(groups)))  # n, tiles, 64, pieces, ...
    return split.permute(0, 1, 3, 4, 2, 5).flatten(3)


def _unpack_scales(packed: Tensor, groups: int) -> Tensor:
    split = packed.unflatten(3, (groups // _word(groups), 64, _word(groups)))
    return split.permute(0, 1, 4, 2, 3, 5).flatten(3).unflatten(2, (4, 2, 8))


def _pack_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    columns = codes.shape[-1] * 2
    piece = routed_piece(columns)
    pad = -columns % piece
    if pad:
        codes = torch.nn.functional.pad(codes, (0, pad // 2))
        scales = torch.nn.functional.pad(scales, (0, pad // 32))
    # n, tiles, warp, half, r, pieces, units, group, part, q, pair of columns
    split = codes.unflatten(-1, (-1, piece // 64, 2, 2, 4, 2))
    low, high = split[:, :, :, 0], split[:, :, :, 1]
    even = (low & 15) | (high << 4)
    odd = (low >> 4) | (high & 0xF0)
    # n, tiles, warp, r, pieces, units, group, part, q, pair, 2 -> n, tiles, pieces, units, warp, r, q, group, part, 4
    units = torch.stack([even, odd], -1).permute(0, 1, 4, 5, 2, 3, 8, 6, 7, 9, 10).flatten(3)
    return torch.cat([units, _pack_scales(scales, piece // 32)], -1)


def _unpack_fp4(packed: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    piece = routed_piece(columns)
    units = packed[..., : 32 * piece].unflatten(3, (piece // 64, 4, 8, 4, 2, 2, 2, 2))
    even, odd = units[..., 0], units[..., 1]
    low = (even & 15) | (odd << 4)
    high = (even >> 4) | (odd & 0xF0)
    # n, tiles, pieces, units, warp, r, q, group, part, pair, half -> n, tiles, warp, half, r, columns / 2
    codes = torch.stack([low, high], -1).permute(0, 1, 4, 10, 5, 2, 3, 7, 8, 6, 9).flatten(5)
    scales = _unpack_scales(packed[..., 32 * piece :], piece // 32)
    return codes[..., : columns // 2], scales[..., : columns // 32]


def _pack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    piece = shared_piece(codes.shape[-1])
    # n, tiles, warp, half, r, pieces, groups, part, q, 4 -> n, tiles, pieces, groups, warp, r, q, part, half, 4
    split = codes.unflatten(-1, (-1, piece // 32, 2, 4, 4))
    units = split.permute(0, 1, 5, 6, 2, 4, 8, 7, 3, 9).flatten(3)
    return torch.cat([units, _pack_scales(scales, piece // 32)], -1)


def _unpack_fp8(packed: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    piece = shared_piece(columns)
    units = packed[..., : 64 * piece].unflatten(3, (piece // 32, 4, 8, 4, 2, 2, 4))
    codes = units.permute(0, 1, 4, 8, 5, 2, 3, 7, 6, 9).flatten(5)
    return codes, _unpack_scales(packed[..., 64 * piece :], piece // 32)


# ---- launches -------------------------------------------------------------------------------------------------------


def num_blocks(device: torch.device) -> int:
    """Blocks of the persistent kernels: one per multiprocessor."""
    return 3 if jit.emulated(device) else torch.cuda.get_device_properties(device).multi_processor_count


def scratch_sizes(
    shape: Shape, rows: int, blocks: int, *, gate_up: Tuning | None = None, down: Tuning | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every scratch tensor of `experts`. `arrivals`, and for up to 8 rows `partial`, start as zeros
    and are left so; layers share them.

    list: [0] routed pairs, [4 + i] the expert of pair i. More than 8 rows: chosen [rows, top_k] (-1: none), its
    weights, pair_rows and pair_weights [pairs, 8], shared pairs first.
    """
    routed, shared = max_pairs(shape, rows), -(-rows // TILE_ROWS)
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "list": ((4 + routed,), torch.int32),
        "h": ((shared + routed, 9 * shape.inner), torch.uint8),
    }
    if rows <= TILE_ROWS:
        return sizes | {
            "partial": ((3, 2 * blocks, 512), torch.float32),
            "arrivals": ((2,), torch.int32),
        }
    first, second = gate_up or gate_up_tuning(shape), down or down_tuning(shape, rows)
    partial = max(2 * first.warpgroups * 512, second.warpgroups * 64 * rows)
    return sizes | {
        "partial": ((2 * blocks, partial), torch.float32),
        "arrivals": ((2 * blocks * max(first.warpgroups, second.warpgroups),), torch.int32),
        "chosen": ((rows, shape.top_k), torch.int32),
        "chosen_weights": ((rows, shape.top_k), torch.float32),
        "pair_rows": ((shared + routed, TILE_ROWS), torch.int32),
        "pair_weights": ((shared + routed, TILE_ROWS), torch.float32),
        "operands": ((shared + routed, 9 * shape.hidden), torch.uint8),
    }


@dataclass(frozen=True)
class _Build:
    """What a product kernel is compiled with and launched with."""

    constants: dict[str, jit.Constant]
    threads: int
    shared_bytes: int


def _constants(shape: Shape, tuning: Tuning, threads: int, wgmma: bool, emulated: bool) -> dict[str, jit.Constant]:
    """Constants of all product kernels; `threads` beside the multiplying ones."""
    threads += tuning.warpgroups * 128
    return {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "LIMIT": float(shape.limit),
        "WARPGROUPS": tuning.warpgroups,
        "STAGES": tuning.stages,
        "PIECES": tuning.pieces,
        "WGMMA": wgmma,
        # The emulator counts whole warpgroups; on a GPU idle warps would cost registers.
        "THREADS": -(-threads // 128) * 128 if emulated else threads,
    }


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def _unit_bytes(columns: int, pieces: int) -> int:
    """Bytes of the larger of the units, of `pieces` pieces, of routed and shared weights."""
    return pieces * max(routed_piece_bytes(routed_piece(columns)), shared_piece_bytes(shared_piece(columns)))


def _unit_columns(columns: int, pieces: int) -> int:
    """Columns of the wider of those units, as far as they exist."""
    return pieces * max(min(routed_piece(columns), columns), shared_piece(columns))


def h_unit_columns(shape: Shape, routed: bool) -> int:
    """Columns of h whose codes and scales lie together where up to 8 rows are served."""
    piece = min(routed_piece(shape.inner), shape.inner) if routed else shared_piece(shape.inner)
    return _pieces(shape.inner, 3) * piece


def _few_build(shape: Shape, tuning: Tuning, wgmma: bool, emulated: bool) -> _Build:
    down_pieces = _pieces(shape.inner, 3)
    slot = _aligned(max(_unit_bytes(shape.hidden, tuning.pieces), _unit_bytes(shape.inner, down_pieces)))
    h_slot = _aligned(9 * _unit_columns(shape.inner, down_pieces))
    barriers = 20 * tuning.stages + 48
    fixed = _aligned(
        barriers + 16 + shape.experts // 8 + 4 * shape.experts + 64 * 4 * (3 + 8) + 256 + 2 * 288 + 8 * 68 * 4 + 96
    )
    fixed += tuning.warpgroups * 2048 + _aligned(max(9 * shape.hidden, tuning.stages * h_slot))
    constants = _constants(shape, tuning, 128 + 64, wgmma, emulated) | {
        "PIECE": routed_piece(shape.hidden),
        "SHARED_PIECE": shared_piece(shape.hidden),
        "DOWN_PIECE": routed_piece(shape.inner),
        "SHARED_DOWN_PIECE": shared_piece(shape.inner),
        "DOWN_PIECES": down_pieces,
        "EXPERTS": shape.experts,
        "TOP_K": shape.top_k,
        "SCALING": float(shape.scaling),
    }
    shared = fixed + tuning.stages * slot
    return _Build({**constants, "SHARED_BYTES": shared}, int(constants["THREADS"]), shared)


def _gate_up_build(shape: Shape, tuning: Tuning, wgmma: bool, emulated: bool) -> _Build:
    constants = _constants(shape, tuning, 32, wgmma, emulated)
    constants |= {"PIECE": routed_piece(shape.hidden), "SHARED_PIECE": shared_piece(shape.hidden)}
    ring = tuning.stages * _aligned(tuning.warpgroups * _unit_bytes(shape.hidden, tuning.pieces))
    header = _aligned(16 * tuning.stages + 32 + 260 * tuning.warpgroups + 64)
    shared = header + 2 * _aligned(9 * shape.hidden) + ring
    return _Build({**constants, "SHARED_BYTES": shared}, int(constants["THREADS"]), shared)


def _down_build(shape: Shape, rows: int, tuning: Tuning, wgmma: bool, emulated: bool) -> _Build:
    constants = _constants(shape, tuning, 32, wgmma, emulated)
    constants |= {"PIECE": routed_piece(shape.inner), "SHARED_PIECE": shared_piece(shape.inner)}
    columns = _unit_columns(shape.inner, tuning.pieces)
    weights = _aligned(tuning.warpgroups * _unit_bytes(shape.inner, tuning.pieces))
    stage = weights + _aligned(8 * columns) + _aligned(columns)
    fixed = _aligned(16 * tuning.stages + 4 * tuning.warpgroups) + tuning.stages * stage
    shared = fixed + tuning.warpgroups * rows * 68 * 4 + 4 * max_pairs(shape, rows)
    return _Build({**constants, "SHARED_BYTES": fixed}, int(constants["THREADS"]), shared)


def _route_constants(shape: Shape) -> dict[str, jit.Constant]:
    return {
        "EXPERTS": shape.experts,
        "TOP_K": shape.top_k,
        "SCALING": float(shape.scaling),
        "HIDDEN": shape.hidden,
        "MAX_ROWS": MAX_ROWS,
        "GATHER_THREADS": _GATHER_THREADS,
    }


def experts(
    device: torch.device,
    shape: Shape,
    rows: int,
    *,
    weights: Weights,
    bias: Tensor,
    scores: Tensor,
    row_slot: Tensor,
    x_codes: Tensor,
    x_scales: Tensor,
    scratch: Mapping[str, Tensor],
    out: Sequence[Tensor],
    blocks: int | None = None,
    wgmma: bool = True,
    few: Tuning | None = None,
    gate_up: Tuning | None = None,
    down: Tuning | None = None,
) -> list[jit.Launch]:
    """Routing and experts of `rows` rows (1..192): the launches, in order.

    bias: [experts] f32. scores: [rows, experts] f32, sqrt(softplus(logit)) (`dense.Scores`). row_slot: [rows] i32,
    < 0: the row chooses no expert. x_codes, x_scales: fp8 fragments of the tiles of 8 rows (rows beyond `rows` finite).
    scratch: tensors of `scratch_sizes`. out: for each peer, where this rank's sums go, [rows, hidden] f32: routed and
    shared experts. wgmma: SM90's product where there is one, instead of the f16 product of every architecture. few:
    how the kernel of up to 8 rows is built; gate_up, down: those of more rows.
    ValueError: rows out of range, no or too many peers.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows: 1..{MAX_ROWS}")
    if not 1 <= len(out) <= 8:
        raise ValueError(f"{len(out)} outputs: one for each of 1..8 peers")
    blocks, emulated = blocks or num_blocks(device), jit.emulated(device)
    visited = expected_experts(shape, rows) / shape.experts
    nbytes = [
        round(routed.nbytes * visited) + shared.nbytes
        for routed, shared in ((weights.gate_up, weights.shared_gate_up), (weights.down, weights.shared_down))
    ]
    if rows <= TILE_ROWS:
        build = _few_build(shape, few or few_tuning(shape), wgmma, emulated)
        launch = EXPERTS.build(device, **build.constants).launch(
            "experts",
            grid=blocks,
            block=build.threads,
            shared=build.shared_bytes,
            together=True,
            stage="experts",
            nbytes=sum(nbytes),
            scores=scores,
            bias=bias,
            row_slot=row_slot,
            x_codes=x_codes,
            x_scales=x_scales,
            gate_up=weights.gate_up,
            shared_gate_up=weights.shared_gate_up,
            down=weights.down,
            shared_down=weights.shared_down,
            list=scratch["list"],
            h=scratch["h"],
            partial=scratch["partial"],
            arrivals=scratch["arrivals"],
            out=list(out),
            peers=len(out),
            rows=rows,
        )
        return [launch]
    module = ROUTE.build(device, **_route_constants(shape))
    pairs = -(-rows // TILE_ROWS) + max_pairs(shape, rows)
    gathered: dict[str, Any] = {name: scratch[name] for name in _GATHERED}
    launches = [
        module.launch(
            "route",
            grid=-(-rows // 8),
            block=256,
            stage="router",
            scores=scores,
            bias=bias,
            row_slot=row_slot,
            chosen=scratch["chosen"],
            chosen_weights=scratch["chosen_weights"],
            rows=rows,
        ),
        module.launch(
            "gather",
            grid=blocks,
            block=_GATHER_THREADS,
            shared=shape.experts * 4 * (MAX_ROWS // 32 + 1) + 256 + 32 * pairs,
            stage="router",
            x_codes=x_codes,
            x_scales=x_scales,
            rows=rows,
            **gathered,
        ),
    ]
    build = _gate_up_build(shape, gate_up or gate_up_tuning(shape), wgmma, emulated)
    launches.append(
        GATE_UP.build(device, **build.constants).launch(
            "gate_up",
            grid=blocks,
            block=build.threads,
            shared=build.shared_bytes,
            stage="gate_up",
            nbytes=nbytes[0],
            operands=scratch["operands"],
            routed=weights.gate_up,
            shared_expert=weights.shared_gate_up,
            list=scratch["list"],
            pair_weights=scratch["pair_weights"],
            h=scratch["h"],
            partial=scratch["partial"],
            arrivals=scratch["arrivals"],
            rows=rows,
        )
    )
    build = _down_build(shape, rows, down or down_tuning(shape, rows), wgmma, emulated)
    launches.append(
        DOWN.build(device, **build.constants).launch(
            "down",
            grid=blocks,
            block=build.threads,
            shared=build.shared_bytes,
            stage="down",
            nbytes=nbytes[1],
            routed=weights.down,
            shared_expert=weights.shared_down,
            list=scratch["list"],
            pair_rows=scratch["pair_rows"],
            h=scratch["h"],
            partial=scratch["partial"],
            arrivals=scratch["arrivals"],
            out=list(out),
            peers=len(out),
            rows=rows,
        )
    )
    return launches


def _released() -> list[tuple[jit.Source, dict[str, jit.Constant]]]:
    """Builds for the released model at TP4, backbone and draft layers: both products, few rows and many."""
    sources: list[tuple[jit.Source, dict[str, jit.Constant]]] = []
    for num_experts, top_k in ((384, 6), (128, 3)):
        shape = Shape(5120, 576, num_experts, top_k, 1.5)
        sources.append((ROUTE, _route_constants(shape)))
        for wgmma in (True, False):
            sources.append((EXPERTS, _few_build(shape, few_tuning(shape), wgmma, False).constants))
            sources.append((GATE_UP, _gate_up_build(shape, gate_up_tuning(shape), wgmma, False).constants))
            down = _down_build(shape, MAX_ROWS, down_tuning(shape, MAX_ROWS), wgmma, False)
            sources.append((DOWN, down.constants))
    return sources


SOURCES = _released()
