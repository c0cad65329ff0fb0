"""The mixture of experts in exact PyTorch (section 8 of `docs/model.md`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Linear, Reader, top_k


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

    gate: Tensor  # [experts, hidden]
    bias: Tensor  # [experts] f32: picks experts, does not weigh them
    experts: list[Expert]
    shared: Expert
    experts_per_token: int

    @classmethod
    def read(
        cls, reader: Reader, prefix: str, num_experts: int, experts_per_token: int, *, keep_decoded: bool = True
    ) -> Weights:
        """Read the tensors below `prefix`."""
        return cls(
            reader.tensor(prefix + "gate.weight"),
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
    scores = torch.nn.functional.softplus(x.double() @ w.gate.double().T).sqrt()
    chosen = top_k(scores + w.bias.double(), w.experts_per_token)
    weights = scores.gather(-1, chosen)
    return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def gate_up(x_fp8: Tensor, expert: Expert, weight: Tensor | None, limit: float, num: Numerics) -> Tensor:
    """SwiGLU of `x_fp8` [rows, hidden], already quantized -> [rows, intermediate].

    The gate branch is clamped from above, the up branch on both sides. The route `weight` [rows, 1] multiplies here,
    before the rounding in front of the down product, not the expert's output.
    """
    gate = expert.w1(x_fp8).to(num.dtype).double().clamp(max=limit)
    up = expert.w3(x_fp8).to(num.dtype).double().clamp(-limit, limit)
    hidden = torch.nn.functional.silu(gate) * up
    return (hidden if weight is None else hidden * weight).to(num.dtype)


def down(hidden: Tensor, expert: Expert, num: Numerics) -> Tensor:
    """The down product of `hidden` [rows, intermediate] -> [rows, hidden]."""
    return expert.w2(num.fp8(hidden)).to(num.dtype)


def moe(x: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Routed experts plus the shared one: [rows, hidden] -> [rows, hidden]; one rounding of the sum."""
    chosen, weights = route(x, w, config)
    x_fp8 = num.fp8(x)
    total = down(gate_up(x_fp8, w.shared, None, config.swiglu_limit, num), w.shared, num).double()
    for expert_id in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert_id)
        expert = w.experts[expert_id]
        hidden = gate_up(x_fp8[rows], expert, weights[rows, place, None], config.swiglu_limit, num)
        total.index_add_(0, rows, down(hidden, expert, num).double())
    return total.to(num.dtype)
