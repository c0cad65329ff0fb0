"""The packed layout of dense weights and its inverse, in PyTorch on any device.

A packed weight [outputs, columns] is a row of tiles of 16 outputs. A tile holds the units (`common.cuh`) of all groups
of 32 columns (fp8: 512 bytes each, bf16: 1024), then, for fp8, one float32 scale a group: 0.8% more bytes than with
UE8M0 codes, and nothing to decode. Outputs are padded with zeros to a multiple of 16, columns to a multiple of 32
(fp8 units: of 128); activations have a multiple of 32 columns, of which the padded ones may hold anything finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashstep.config import FP8_BLOCK
from flashstep.formats import ue8m0_decode

TILE = 16  # outputs of a packed tile
GROUP = 32  # columns that share a scale

Kind = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, columns] as the kernels read it: `data` [tiles, bytes of a tile] uint8."""

    data: Tensor
    outputs: int
    columns: int
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.data.numel()


def pack_fp8(weight: Tensor, scale: Tensor) -> PackedWeight:
    """Pack e4m3 `weight` [outputs, columns] with UE8M0 `scale` [ceil(outputs / 32), ceil(columns / 32)] (bytes).

    Runs on the tensors' device. ValueError where the shapes do not belong together.
    """
    outputs, columns = weight.shape
    blocks = (-(-outputs // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if tuple(scale.shape) != blocks:
        raise ValueError(f"scale {tuple(scale.shape)} of a weight {outputs} x {columns}: expected {blocks}")
    tiles, groups = -(-outputs // TILE), -(-columns // (4 * GROUP)) * 4
    words = _pad(weight.view(torch.uint8), tiles * TILE, groups * GROUP).view(torch.int32)
    data = torch.empty(tiles, groups * 129, dtype=torch.int32, device=weight.device)
    data[:, : groups * 128].view(tiles, groups, 8, 4, 2, 2).copy_(_to_units(words, tiles, groups))
    scales = torch.zeros(tiles, groups, device=weight.device)
    scales[:, : blocks[1]] = ue8m0_decode(scale).repeat_interleave(FP8_BLOCK // TILE, 0)[:tiles]
    data[:, groups * 128 :] = scales.view(torch.int32)
    return PackedWeight(data.view(torch.uint8), outputs, columns, "fp8")


def unpack_fp8(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """The e4m3 codes [outputs, columns] and float32 scales [tiles of 16 outputs, ceil(columns / 32)] of `pack_fp8`."""
    words = packed.data.view(torch.int32)
    tiles, groups = words.shape[0], words.shape[1] // 129
    codes = _from_units(words[:, : groups * 128], tiles, groups).view(torch.uint8)
    codes = codes[: packed.outputs, : packed.columns].contiguous().view(torch.float8_e4m3fn)
    return codes, words[:, groups * 128 :].view(torch.float32)[:, : -(-packed.columns // GROUP)]


def pack_bf16(weight: Tensor) -> PackedWeight:
    """Pack bf16 `weight` [outputs, columns]. Runs on the tensor's device."""
    outputs, columns = weight.shape
    tiles, groups = -(-outputs // TILE), -(-columns // GROUP)
    words = _pad(weight.view(torch.int16), tiles * TILE, groups * GROUP).view(torch.int32)
    data = _to_units(words, tiles, 2 * groups).reshape(tiles, -1)
    return PackedWeight(data.view(torch.uint8), outputs, columns, "bf16")


def unpack_bf16(packed: PackedWeight) -> Tensor:
    """The weight [outputs, columns] bf16 of `pack_bf16`."""
    words = packed.data.view(torch.int32)
    tiles, units = words.shape[0], words.shape[1] // 128
    return _from_units(words, tiles, units).view(torch.bfloat16)[: packed.outputs, : packed.columns]


def random_packed(
    outputs: int, columns: int, kind: Kind, generator: torch.Generator, device: torch.device
) -> PackedWeight:
    """Random weights for timing, made packed: products with inputs of order one are of order one. No NaN codes."""
    tiles = -(-outputs // TILE)
    if kind == "bf16":
        count = tiles * TILE * -(-columns // GROUP) * GROUP
        values = torch.randn(count, generator=generator, device=device, dtype=torch.bfloat16) * columns**-0.5
        return PackedWeight(values.view(torch.uint8).view(tiles, -1), outputs, columns, kind)
    groups = -(-columns // (4 * GROUP)) * 4
    data = torch.empty(tiles, groups * 129, dtype=torch.int32, device=device)
    # Exponents 4..11 of 0..15 (bit 3 is the complement of bit 2), all signs and mantissas: 2^-3 .. 30, rms about 9.
    bits = torch.randint(-(2**31), 2**31, (tiles, groups * 128), generator=generator, device=device, dtype=torch.int32)
    bits &= 0xBFBFBFBF - 2**32
    data[:, : groups * 128] = bits | ((bits ^ 0x20202020) & 0x20202020) << 1
    data[:, groups * 128 :] = torch.tensor(2.0 ** round(-math.log2(9 * columns**0.5))).view(torch.int32).item()
    return PackedWeight(data.view(torch.uint8), outputs, columns, kind)


def _pad(weight: Tensor, rows: int, columns: int) -> Tensor:
    padding = (0, columns - weight.shape[1], 0, rows - weight.shape[0])
    return torch.nn.functional.pad(weight, padding) if any(padding) else weight.contiguous()


def _to_units(words: Tensor, tiles: int, units: int) -> Tensor:
    """4-byte words [tiles * 16, units * 8] as [tiles, units, 8 r, 4 q, 2 halves of columns, 2 halves of rows]."""
    return words.view(tiles, 2, 8, units, 2, 4).permute(0, 3, 2, 5, 4, 1)


def _from_units(words: Tensor, tiles: int, units: int) -> Tensor:
    """Inverse of `_to_units`: words [tiles * 16, units * 8]."""
    return words.reshape(tiles, units, 8, 4, 2, 2).permute(0, 5, 2, 1, 4, 3).reshape(tiles * TILE, units * 8)
