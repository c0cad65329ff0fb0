"""Request state in the bytes that the kernels read: fp8 windows, fp4 entries and index keys, scales beside them.

Holds the same values as `State`, which keeps them decoded: whatever a cache stores has been through its format's round
trip, and encoding such a value again loses nothing. So either state serves the reference, and this one also the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK, KV_GROUP, ModelConfig
from flashstep.formats import (
    decode_fp4_entry,
    decode_fp8_rows,
    fp4_e4m3_scale,
    fp4_pack,
    fp4_quantize,
    fp4_ue8m0_scale,
    fp8_quantize,
    ue8m0_decode,
    ue8m0_encode,
)
from flashstep.state import Kind, State, Store


@dataclass(frozen=True)
class _Format:
    """How values of one kind are packed: columns a code byte holds, columns a scale serves, and both directions."""

    columns_per_byte: int
    group: int
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]  # values [..., columns] -> codes and scales, uint8
    decode: Callable[[Tensor, Tensor], Tensor]  # codes and scales -> values [..., columns] bf16


def _encode_window(values: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = fp8_quantize(values)
    return codes.view(torch.uint8), ue8m0_encode(scale)


def _encode_kv(values: Tensor) -> tuple[Tensor, Tensor]:
    scale, group = fp4_e4m3_scale(values)
    return fp4_pack(fp4_quantize(values, scale, group)).view(torch.uint8), scale.to(torch.float8_e4m3fn).view(
        torch.uint8
    )


def _encode_index_key(values: Tensor) -> tuple[Tensor, Tensor]:
    scale, group = fp4_ue8m0_scale(values)
    return fp4_pack(fp4_quantize(values, scale, group)).view(torch.uint8), ue8m0_encode(scale)


_FORMATS: dict[Kind, _Format] = {
    "window": _Format(
        1, FP8_BLOCK, _encode_window, lambda codes, scale: decode_fp8_rows(codes.view(torch.float8_e4m3fn), scale)
    ),
    "kv": _Format(
        2, KV_GROUP, _encode_kv, lambda codes, scale: decode_fp4_entry(codes, scale.view(torch.float8_e4m3fn).float())
    ),
    "index key": _Format(
        2, FP8_BLOCK, _encode_index_key, lambda codes, scale: decode_fp4_entry(codes, ue8m0_decode(scale))
    ),
}


class PackedValues:
    """Values [..., columns] kept as `codes` and `scales`, both uint8; indexed and assigned like a tensor of values.

    An integer index gives a view of the rest, as the layers of a stack of rings; any other index gives decoded values.
    """

    def __init__(self, kind: Kind, codes: Tensor, scales: Tensor) -> None:
        self.kind, self.codes, self.scales = kind, codes, scales

    @classmethod
    def zeros(cls, kind: Kind, *shape: int, columns: int, device: torch.device) -> PackedValues:
        """Room for `shape` values of `columns` columns, all zero."""
        packing = _FORMATS[kind]
        codes = torch.zeros(*shape, columns // packing.columns_per_byte, dtype=torch.uint8, device=device)
        return cls(kind, codes, torch.zeros(*shape, columns // packing.group, dtype=torch.uint8, device=device))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return PackedValues(self.kind, self.codes[index], self.scales[index])
        return _FORMATS[self.kind].decode(self.codes[index], self.scales[index])

    def __setitem__(self, index: Any, values: Tensor) -> None:
        self.codes[index], self.scales[index] = _FORMATS[self.kind].encode(values)


class PackedState(State):
    """`State` whose caches are `PackedValues`."""

    def _store(self, kind: Kind, *shape: int, dtype: torch.dtype) -> Store:
        return PackedValues.zeros(kind, *shape, columns=self.width(self.config, kind), device=self.device)

    @staticmethod
    def _copy(to: Store, where: Any, values: Store, which: Any) -> None:
        to.codes[where], to.scales[where] = values.codes[which], values.scales[which]

    def save_rows(self, layer: int, codes: Tensor, scales: Tensor, pages: Tensor, places: Tensor) -> None:
        """Store window entries in the pages of their positions; layers of the draft follow those of the backbone.

        codes [rows, head_dim] uint8 and scales [rows, head_dim / 32] uint8 as rings hold them; pages and places [rows]
        int64 of `page_places`.
        """
        self.page_windows.codes[layer, pages, places] = codes
        self.page_windows.scales[layer, pages, places] = scales

    def page_places(self, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The page of each row [rows] int64, and its place in the page."""
        positions, slots = positions.long(), slots.long()
        return self.page_table[slots, positions // self.page_tokens].long(), positions % self.page_tokens

    @classmethod
    def value_bytes(cls, config: ModelConfig, kind: Kind, dtype: torch.dtype) -> int:
        """Bytes of one value of a kind, scales included."""
        columns, packing = cls.width(config, kind), _FORMATS[kind]
        return columns // packing.columns_per_byte + columns // packing.group
