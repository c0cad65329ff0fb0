"""Heads in exact PyTorch (sections 4 and 10 of `docs/model.md`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.ops import Linear, Reader


def logits(hidden: Tensor, head: Linear) -> Tensor:
    """Logits [rows, vocab] float32 of the normed last hidden state [rows, hidden]."""
    return head(hidden).float()


@dataclass
class DraftHeads:
    """Heads of the last draft layer: a first-order correction of the logits, and the confidence."""

    markov_embed: Tensor  # [vocab, markov_rank] bf16
    markov_head: Linear  # [vocab, markov_rank]
    confidence_proj: Linear  # [1, hidden + markov_rank]

    @classmethod
    def read(cls, reader: Reader, prefix: str) -> DraftHeads:
        """Read the heads below `prefix`."""
        return cls(
            reader.tensor(prefix + "markov_head.embed.weight"),
            Linear.read(reader, prefix + "markov_head.head"),
            Linear.read(reader, prefix + "confidence_head.proj"),
        )


def markov(previous: Tensor, w: DraftHeads) -> Tensor:
    """What the previous token [rows] adds to the logits of the next: [rows, vocab] float32."""
    return w.markov_head(w.markov_embed[previous]).float()


def confidence(hidden: Tensor, previous: Tensor, w: DraftHeads) -> Tensor:
    """Logit [rows] float32 of the probability that a draft is accepted, given that those before it were.

    `hidden` [rows, hidden] is the collapsed stream BEFORE the final norm, `previous` [rows] the token in front.
    """
    return w.confidence_proj(torch.cat((hidden, w.markov_embed[previous].to(hidden.dtype)), dim=-1)).float().squeeze(-1)
