"""Launches of the attention kernels: window entries of new rows, and sparse attention (`window.cuh`, `attend.cu`).

Owns the shapes the kernels are compiled for and how many blocks share a row. Buffers belong to the caller; a launch
keeps the tensors it was given. The functions of `reference` that these replace: `write_window` is `window_entry` of
the normed latent; `attend` is the rotation of `project_q`, `attend`, and the rotation back of `project_out`.

Numerics of `attend`: scores, softmax and sums in float32; probabilities are rounded to bf16 against the maximum of a
part of the entries instead of the row's, and scaled in float32 afterwards. Either rounding moves a probability by at
most 2^-9 of itself, so the result stays within 2^-8 (sum_j p_j |v_j|) / (sum_j p_j + sink) of the reference, before
the two roundings of the output to bf16 which both share; blocks that share a row exchange their parts as f16, which
adds a sixteenth of that. A row's bits depend on the number of blocks that share a row, hence on the row count of the
launch, and on nothing else of the other rows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import FP8_BLOCK, ModelConfig
from flashstep.ops import Rope

MAX_LAYERS = 4  # of one `write_window`
MAX_HEADS = 16  # of a block: rows of one product
MAX_ENTRIES = 80  # of a chunk: more do not leave shared memory for the kernel before
MULTIPROCESSORS = 132  # of an H200; only speed depends on it

ATTEND = jit.Source(
    "stages/attention/attend.cu",
    {
        "attend": jit.Params(
            "Attend",
            [
                ("q", "const bf16*"),
                ("row_position", "const i32*"),
                ("row_slot", "const i32*"),
                ("rows", "int"),
                ("early", "int"),
                ("window_codes", "const u8*"),
                ("window_scales", "const u8*"),
                ("ring", "int"),
                ("ring_inverse", "u32"),
                ("frequencies", "const float*"),
                ("sink", "const float*"),
                ("out", "bf16*"),
                ("chosen", "const i32*"),
                ("topk", "int"),
                ("ratio", "int"),
                ("entry_codes", "const u8*"),
                ("entry_scales", "const u8*"),
                ("entries_per_page", "int"),
                ("page_inverse", "u32"),
                ("page_table", "const i32*"),
                ("pages_per_slot", "int"),
                ("row_last", "const i32*"),
                ("own_codes", "const u8*"),
                ("own_scales", "const u8*"),
                ("fresh", "int"),
            ],
        )
    },
    hot=["attend"],
)
WINDOW = jit.Source(
    "stages/attention/window.cu",
    {
        "write_window": jit.Params(
            "Window",
            [
                ("low", "const bf16*"),
                ("low_stride", "int"),
                ("low_columns", f"int[{MAX_LAYERS}]"),
                ("kv_norm", f"const bf16*[{MAX_LAYERS}]"),
                ("eps", "float"),
                ("frequencies", "const float*"),
                ("row_position", "const i32*"),
                ("row_slot", "const i32*"),
                ("codes", f"u8*[{MAX_LAYERS}]"),
                ("scales", f"u8*[{MAX_LAYERS}]"),
                ("ring", "int"),
            ],
        )
    },
    hot=["write_window"],
)


class Early(enum.IntEnum):
    """What `attend` may read before the kernels in front of it have ended.

    A dependent launch may start while several kernels before it still run, so a level is allowed only where all the
    kernels that wrote the data are known to be complete: the step's inputs and page table are written once at its
    start, the choice of an earlier layer is separated from this one by that layer's experts, which fill the device.
    """

    NOTHING = 0
    STATE = 1  # rows, page table, and window entries that were there before this forward
    CHOICE = 2  # and the chosen entries


@dataclass(frozen=True)
class Chosen:
    """Compressed entries that the rows attend to, and where they lie.

    entries: [rows, topk] i32, the row's entries first, then -1. No more than (position + 1) // ratio are looked at.
    codes, scales: [pages, entries_per_page, head_dim / 2] and [.., head_dim / 16], e2m1 pairs and E4M3.
    page_table: [slots, pages_per_slot] i32. ratio: tokens of an entry.
    """

    entries: Tensor
    codes: Tensor
    scales: Tensor
    page_table: Tensor
    ratio: int


@dataclass(frozen=True)
class Block:
    """What the rows of a draft see: the window up to the last committed position, and their block, not causally.

    last: [rows] i32, the last committed position of the row's request. codes, scales: [rows, head_dim] and
    [rows, head_dim / 32], the rows' own entries (`write_window` without a ring). size: rows of a request; rows
    n size..n size + size - 1 are one block, active or inactive together. fresh: how many of the newest committed
    positions this step may have written (`Early.STATE` leaves those for later).
    """

    last: Tensor
    codes: Tensor
    scales: Tensor
    size: int
    fresh: int


def rope_frequencies(config: ModelConfig, *, compressed: bool, device: torch.device) -> Tensor:
    """[rope / 2] f32, radians per position, of the layers that read compressed entries or of the others.

    Computed on the CPU, so that every device rotates by the angles of the reference.
    """
    return Rope(config, compressed=compressed).frequencies.to(device)


def write_window(
    low: Tensor,
    columns: Sequence[int],
    kv_norm: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    *,
    frequencies: Tensor,
    row_position: Tensor,
    row_slot: Tensor,
    eps: float,
) -> list[jit.Launch]:
    """Norm, rotate and store the latents of all rows in the window caches of 1..4 layers.

    low: [rows (or more), stride] bf16; the latent of layer i stands in columns `columns[i]`.. (multiples of 4).
    kv_norm: [head_dim] bf16 each. codes, scales: per layer [slots, ring, head_dim] e4m3 and [slots, ring,
    head_dim / 32] UE8M0; or [rows, head_dim] and [rows, head_dim / 32], where an entry stands at its row's number.
    frequencies: [rope / 2] f32. row_position, row_slot: [rows] i32; rows of a negative slot write nothing.
    """
    layers, head_dim = len(columns), kv_norm[0].numel()
    if not 1 <= layers <= MAX_LAYERS or not layers == len(kv_norm) == len(codes) == len(scales):
        raise ValueError(f"{layers} columns, {len(kv_norm)} norms, {len(codes)} and {len(scales)} caches: 1..4 of each")
    stride = low.shape[-1]
    if stride % 4 or any(column % 4 or column + head_dim > stride for column in columns):
        raise ValueError(f"latents of {head_dim} at columns {list(columns)} of {stride}: multiples of 4, inside")
    if len({(x.shape[:-1], y.shape[:-1]) for x, y in zip(codes, scales, strict=True)}) != 1:
        raise ValueError(f"caches of different shapes: {[tuple(x.shape) for x in (*codes, *scales)]}")
    module = WINDOW.build(low.device, HEAD_DIM=head_dim, ROPE=2 * frequencies.numel(), LAYERS=layers)
    launch = module.launch(
        "write_window",
        grid=row_slot.numel() * layers,
        block=128,
        shared=64,
        stage="attention",
        low=low,
        low_stride=stride,
        low_columns=[*columns, *[0] * (MAX_LAYERS - layers)],
        kv_norm=list(kv_norm),
        eps=eps,
        frequencies=frequencies,
        row_position=row_position,
        row_slot=row_slot,
        codes=list(codes),
        scales=list(scales),
        ring=codes[0].shape[1] if codes[0].dim() == 3 else 0,
    )
    return [launch]


@dataclass(frozen=True)
class Split:
    """How a row's entries are shared: `blocks` of a cluster, each taking `entries` at a time (a multiple of 16).

    warp_columns: columns of the output that a warp has, 64, or 32 where those do not make an even number of warps.
    """

    blocks: int
    entries: int
    warp_columns: int = 64


def plan(rows: int, tiles: int, head_dim: int) -> Split:
    """The split for `rows` rows (times groups of heads) that see up to `tiles` tiles of entries each.

    As many blocks a row as keep the launch within two blocks a multiprocessor or have at most six tiles each, but none
    with less than four tiles or less than 64 columns of the output. A block takes its whole part at once if it is at
    most 80 entries; of several parts more than 32 at a time would not leave it the registers.
    """
    warp_columns = 32 if head_dim % 128 else 64
    blocks = 8
    while blocks > 1 and (
        tiles < 4 * blocks or head_dim // 64 % blocks or (rows * blocks > 2 * MULTIPROCESSORS and tiles > 6 * blocks)
    ):
        blocks //= 2
    whole = -(-tiles // blocks // 2) * 16
    return Split(blocks, whole if whole <= MAX_ENTRIES else 32, warp_columns)


def count_tiles(window: int, others: int) -> int:
    """Tiles of 8 entries that a row sees at most; a tile does not mix the window with other entries."""
    return -(-window // 8) - (-others // 8)


def head_groups(heads: int) -> int:
    """Groups of equally many heads, as few as a block can take. ValueError where there are none."""
    groups = -(-heads // MAX_HEADS)
    if heads % groups:
        raise ValueError(f"{heads} heads: at most {MAX_HEADS}, or a multiple of their groups")
    return groups


def attend_constants(
    heads: int, head_dim: int, rope: int, out_groups: int, window: int, others: int, block: int, split: Split
) -> dict[str, jit.Constant]:
    """What `attend.cu` is compiled with.

    heads: of the rank, in groups of at most MAX_HEADS for a block. others: entries of a row outside the window, at
    most. block: 0, or the rows of a draft block.
    """
    groups = head_groups(heads)
    heads //= groups
    warps = head_dim // split.warp_columns
    slices = warps // split.blocks
    tiles = -(-count_tiles(window, others) // split.blocks)
    places = -(-8 * tiles // split.entries) * split.entries
    buffers = 1 if places == split.entries else 2
    scores = 4 * (warps // 2) * 16 * (split.entries + 8)
    mail = split.blocks * heads * ((2 * split.warp_columns + 4) * slices + 8)
    shared = buffers * split.entries * (2 * head_dim + 16) + max(scores, mail + 16)
    shared += buffers * (32 * (split.entries + 8) + 64)
    shared += 20 * places + 128 + 4 * rope + 64 + 64
    return {
        "HEADS": heads,
        "HEAD_GROUPS": groups,
        "WARP_COLUMNS": split.warp_columns,
        "HEAD_DIM": head_dim,
        "ROPE": rope,
        "OUT_GROUPS": out_groups,
        "WINDOW": window,
        "OTHERS": others,
        "BLOCK": block,
        "SPLIT": split.blocks,
        "ENTRIES": split.entries,
        "SCALE": torch.tensor(head_dim**-0.5).item(),  # as float32 holds it
        "SHARED": -(-shared // 16) * 16,
    }


def _inverse(divisor: int) -> int:
    """The high half of a 32-bit product with it is the quotient, of numbers up to 2^32 / divisor."""
    if divisor < 2:
        raise ValueError(f"rings and pages of {divisor} entries: at least 2")
    return -(-(2**32) // divisor)


def attend(
    q: Tensor,
    window_codes: Tensor,
    window_scales: Tensor,
    out: Tensor,
    *,
    row_position: Tensor,
    row_slot: Tensor,
    frequencies: Tensor,
    sink: Tensor,
    window: int,
    chosen: Chosen | None = None,
    block: Block | None = None,
    early: Early = Early.NOTHING,
    split: Split | None = None,
) -> list[jit.Launch]:
    """Attention of every row over its window and its chosen entries, or over its window and its draft block.

    q: [rows, heads * head_dim] bf16, not rotated. window_codes, window_scales: [slots, ring, head_dim] e4m3 and
    [slots, ring, head_dim / 32] UE8M0 of this layer; entries of this forward's rows already written. out: [groups,
    ceil(rows / 8), heads / groups * head_dim / 8, 8, 8] bf16 fragments, rotated back; rows of a negative slot give
    zeros, places behind the last row are not written. row_position, row_slot: [rows] i32. frequencies: [rope / 2]
    f32. sink: [heads] f32. early: what may be read before earlier kernels end. split: instead of `plan`'s.
    """
    rows, heads, head_dim = row_slot.numel(), sink.numel(), window_codes.shape[-1]
    if head_dim % 64 or head_dim > 512:
        raise ValueError(f"heads of {head_dim}: a multiple of 64 up to 512")
    if chosen is not None and block is not None:
        raise ValueError("draft rows attend to their window and block alone: give chosen entries or a block, not both")
    tiles, pieces = -(-rows // 8), heads * head_dim // out.shape[0] // 8
    for name, tensor, shape in (
        ("q", q, (rows, heads * head_dim)),
        ("out", out, (out.shape[0], tiles, pieces, 8, 8)),
        ("window_scales", window_scales, (*window_codes.shape[:2], head_dim // FP8_BLOCK)),
        ("row_position", row_position, (rows,)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: expected {shape}")
    others = block.size if block else chosen.entries.shape[-1] if chosen else 0
    split = split or plan(rows * head_groups(heads), count_tiles(window, others), head_dim)
    size = block.size if block else 0
    constants = attend_constants(heads, head_dim, 2 * frequencies.numel(), out.shape[0], window, others, size, split)
    launch = ATTEND.build(q.device, **constants).launch(
        "attend",
        grid=rows * head_groups(heads) * split.blocks,
        block=head_dim // split.warp_columns * 32,
        shared=int(constants["SHARED"]),
        cluster=split.blocks,
        stage="attention",
        q=q,
        row_position=row_position,
        row_slot=row_slot,
        rows=rows,
        early=int(early),
        window_codes=window_codes,
        window_scales=window_scales,
        ring=window_codes.shape[1],
        ring_inverse=_inverse(window_codes.shape[1]),
        frequencies=frequencies,
        sink=sink,
        out=out,
        chosen=chosen.entries if chosen else None,
        topk=chosen.entries.shape[-1] if chosen else 0,
        ratio=chosen.ratio if chosen else 1,
        entry_codes=chosen.codes if chosen else None,
        entry_scales=chosen.scales if chosen else None,
        entries_per_page=chosen.codes.shape[1] if chosen else 1,
        page_inverse=_inverse(chosen.codes.shape[1]) if chosen else 0,
        page_table=chosen.page_table if chosen else None,
        pages_per_slot=chosen.page_table.shape[-1] if chosen else 0,
        row_last=block.last if block else None,
        own_codes=block.codes if block else None,
        own_scales=block.scales if block else None,
        fresh=block.fresh if block else 0,
    )
    return [launch]


# The released model on four ranks: backbone layers with and without chosen entries, draft layers.
SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    *(
        (ATTEND, attend_constants(16, 512, 64, 2, 128, others, block, plan(rows, count_tiles(128, others), 512)))
        for rows, others, block in ((6, 512, 0), (48, 512, 0), (192, 512, 0), (6, 0, 0), (5, 5, 5), (160, 5, 5))
    ),
    (WINDOW, {"HEAD_DIM": 512, "ROPE": 64, "LAYERS": 1}),
    (WINDOW, {"HEAD_DIM": 512, "ROPE": 64, "LAYERS": 3}),
]
