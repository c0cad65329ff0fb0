"""Engram rows on a GPU: launch of `rows.cu`, and the hash constants it reads.

Owns the way from tokens to the quantized input of the wkv product. The product is a dense one like any other; the
gate and the sum into the stream are part of the boundary in front of the layer (`stages/boundary`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep import jit
from flashstep.config import FP8_BLOCK, ModelConfig
from flashstep.layout import engram_offsets

_MAX_LAYERS = 4  # places for tables in the parameter struct

_ROWS = jit.Source(
    "stages/engram/rows.cu",
    {
        "engram_rows": jit.Params(
            "EngramRows",
            [
                ("row_token", "const i32*"),  # [R]
                ("row_position", "const i32*"),  # [R]
                ("row_slot", "const i32*"),  # [R], -1: inactive
                ("token_map", "const i32*"),  # [vocab]
                ("pad_token", "int"),
                ("history", "i32*"),  # [slots, ring]
                ("ring", "int"),
                ("multipliers", "const i64*"),  # [layers, longest n-gram]
                ("primes", "const i64*"),  # [layers, columns of the rank]
                ("offsets", "const i64*"),
                ("row_ids", "i64*"),  # [R, layers, columns of the rank]; null: not wanted
                ("tables", f"const u8*[{_MAX_LAYERS}]"),  # [rows of the rank, dim] each; null: row numbers alone
                ("table_scales", f"const u8*[{_MAX_LAYERS}]"),  # [rows of the rank, dim / 32]
                ("codes", f"u8*[{_MAX_LAYERS}]"),  # fp8 fragments
                ("scales", f"u8*[{_MAX_LAYERS}]"),
            ],
        )
    },
    hot=["engram_rows"],
)


@dataclass(frozen=True)
class Hash:
    """Hash constants of a rank on its device, int64: multipliers [layers, longest n-gram], primes and offsets
    [layers, columns]. A rank's columns are its heads of every n-gram size, size by size."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, config: ModelConfig, rank: int, world: int, device: torch.device, *, whole: bool = False) -> Hash:
        """The constants of `rank` of `world`; offsets count inside the rank's own tables, or inside `whole` ones."""
        first, last = (config.engram_n_heads * r // world for r in (rank, rank + 1))

        def tensor(values: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def offsets(layer: int) -> list[int]:
            own = engram_offsets(config, layer, rank, world)
            heads = [heads[first:last] for heads in engram_offsets(config, layer)] if whole else own
            return [offset for size in heads for offset in size]

        return cls(
            tensor(config.engram_multipliers),
            tensor([[p for heads in sizes for p in heads[first:last]] for sizes in config.engram_primes]),
            tensor([offsets(layer) for layer in config.engram_layer_ids]),
        )


def engram_rows(
    device: torch.device,
    config: ModelConfig,
    *,
    row_token: Tensor,
    row_position: Tensor,
    row_slot: Tensor,
    token_map: Tensor,
    history: Tensor,
    hash: Hash,
    tables: Sequence[Tensor] = (),
    table_scales: Sequence[Tensor] = (),
    codes: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    row_ids: Tensor | None = None,
) -> list[jit.Launch]:
    """The table rows of R rows, for every Engram layer, as the wkv product reads them.

    row_token, row_position, row_slot: int32 [R]; a request's rows are consecutive, by position. An inactive row
    (slot -1) gives zeros and leaves the history alone. token_map: int32 [vocab]. history: int32 [slots, ring], written
    at position % ring; the ring is longer by the rows of one request than the n-grams reach back.
    tables: per layer fp8 [rows, dim], wherever `tables.place` put them, and `table_scales` UE8M0 [rows, dim / 32].
    codes: per layer u8 [Rt, K / 16, 8, 16] with K = columns * dim; scales u8 [Rt, K / 32, 8].
    Without tables (a file that the device cannot address) there are only row_ids: int64 [R, layers, columns].
    """
    rows, layers = row_token.shape[0], len(config.engram_layer_ids)
    columns, ngram = hash.primes.shape[1], config.engram_max_ngram_size
    dim = config.engram_head_dim
    for name, tensor, shape in (
        ("row_position", row_position, (rows,)),
        ("row_slot", row_slot, (rows,)),
        ("token_map", token_map, (config.vocab_size,)),
        ("multipliers", hash.multipliers, (layers, ngram)),
        ("primes", hash.primes, (layers, columns)),
        ("offsets", hash.offsets, (layers, columns)),
        *(("codes", tensor, (-(-rows // 8), columns * dim // 16, 8, 16)) for tensor in codes),
        *(("scales", tensor, (-(-rows // 8), columns * dim // FP8_BLOCK, 8)) for tensor in scales),
        *(("table", tensor, (tensor.shape[0], dim)) for tensor in tables),
        *(
            ("table scales", tensor, (table.shape[0], dim // FP8_BLOCK))
            for tensor, table in zip(table_scales, tables, strict=True)
        ),
        *([("row_ids", row_ids, (rows, layers, columns))] if row_ids is not None else []),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")
    if not len(tables) == len(codes) == len(scales) or len(tables) not in (0, layers):
        raise ValueError(f"{len(tables)} tables, {len(codes)} codes, {len(scales)} scales: expected {layers} of each")
    constants, threads = _constants(layers, columns // (ngram - 1), ngram, dim)
    return [
        _ROWS.build(device, **constants).launch(
            "engram_rows",
            grid=rows * layers,
            block=threads,
            stage="engram",
            nbytes=rows * layers * columns * (dim + dim // FP8_BLOCK),
            row_token=row_token,
            row_position=row_position,
            row_slot=row_slot,
            token_map=token_map,
            pad_token=config.engram_pad_token_id,
            history=history,
            ring=history.shape[1],
            multipliers=hash.multipliers,
            primes=hash.primes,
            offsets=hash.offsets,
            row_ids=row_ids,
            tables=[_reached(table) for table in tables],
            table_scales=[_reached(table) for table in table_scales],
            codes=list(codes),
            scales=list(scales),
        )
    ]


def _reached(table: Tensor) -> Tensor | jit.Mapped:
    """For a pointer: a table on the host that is not locked lies in a file that the device reads (`tables.place`)."""
    return jit.Mapped(table) if table.device.type == "cpu" and not table.is_pinned() else table


def _constants(layers: int, heads: int, ngram: int, dim: int) -> tuple[dict[str, jit.Constant], int]:
    """Constants of `rows.cu`, and threads of a block."""
    if layers > _MAX_LAYERS:
        raise ValueError(f"{layers} Engram layers: room for {_MAX_LAYERS}")
    threads = -(-heads * (ngram - 1) * dim // 16 // 32) * 32
    return {"LAYERS": layers, "HEADS": heads, "NGRAM": ngram, "DIM": dim, "THREADS": threads}, threads


# What a rank of 4 at the released sizes compiles, for the test that all of it compiles without spills.
SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    (_ROWS, _constants(layers=2, heads=2, ngram=4, dim=256)[0])
]
