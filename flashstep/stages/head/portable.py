"""Heads for any number of rows: the logits are a dense product, the draft's heads two small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstep.stages.dense import portable as dense
from flashstep.stages.dense.pack import PackedWeight
from flashstep.stages.head.cuda import HeadWeights


def logits(hidden: Tensor, head: PackedWeight) -> Tensor:
    """Logits [rows, vocab of the rank] float32 of the normed last hidden state [rows, hidden] bf16."""
    return dense.product(hidden, head, dtype=torch.float32)


def markov(previous: Tensor, embed: Tensor, markov_head: Tensor) -> Tensor:
    """What the previous token [rows] adds to the logits of the next: [rows, vocab of the rank] float32.

    embed: [vocab, rank] bf16; markov_head: [vocab of the rank, rank] bf16, as stored.
    """
    # Without reduced-precision products of float32 this is the exact product of bf16 values, summed in float32.
    return embed[previous].float() @ markov_head.float().T


def confidence(hidden: Tensor, previous: Tensor, w: HeadWeights) -> Tensor:
    """Logit [rows] float32 that a draft is accepted; `hidden` [rows, hidden] is collapsed, not normed."""
    both = torch.cat((hidden.float(), w.embed[previous].float()), dim=-1)
    return both @ w.confidence.float()
