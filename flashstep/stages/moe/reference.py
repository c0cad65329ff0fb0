"""The mixture of experts in exact PyTorch (section 8 of `docs/model.md`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Combine, Linear, Reader, top_k


@dataclass
class Expert:
    """One gated expert: w1 gate and w3 up [intermediate, hidden], w2 down [hidden, intermediate]."""

    w1: Linear
    w2: Linear
    w3: Linear

    @classmethod
    def read(cls, reader: Reader, prefix: str, *, keep_decoded: bool = True) -> Expert:
        """Read the three products below `prefix`."""
        return cls(*(Linear.read(reader, prefix + name, keep_decoded=keep_decoded) for name in ("w1", "w2", "w3")))


@dataclass
class Weights:
    """Router and experts of one layer."""

    gate: Linear  # [experts, hidden] bf16
    bias: Tensor  # [experts] f32: picks experts, does not weigh them
    experts: list[Expert]
    shared: Expert
    experts_per_token: int
    combine: Combine | None = None  # set where a rank holds a part of every expert's intermediate columns
    on_choice: Callable[[Tensor], None] | None = None  # shown the chosen experts of every call

    @classmethod
    def read(
        cls, reader: Reader, prefix: str, num_experts: int, experts_per_token: int, *, keep_decoded: bool = True
    ) -> Weights:
        """Read the tensors below `prefix`."""
        return cls(
            Linear.read(reader, prefix + "gate"),
            reader.tensor(prefix + "gate.bias"),
            [
                Expert.read(reader, f"{prefix}experts.{expert}.", keep_decoded=keep_decoded)
                for expert in range(num_experts)
            ],
            Expert.read(reader, prefix + "shared_experts.", keep_decoded=keep_decoded),
            experts_per_token,
        )


def route(x: Tensor, w: Weights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Chosen experts [rows, experts_per_token], best biased score first, and their weights, float64."""
    scores = torch.nn.functional.softplus(w.gate(x)).sqrt()
    chosen = top_k(scores + w.bias, w.experts_per_token)
    weights = scores.gather(-1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


@dataclass
class Visits:
    """Which rows visit which experts, sorted by expert, so that each expert's products run once for all its rows."""

    order: Tensor  # [visits] int64: place of each visit in `chosen.flatten()`
    rows: Tensor  # [visits] int64
    experts: list[int]  # the experts that are visited
    counts: list[int]  # how many visits each of them has

    @classmethod
    def of(cls, chosen: Tensor) -> Visits:
        """The visits of `chosen` [rows, experts_per_token]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts, counts = flat.unique(return_counts=True)
        return cls(order, order // chosen.shape[1], experts.tolist(), counts.tolist())


def products(x: Tensor, weights: list[Linear], counts: list[int]) -> Tensor:
    """Runs of `counts` rows of `x` [visits, inputs], each times its own weight: [visits, outputs] float64."""
    return torch.cat([weight(part) for weight, part in zip(weights, x.split(counts), strict=True)])


def gate_up(
    x_fp8: Tensor, experts: list[Expert], visits: Visits, weights: Tensor | None, limit: float, num: Numerics
) -> Tensor:
    """SwiGLU of the visiting rows of `x_fp8` [rows, hidden], already quantized -> [visits, intermediate].

    The gate branch is clamped from above, the up branch on both sides. The route `weights` [rows, experts_per_token]
    (None: 1) multiply here, before the rounding in front of the down product, not the experts' outputs.
    """
    x = x_fp8[visits.rows]
    gate = products(x, [experts[i].w1 for i in visits.experts], visits.counts).to(num.dtype).double()
    up = products(x, [experts[i].w3 for i in visits.experts], visits.counts).to(num.dtype).double()
    hidden = torch.nn.functional.silu(gate.clamp_(max=limit)) * up.clamp_(-limit, limit)
    if weights is not None:
        hidden *= weights.flatten()[visits.order, None]
    return hidden.to(num.dtype)


def down(
    hidden: Tensor, experts: list[Expert], visits: Visits, num: Numerics, combine: Combine | None = None
) -> Tensor:
    """The down products of `hidden` [visits, intermediate] -> [visits, hidden]; `combine` as in `Weights`."""
    product = products(num.fp8(hidden), [experts[i].w2 for i in visits.experts], visits.counts)
    return (product if combine is None else combine(product)).to(num.dtype)


def moe(x: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Routed experts plus the shared one: [rows, hidden] -> [rows, hidden]; one rounding of the sum."""
    chosen, weights = route(x, w, config)
    if w.on_choice is not None:
        w.on_choice(chosen)
    x_fp8, limit = num.fp8(x), config.swiglu_limit
    everyone = Visits.of(torch.zeros_like(chosen[:, :1]))
    shared = gate_up(x_fp8, [w.shared], everyone, None, limit, num)
    total = down(shared, [w.shared], everyone, num, w.combine).double()
    visits = Visits.of(chosen)
    routed = gate_up(x_fp8, w.experts, visits, weights, limit, num)
    routed = down(routed, w.experts, visits, num, w.combine)
    return total.index_add_(0, visits.rows, routed.double()).to(num.dtype)
