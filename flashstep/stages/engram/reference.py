"""The Engram in exact PyTorch (section 9 of `docs/model.md`).

Row numbers depend on token ids alone, so rows can be fetched long before the layer that needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Linear, Reader, inverse_rms


@dataclass
class Weights:
    """Engram weights of one layer, without its table."""

    wkv: Linear  # [(hc + 1) * hidden, columns * engram_head_dim]: a key per copy, then one value
    q_weight: Tensor  # [hc, hidden]
    k_weight: Tensor  # [hc, hidden]

    @classmethod
    def read(cls, reader: Reader, prefix: str, *, keep_decoded: bool = True) -> Weights:
        """Read the tensors below `prefix`."""
        return cls(
            Linear.read(reader, prefix + "wkv", keep_decoded=keep_decoded),
            reader.tensor(prefix + "q_weight"),
            reader.tensor(prefix + "k_weight"),
        )


def row_ids(history: Tensor, config: ModelConfig) -> Tensor:
    """Table rows [rows, engram layers, columns] int64 from `history` [rows, max_ngram_size] int64.

    `history[:, i]` is the compressed id of the token i positions back (0 = the row's own), or the compressed id of
    the pad token where there is none. Columns go by n-gram size, then head. No product can wrap: multipliers are
    bounded by the size of the compressed vocabulary.
    """
    layers = []
    for multipliers, primes in zip(config.engram_multipliers, config.engram_primes, strict=True):
        roll = history[:, 0] * multipliers[0]
        columns, offset = [], 0
        for back in range(1, config.engram_max_ngram_size):
            roll = roll ^ (history[:, back] * multipliers[back])
            for prime in primes[back - 1]:
                columns.append(roll % prime + offset)
                offset += prime
        layers.append(torch.stack(columns, dim=-1))
    return torch.stack(layers, dim=1)


def project(rows: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> tuple[Tensor, Tensor]:
    """Keys [rows, hc, hidden] and value [rows, 1, hidden] of the table `rows` [rows, columns, engram_head_dim]."""
    kv = w.wkv(num.fp8(rows.flatten(1))).to(num.dtype).double().unflatten(-1, (-1, config.hidden_size))
    return kv[:, :-1], kv[:, -1:]


def gate(stream: Tensor, key: Tensor, w: Weights, config: ModelConfig) -> Tensor:
    """How much of the value each copy takes: [rows, hc, 1] float64 of `stream` and `key` [rows, hc, hidden].

    A normed product of copy and key; here the statistics are per copy.
    """
    x, key, eps = stream.double(), key.double(), config.rms_norm_eps
    dot = (x * (w.q_weight.double() * w.k_weight) * key).sum(-1, keepdim=True)
    dot = dot * inverse_rms(x, eps) * inverse_rms(key, eps) * config.hidden_size**-0.5
    return torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())


def inject(stream: Tensor, rows: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Add the gated value of the table `rows` [rows, columns, engram_head_dim] to `stream` [rows, hc, hidden]."""
    key, value = project(rows, w, config, num)
    return (stream + gate(stream, key, w, config) * value).to(num.dtype)
