"""Hyper-connections in exact PyTorch (section 4 of `docs/model.md`): `hc` residual copies instead of one.

A sublayer reads one collapsed stream and writes back to every copy. The coefficients of a sublayer depend on the
stream in front of it alone, so they can be computed beside the sublayer. What is easily missed: the collapse uses the
`pre` of the PREVIOUS sublayer; a sublayer's own `pre` serves the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Reader, inverse_rms


@dataclass
class Weights:
    """Hyper-connection weights of one sublayer, float64."""

    fn: Tensor  # [(2 + hc) * hc, hc * hidden]
    base: Tensor  # [(2 + hc) * hc]
    scale: Tensor  # [3]: pre, post, comb

    @classmethod
    def read(cls, reader: Reader, prefix: str) -> Weights:
        """Read `prefix`fn, `prefix`base and `prefix`scale."""
        return cls(*(reader.tensor(prefix + part).double() for part in ("fn", "base", "scale")))


def mixes(stream: Tensor, w: Weights, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of a sublayer from `stream` [rows, hc, hidden].

    Returns pre [rows, hc], post [rows, hc] and comb [rows, hc, hc] (from copy i to copy j), float64.
    """
    hc = config.hc_mult
    flat = stream.flatten(1).double()  # one statistic over all copies together
    m = (flat @ w.fn.T) * inverse_rms(flat, config.rms_norm_eps)
    pre = torch.sigmoid(m[:, :hc] * w.scale[0] + w.base[:hc]) + config.hc_eps
    post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * w.scale[1] + w.base[hc : 2 * hc])
    logits = (m[:, 2 * hc :] * w.scale[2] + w.base[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, sinkhorn(logits.softmax(-1) + config.hc_eps, config.hc_sinkhorn_iters, config.hc_eps)


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Divide `comb` [rows, hc, hc] by its column sums, then `iterations` - 1 times by row and column sums."""
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):  # in place: these few numbers cost more to allocate than to divide
        comb /= comb.sum(2, keepdim=True).add_(eps)
        comb /= comb.sum(1, keepdim=True).add_(eps)
    return comb


def collapse(stream: Tensor, pre: Tensor, num: Numerics) -> Tensor:
    """`sum_j pre[j] stream[j]`: [rows, hc, hidden] and [rows, hc] -> [rows, hidden]."""
    return (pre.unsqueeze(-1) * stream).sum(1).to(num.dtype)


def expand(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor, num: Numerics) -> Tensor:
    """`post[j] output + sum_i comb[i, j] stream[i]`: a sublayer's output [rows, hidden] back into every copy."""
    mixed = comb.mT @ stream.double()
    return (post.unsqueeze(-1) * output.unsqueeze(1) + mixed).to(num.dtype)


def first_pre(rows: int, config: ModelConfig, device: torch.device) -> Tensor:
    """The coefficients of the first collapse: copy 0 alone. [rows, hc] float64."""
    pre = torch.zeros(rows, config.hc_mult, dtype=torch.float64, device=device)
    pre[:, 0] = 1
    return pre
