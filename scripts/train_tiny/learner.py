"""Master weights and their optimizer: Muon for matrices, AdamW for the rest, rounded copies for the forward.

Weights of one shape and storage kind lie stacked in one tensor, so that a step rounds and updates them together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.train_tiny.twin import Weights
from scripts.train_tiny.weights import Spec, as_stored

MUON_RATE = 4e-3  # of a matrix whose update has the size that AdamW would give it
MUON_MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
BIAS_RATE = 1e-3  # by which a router bias moves towards the mean load, each step
# AdamW rates by the first of these words that a name holds.
ADAM_RATES = (("engram.embed", 1e-2), ("hc_", 2e-3), ("embed", 5e-3), ("head", 3e-3), ("", 3e-3))


@dataclass
class _Stack:
    """Weights of one shape, kind and rule: `master` [count, *shape] float32."""

    names: list[str]
    kind: str
    rate: float  # 0: Muon
    master: Tensor
    leaf: Tensor = field(default_factory=lambda: torch.empty(0))
    momentum: Tensor = field(default_factory=lambda: torch.empty(0))


class Learner:
    """Trains the weights named by `specs`; `weights` gives their first values."""

    def __init__(
        self,
        weights: Weights,
        specs: dict[str, Spec],
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.biases = {name: weights[name].to(device).clone() for name in specs if name.endswith("gate.bias")}
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, spec in specs.items():
            if name not in self.biases:
                groups[spec.shape, spec.kind, _rate(name, spec)].append(name)
        self.stacks = [
            _Stack(names, kind, rate, torch.stack([weights[name].float() for name in names]).to(device))
            for (_, kind, rate), names in groups.items()
        ]
        for stack in self.stacks:
            stack.momentum = torch.zeros_like(stack.master) if stack.rate == 0 else stack.momentum
        self.adam = torch.optim.AdamW(
            [
                {"params": [stack.master], "lr": stack.rate, "rate": stack.rate}
                for stack in self.stacks
                if stack.rate > 0
            ],
            betas=(0.9, 0.95),
            eps=1e-12,
            weight_decay=0.0,
            fused=device.startswith("cuda"),
        )

    @torch.no_grad()
    def rounded(self) -> Weights:
        """Weights as they would be stored, for one forward and backward."""
        weights: Weights = dict(self.biases)
        for stack in self.stacks:
            rounded = as_stored(stack.master, stack.kind)
            stack.leaf = (rounded if stack.kind == "f32" else rounded.to(self.dtype)).requires_grad_()
            with torch.enable_grad():
                weights |= dict(zip(stack.names, stack.leaf.unbind(0), strict=True))
        return weights

    def masters(self) -> Weights:
        """The float32 weights that the rounded ones come from."""
        weights: Weights = dict(self.biases)
        for stack in self.stacks:
            weights |= dict(zip(stack.names, stack.master.unbind(0), strict=True))
        return weights

    @torch.no_grad()
    def step(self, scale: float, loads: Weights) -> None:
        """One update at `scale` times the peak rates from the gradients of the last `rounded`."""
        for stack in self.stacks:
            gradient = stack.leaf.grad
            assert gradient is not None, stack.names
            if stack.rate > 0:
                stack.master.grad = gradient.float()
                continue
            stack.momentum.lerp_(gradient.float(), 1 - MUON_MOMENTUM)
            update = _orthogonal(gradient.float().lerp(stack.momentum, MUON_MOMENTUM))
            rows, columns = update.shape[-2:]
            stack.master.mul_(1 - WEIGHT_DECAY * MUON_RATE * scale)
            stack.master.add_(update.float(), alpha=-MUON_RATE * scale * 0.2 * max(rows, columns) ** 0.5)
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * scale
        self.adam.step()
        for name, load in loads.items():
            bias = self.biases[f"{name}.ffn.gate.bias"]
            bias.add_(torch.sign(load.mean() - load), alpha=BIAS_RATE * scale)


def _rate(name: str, spec: Spec) -> float:
    """AdamW's peak rate for `name`, or 0 for Muon."""
    matrix = spec.kind in ("fp4", "fp8") or name.endswith(("compressor.wkv.weight", "compressor.wgate.weight"))
    return 0 if matrix else next(rate for word, rate in ADAM_RATES if word in name)


def _orthogonal(gradient: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of [..., rows, columns], roughly: five Newton-Schulz steps in bf16.

    The quintic coefficients of Muon (Jordan et al., 2024): singular values end between about 0.7 and 1.2.
    """
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
