"""The operations that several stages of the reference share: products with stored weights, RMS norm, rotation, top-k.

The reference computes in float64 and rounds only where the model rounds (to bf16, fp8 or fp4). Products of values of
so few bits are then exact or nearly so, whatever the order of summation, which makes a row's result independent of
the rows beside it: verifying six rows at once gives the bits of six single-row forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics, decode_fp4_weight, decode_fp8_weight

# Engram table rows [rows, columns] int64 -> their bf16 values [rows, columns, engram_head_dim]
Gather = Callable[[Tensor], Tensor]
# Makes one rank's part of a product whole, where ranks share a weight; before any rounding.
Combine = Callable[[Tensor], Tensor]


class Reader(Protocol):
    """Where weights come from: a checkpoint, or anything that maps the checkpoint's names to tensors."""

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` as it is stored."""

    def __contains__(self, name: object) -> bool:
        """Whether the tensor `name` exists."""

    def engram_gather(self, layer: int) -> Gather:
        """Access to the Engram table of backbone layer `layer`, wherever it is kept."""


class Linear:
    """A weight [outputs, inputs] as stored: bf16, fp8 with 32 x 32 scales or packed fp4 with scales per row and 32.

    With `keep_decoded` it is decoded once, for models that are small; otherwise at every use.
    """

    combine: Combine | None = None  # set where this is a rank's part of the weight, and its products need the others'

    def __init__(self, weight: Tensor, scale: Tensor | None = None, *, keep_decoded: bool = True) -> None:
        self._weight, self._scale = weight, scale
        self._decoded = self._decode() if keep_decoded else None
        if keep_decoded:
            del self._weight, self._scale

    @classmethod
    def read(cls, reader: Reader, name: str, *, keep_decoded: bool = True) -> Linear:
        """Read `name`.weight and, where there is one, `name`.scale."""
        scale = f"{name}.scale"
        weight = reader.tensor(f"{name}.weight")
        return cls(weight, reader.tensor(scale) if scale in reader else None, keep_decoded=keep_decoded)

    @property
    def decoded(self) -> Tensor:
        """[outputs, inputs] float64."""
        return self._decode() if self._decoded is None else self._decoded

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] of any dtype -> [..., outputs] float64, not rounded."""
        product = x.double() @ self.decoded.T
        return product if self.combine is None else self.combine(product)

    def _decode(self) -> Tensor:
        if self._scale is None:
            return self._weight.double()
        decode = decode_fp4_weight if self._weight.dtype == torch.int8 else decode_fp8_weight
        return decode(self._weight, self._scale).double()


def rms_norm(x: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """`weight * x * rsqrt(mean(x^2) + eps)` over the last dimension (section 4), rounded once."""
    x = x.double()
    return (weight * x * inverse_rms(x, eps)).to(num.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """`rsqrt(mean(x^2) + eps)` over the last dimension of `x` float64, kept as a dimension of size 1."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Rope:
    """Rotary frequencies of one class of layers: plain, or YaRN for the layers that read compressed entries."""

    def __init__(self, config: ModelConfig, *, compressed: bool, device: torch.device | str = "cpu") -> None:
        base = config.compress_rope_theta if compressed else config.rope_theta
        dims, scaling = config.qk_rope_head_dim, config.rope_scaling
        exponents = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
        frequencies = 1.0 / base**exponents
        if compressed:

            def correction(rotations: float) -> float:
                length = scaling.original_max_position_embeddings
                return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(correction(scaling.beta_fast)), 0)
            high = min(math.ceil(correction(scaling.beta_slow)), dims - 1)
            steps = torch.arange(dims // 2, dtype=torch.float32, device=device)
            ramp = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
            frequencies = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
        self.frequencies = frequencies

    def at(self, positions: Tensor) -> Tensor:
        """Unit complex numbers [rows, rotary / 2] complex128 of integer `positions` [rows].

        The angle is rounded to float32, as in the published model; at a million tokens that is a visible choice.
        """
        angles = (positions.float().unsqueeze(-1) * self.frequencies).double()
        return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor, num: Numerics, *, back: bool = False) -> Tensor:
    """Rotate the last dimensions of `x` [rows, ..., dims], adjacent pairs as complex numbers, by `turns` [rows, n].

    The last 2 n dimensions turn, the others stay. `back` turns the other way.
    """
    width = 2 * turns.shape[-1]
    still, moving = x[..., :-width], x[..., -width:]
    turns = turns.view(turns.shape[0], *[1] * (x.dim() - 2), turns.shape[1])
    pairs = torch.view_as_complex(moving.double().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * (turns.conj() if back else turns)).flatten(-2)
    return torch.cat((still, turned.to(num.dtype)), dim=-1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices [..., min(k, columns)] of the largest `scores`, best first; of equal scores the lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
