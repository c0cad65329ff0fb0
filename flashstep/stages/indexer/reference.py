"""Compressor and two-level indexer in exact PyTorch (sections 6 and 7 of `docs/model.md`).

A KV source turns `ratio` consecutive tokens into one entry. An index source scores the index keys of its KV source
and keeps the best entries for itself and for the layers up to the next index source. The candidate source also marks
blocks of entries; later index sources choose inside these alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Linear, Reader, rms_norm, rotate, top_k


@dataclass
class Compressor:
    """Compressor weights of a KV source."""

    wkv: Linear  # [head_dim, hidden] bf16
    wgate: Linear | None  # [head_dim, hidden] bf16; none where the ratio is 1
    norm: Tensor  # [head_dim]

    @classmethod
    def read(cls, reader: Reader, prefix: str) -> Compressor:
        """Read the tensors below `prefix`."""
        gated = f"{prefix}wgate.weight" in reader
        return cls(
            Linear.read(reader, prefix + "wkv"),
            Linear.read(reader, prefix + "wgate") if gated else None,
            reader.tensor(prefix + "norm.weight"),
        )


@dataclass
class IndexKey:
    """Index key weights of a KV source."""

    wk: Linear  # [index_head_dim, head_dim] bf16
    k_norm: Tensor  # [index_head_dim]

    @classmethod
    def read(cls, reader: Reader, prefix: str) -> IndexKey:
        """Read the tensors below `prefix`."""
        return cls(Linear.read(reader, prefix + "wk"), reader.tensor(prefix + "k_norm.weight"))


@dataclass
class IndexQuery:
    """Index query weights of an index source."""

    wq_b: Linear  # [index_heads * index_head_dim, q_lora]
    weights_proj: Linear  # [index_heads, hidden] bf16

    @classmethod
    def read(cls, reader: Reader, prefix: str) -> IndexQuery:
        """Read the tensors below `prefix`."""
        return cls(Linear.read(reader, prefix + "wq_b"), Linear.read(reader, prefix + "weights_proj"))


def project_raw(x: Tensor, w: Compressor, num: Numerics) -> Tensor:
    """What a token gives to its entry: [rows, parts, head_dim] float32 from `x` [rows, hidden].

    One part (the latent before its norm, rounded) at ratio 1; two (k and z, float32) above.
    """
    if w.wgate is None:
        return w.wkv(x).to(num.dtype).float().unsqueeze(1)
    return torch.stack((w.wkv(x), w.wgate(x)), dim=1).float()


def pool(raw: Tensor, w: Compressor, config: ModelConfig, num: Numerics) -> Tensor:
    """Latents [entries, head_dim] from `raw` [entries, ratio, parts, head_dim]: per channel, a softmax over tokens."""
    raw = raw.double()
    pooled = raw[:, 0, 0] if w.wgate is None else (raw[:, :, 0] * raw[:, :, 1].softmax(dim=1)).sum(1)
    return rms_norm(pooled.to(num.dtype), w.norm, config.rms_norm_eps, num)


def kv_entry(latent: Tensor, turns: Tensor, num: Numerics) -> Tensor:
    """What the compressed cache stores of a latent [entries, head_dim]: rotated, then fp4 in groups of 16."""
    return num.kv_fp4(rotate(latent, turns, num))


def index_key(latent: Tensor, turns: Tensor, w: IndexKey, config: ModelConfig, num: Numerics) -> Tensor:
    """Index keys [entries, index_head_dim] of UNROTATED latents [entries, head_dim]."""
    key = rms_norm(w.wk(latent).to(num.dtype), w.k_norm, config.rms_norm_eps, num)
    return num.index_fp4(rotate(key, turns, num))


def index_query(
    x: Tensor, q_r: Tensor, turns: Tensor, w: IndexQuery, config: ModelConfig, num: Numerics
) -> tuple[Tensor, Tensor]:
    """Index queries [rows, index_heads, index_head_dim] and their head weights [rows, index_heads]."""
    query = w.wq_b(num.fp8(q_r)).to(num.dtype).unflatten(-1, (-1, config.index_head_dim))
    query = num.index_fp4(rotate(query, turns, num))
    weights = w.weights_proj(x).to(num.dtype).double()
    return query, weights * config.index_head_dim**-0.5 * config.index_n_heads**-0.5


def score(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`sum_h relu(query_h . key) * weight_h`: [rows, entries] float32 for `keys` [entries, index_head_dim].

    The published code rounds to bf16 at three points, which makes exact ties common; float32 is kept here.
    """
    rows, heads, _ = query.shape
    dots = (query.flatten(0, 1).double() @ keys.double().T).relu_().unflatten(0, (rows, heads))
    return (weights.double().unsqueeze(1) @ dots).squeeze(1).float()


def choose(scores: Tensor, k: int) -> Tensor:
    """The `k` best entries of `scores` [rows, entries] (-inf = not eligible), ascending: [rows, k] int64, -1 pads.

    Of equal scores the lowest entry is kept.
    """
    best = top_k(scores, k)
    best = best.masked_fill(scores.gather(-1, best) == float("-inf"), scores.shape[-1])
    best = best.sort(-1).values
    best = best.masked_fill(best == scores.shape[-1], -1)
    return torch.nn.functional.pad(best, (0, k - best.shape[-1]), value=-1)


def candidates(scores: Tensor, visible: Tensor, config: ModelConfig) -> Tensor:
    """The entries [rows, entries] bool that lie in a row's candidate blocks.

    `scores` [rows, entries] is -inf where not visible; `visible` [rows] counts visible entries. A block scores its
    best entry, the block with the newest visible entry is always in, of equal blocks the lowest is kept.
    """
    size = config.candidate_block_size
    entries = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -entries % size), value=float("-inf"))
    blocks = padded.unflatten(-1, (-1, size)).amax(-1)
    some = visible > 0
    blocks[some, (visible[some] - 1) // size] = float("inf")
    best = top_k(blocks, config.candidate_topk_blocks)
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, blocks.gather(-1, best) > float("-inf"))
    return kept.repeat_interleave(size, dim=-1)[:, :entries]
