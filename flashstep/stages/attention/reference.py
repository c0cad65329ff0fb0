"""Attention in exact PyTorch (section 5 of `docs/model.md`).

One latent of `head_dim` per token is key and value of every head. A row sees the window entries of its own layer and,
where the layer's ratio is above 0, the chosen compressed entries of its KV source, in one softmax with a sink.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Linear, Reader, rms_norm, rotate


@dataclass
class Weights:
    """Attention weights of one layer."""

    wq_a: Linear  # [q_lora, hidden]
    q_norm: Tensor  # [q_lora]
    wq_b: Linear  # [heads * head_dim, q_lora]
    wkv: Linear  # [head_dim, hidden]
    kv_norm: Tensor  # [head_dim]
    wo_a: Linear  # [groups * o_lora, heads / groups * head_dim]
    wo_b: Linear  # [hidden, groups * o_lora]
    attn_sink: Tensor  # [heads] f32

    @classmethod
    def read(cls, reader: Reader, prefix: str, *, keep_decoded: bool = True) -> Weights:
        """Read the tensors below `prefix`."""

        def linear(name: str) -> Linear:
            return Linear.read(reader, prefix + name, keep_decoded=keep_decoded)

        return cls(
            wq_a=linear("wq_a"),
            q_norm=reader.tensor(prefix + "q_norm.weight"),
            wq_b=linear("wq_b"),
            wkv=linear("wkv"),
            kv_norm=reader.tensor(prefix + "kv_norm.weight"),
            wo_a=linear("wo_a"),
            wo_b=linear("wo_b"),
            attn_sink=reader.tensor(prefix + "attn_sink"),
        )


def project_low(x: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> tuple[Tensor, Tensor]:
    """Low-rank query [rows, q_lora] and latent [rows, head_dim], both normed, from `x` [rows, hidden]."""
    x = num.fp8(x)
    q_r = rms_norm(w.wq_a(x).to(num.dtype), w.q_norm, config.rms_norm_eps, num)
    return q_r, project_latent(x, w, config, num)


def project_latent(x_fp8: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Latent [rows, head_dim], normed but not yet rotated, from `x_fp8` [rows, hidden], already quantized."""
    return rms_norm(w.wkv(x_fp8).to(num.dtype), w.kv_norm, config.rms_norm_eps, num)


def project_q(q_r: Tensor, turns: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Rotated queries [rows, heads, head_dim] from `q_r` [rows, q_lora]; there is no norm per head."""
    q = w.wq_b(num.fp8(q_r)).to(num.dtype).unflatten(-1, (-1, config.head_dim))
    return rotate(q, turns, num)


def window_entry(latent: Tensor, turns: Tensor, num: Numerics) -> Tensor:
    """What the window cache stores of a latent [rows, head_dim]: rotated, then fp8 over the whole vector."""
    return num.fp8(rotate(latent, turns, num))


def attend(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, num: Numerics) -> Tensor:
    """Softmax attention of `q` [rows, heads, head_dim] over `kv` [rows, entries, head_dim] -> like `q`.

    `visible` [rows, entries] bool; entries that are not visible may hold anything finite. `sink` [heads] joins the
    denominator only, once. A row that sees nothing gives zeros. Probabilities are rounded to the activation dtype
    before they meet the values, against the row's final maximum.
    """
    kv = kv.double()
    scores = q.double() @ kv.mT * q.shape[-1] ** -0.5  # [rows, heads, entries]
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    p = torch.exp(scores - highest)
    total = p.sum(-1, keepdim=True) + torch.exp(sink.double()[:, None] - highest)
    out = p.to(num.dtype).double() @ kv
    return (out / total).to(num.dtype)


def project_out(o: Tensor, turns: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Attention output [rows, heads, head_dim] -> [rows, hidden]: rotate back, then the two grouped products.

    The first product takes its input unquantized (`wo_a` is used at bf16).
    """
    o = rotate(o, turns, num, back=True)
    wo_a = w.wo_a.decoded.unflatten(0, (-1, config.o_lora_rank))  # [groups, o_lora, heads / groups * head_dim]
    grouped = o.unflatten(1, (wo_a.shape[0], -1)).flatten(2).transpose(0, 1)  # [groups, rows, ...]
    u = (grouped.double() @ wo_a.mT).transpose(0, 1).to(num.dtype).flatten(1)
    return w.wo_b(num.fp8(u)).to(num.dtype)
