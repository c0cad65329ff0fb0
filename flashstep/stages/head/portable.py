"""Heads in Triton, for any number of rows: the logits are a dense product, the draft's heads two small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flashstep.stages.dense import portable as dense
from flashstep.stages.dense.pack import PackedWeight
from flashstep.stages.head.cuda import HeadWeights
from flashstep.stages.triton_ops import Build, dot

import triton  # isort: skip
import triton.language as tl  # isort: skip

_TOKENS = 128  # of the vocabulary, in a program
_ROWS = 16


def logits(hidden: Tensor, head: PackedWeight) -> Tensor:
    """Logits [rows, vocab of the rank] float32 of the normed last hidden state [rows, hidden] bf16."""
    return dense.product(hidden, head, dtype=torch.float32)


@triton.jit(do_not_specialize=["rows", "vocab"])
def _markov(
    previous,  # [rows] i64
    embed,  # [all tokens, RANK] bf16
    head,  # [vocab, RANK] bf16
    out,  # [rows, vocab] f32
    rows,
    vocab,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    last = tl.load(previous + row, mask=row < rows, other=0)
    step = tl.arange(0, STEP)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for column in range(0, RANK, STEP):
        at = token[:, None].to(tl.int64) * RANK + (column + step)[None, :]
        weight = tl.load(head + at, mask=(token < vocab)[:, None], other=0.0)
        at = last[None, :] * RANK + (column + step)[:, None]
        sums = dot(weight, tl.load(embed + at, mask=(row < rows)[None, :], other=0.0), sums)
    inside = (token < vocab)[:, None] & (row < rows)[None, :]
    tl.store(out + row[None, :].to(tl.int64) * vocab + token[:, None], sums, mask=inside)


def markov(previous: Tensor, embed: Tensor, head: Tensor) -> Tensor:
    """What the previous token [rows] int64 adds to the logits of the next: [rows, vocab of the rank] float32.

    embed: [vocab, rank] bf16; head: [vocab of the rank, rank] bf16, as stored.
    """
    rows, (vocab, rank) = len(previous), head.shape
    out = torch.empty(rows, vocab, device=head.device)
    if rows:
        step = min(64, rank & -rank)
        _markov[(triton.cdiv(vocab, _TOKENS), triton.cdiv(rows, _ROWS))](
            previous, embed, head, out, rows, vocab, rank, step, _ROWS, _TOKENS, num_warps=4
        )
    return out


def confidence(hidden: Tensor, previous: Tensor, w: HeadWeights) -> Tensor:
    """Logit [rows] float32 that a draft is accepted; `hidden` [rows, hidden] is collapsed, not normed."""
    both = torch.cat((hidden.float(), w.embed[previous].float()), dim=-1)
    return (both * w.confidence.float()).sum(-1)


# What the released model compiles, for the test that all of it compiles.
KERNELS = [
    Build(
        _markov,
        {"previous": "*i64", "embed": "*bf16", "head": "*bf16", "out": "*fp32", "rows": "i32", "vocab": "i32"},
        {"RANK": 256, "STEP": 64, "ROWS": _ROWS, "TOKENS": _TOKENS},
    )
]
