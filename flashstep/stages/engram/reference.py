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


def inject(stream: Tensor, rows: Tensor, w: Weights, config: ModelConfig, num: Numerics) -> Tensor:
    """Add the gated value of the table `rows` [rows, columns, engram_head_dim] to `stream` [rows, hc, hidden]."""
    hc, hidden = stream.shape[1:]
    kv = w.wkv(num.fp8(rows.flatten(1))).to(num.dtype).double()
    key, value = kv[:, : hc * hidden].unflatten(-1, (hc, hidden)), kv[:, None, hc * hidden :]
    x = stream.double()
    weight = w.q_weight.double() * w.k_weight.double()
    dot = (x * weight * key).sum(-1, keepdim=True)
    dot = dot * inverse_rms(x, config.rms_norm_eps) * inverse_rms(key, config.rms_norm_eps) * hidden**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    return (x + gate * value).to(num.dtype)
