"""Every tensor of a V4.1 text checkpoint: its name, shape, stored dtype, and what each tensor-parallel rank holds.

Owns the names and the split; `checkpoint.py` compares files with it. Split over the ranks: attention heads (`wq_b`,
`attn_sink`), output groups (`wo_a`, `wo_b`), intermediate columns of routed and shared experts, the vocabulary rows
of `head` and of the Markov head, Engram heads (table rows, `wkv` columns), and the columns of `main_proj`, whose
78 MB would otherwise be read whole by every rank. Replicated: everything else. That includes `embed` and the Markov
embedding: a lookup reads one row, and splitting them would put a collective before the first layer and between the
five dependent steps of a draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from flashstep.config import FP8_BLOCK, ConfigError, ModelConfig

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}  # safetensors' names

# The image path and the image tokens' router bias, in backbone and draft layers. A checkpoint may hold these;
# nothing reads them. Any other name that is not in `tensor_specs` stops the load.
IGNORED_PREFIXES = ("vision.", "aligner.", "image_")
IGNORED_SUFFIXES = (".ffn.gate.bias_vl",)


@dataclass(frozen=True)
class Split:
    """The axis that ranks share, and how.

    Without `sections` each rank takes an equal, contiguous run. With them, the axis is a row of sections (n-gram
    sizes), each a tuple of piece sizes (heads), and a rank takes an equal run of the pieces of every section.
    """

    axis: int
    sections: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as stored: `shape`, the safetensors `dtype`, and its tensor-parallel `split` (None: replicated)."""

    shape: tuple[int, ...]
    dtype: str
    split: Split | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def ranges(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Half-open ranges of the split axis (axis 0 where replicated) that `rank` of `world` holds, in order."""
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: expected a rank in 0..{world - 1}")
        if self.split is None or world == 1:
            return [(0, self.shape[self.split.axis if self.split else 0])]
        extent = self.shape[self.split.axis]
        if not self.split.sections:
            if extent % world:
                raise ValueError(f"{extent} rows or columns do not divide over {world} ranks")
            return [(extent * rank // world, extent * (rank + 1) // world)]
        ranges, start = [], 0
        for pieces in self.split.sections:
            if len(pieces) % world:
                raise ValueError(f"{len(pieces)} Engram heads do not divide over {world} ranks")
            edges = list(accumulate(pieces, initial=start))
            ranges.append((edges[len(pieces) * rank // world], edges[len(pieces) * (rank + 1) // world]))
            start = edges[-1]
        return ranges

    def local_shape(self, rank: int, world: int) -> tuple[int, ...]:
        """Shape of what `rank` of `world` holds."""
        axis = self.split.axis if self.split else 0
        size = sum(stop - start for start, stop in self.ranges(rank, world))
        return (*self.shape[:axis], size, *self.shape[axis + 1 :])

    def local_bytes(self, rank: int, world: int) -> int:
        """Bytes of what `rank` of `world` holds."""
        return math.prod(self.local_shape(rank, world)) * DTYPE_BYTES[self.dtype]


def is_ignored(name: str) -> bool:
    """Whether `name` belongs to the image path, which text serving skips."""
    return name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def check_world(config: ModelConfig, world: int) -> None:
    """Raise one `ConfigError` that lists every size that does not divide over `world` ranks."""
    source = f"tensor parallelism over {world} ranks"
    if world < 1:
        raise ConfigError(source, ["expected at least one rank"])
    main_columns = config.hidden_size * len(config.dspark_target_layer_ids)
    needs = [
        ("num_attention_heads", config.num_attention_heads, 1, "heads"),
        ("o_groups", config.o_groups, 1, "output groups"),
        ("o_groups x o_lora_rank", config.o_groups * config.o_lora_rank, FP8_BLOCK, "columns of wo_b"),
        ("moe_intermediate_size", config.moe_intermediate_size, FP8_BLOCK, "expert columns"),
        ("hidden_size x dspark_target_layer_ids", main_columns, FP8_BLOCK, "columns of main_proj"),
        ("vocab_size", config.vocab_size, 1, "vocabulary rows"),
    ]
    if config.engram_layer_ids:
        needs.append(("engram_n_heads", config.engram_n_heads, 1, "Engram heads"))
    problems = [
        f"text_config.{key} = {size}: expected a multiple of {unit * world}, "
        + (f"whole {FP8_BLOCK}-column scale blocks of {what}" if unit > 1 else f"equally many {what}")
        + " on each rank"
        for key, size, unit, what in needs
        if world > 1 and size % (unit * world)
    ]
    if problems:
        raise ConfigError(source, problems)


def engram_offsets(config: ModelConfig, layer: int, rank: int = 0, world: int = 1) -> tuple[tuple[int, ...], ...]:
    """First table row of each head, `[ngram size - 2][head of the rank]`, counted inside the rank's own table.

    A rank holds its heads of every n-gram size one after another, so its offsets are the running sum of its own
    primes; row = hash modulo prime + offset.
    """
    sizes = config.engram_primes[config.engram_layer_ids.index(layer)]
    first, last = (config.engram_n_heads * r // world for r in (rank, rank + 1))
    starts = accumulate((prime for heads in sizes for prime in heads[first:last]), initial=0)
    return tuple(tuple(next(starts) for _ in range(first, last)) for _ in sizes)


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text model by name: backbone, Engrams, draft layers and heads."""
    vocab = Split(0)
    embedding = (config.vocab_size, config.hidden_size)
    specs = {
        "embed.weight": TensorSpec(embedding, "BF16"),
        "norm.weight": TensorSpec((config.hidden_size,), "BF16"),
        "head.weight": TensorSpec(embedding, "BF16", vocab),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        specs.update(_attention(config, prefix))
        specs.update(_compressor(config, layer))
        specs.update(_indexer(config, layer))
        if layer in config.engram_layer_ids:
            specs.update(_engram(config, layer))
        specs.update(_moe(config, prefix, config.n_routed_experts))
        specs.update(_hyper_connections(config, prefix))
    for draft in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{draft}."
        specs.update(_attention(config, prefix))
        specs.update(_moe(config, prefix, config.dspark_n_routed_experts))
        specs.update(_hyper_connections(config, prefix))
    main_columns = config.hidden_size * len(config.dspark_target_layer_ids)
    specs.update(_fp8("mtp.0.main_proj", config.hidden_size, main_columns, Split(1)))
    specs["mtp.0.main_norm.weight"] = TensorSpec((config.hidden_size,), "BF16")
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    markov = (config.vocab_size, config.dspark_markov_rank)
    specs[f"{last}norm.weight"] = TensorSpec((config.hidden_size,), "BF16")
    specs[f"{last}markov_head.embed.weight"] = TensorSpec(markov, "BF16")
    specs[f"{last}markov_head.head.weight"] = TensorSpec(markov, "BF16", vocab)
    confidence = (1, config.hidden_size + config.dspark_markov_rank)
    specs[f"{last}confidence_head.proj.weight"] = TensorSpec(confidence, "BF16")
    return specs


# -- parts of a layer -------------------------------------------------------------------------------------------------

Named = Iterator[tuple[str, TensorSpec]]


def _fp8(name: str, rows: int, columns: int, split: Split | None = None) -> Named:
    """A weight and its UE8M0 scale per 32 x 32 block."""
    yield f"{name}.weight", TensorSpec((rows, columns), "F8_E4M3", split)
    yield f"{name}.scale", TensorSpec((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), "F8_E8M0", split)


def _fp4(name: str, rows: int, columns: int, split: Split) -> Named:
    """A packed e2m1 weight, two columns a byte, and its UE8M0 scale per row and 32 columns."""
    yield f"{name}.weight", TensorSpec((rows, columns // 2), "I8", split)
    yield f"{name}.scale", TensorSpec((rows, columns // FP8_BLOCK), "F8_E8M0", split)


def _attention(config: ModelConfig, prefix: str) -> Named:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    out = config.o_groups * config.o_lora_rank
    yield f"{prefix}attn_norm.weight", TensorSpec((hidden,), "BF16")
    yield from _fp8(f"{prefix}attn.wq_a", config.q_lora_rank, hidden)
    yield from _fp8(f"{prefix}attn.wq_b", heads * head_dim, config.q_lora_rank, Split(0))
    yield from _fp8(f"{prefix}attn.wkv", head_dim, hidden)
    yield from _fp8(f"{prefix}attn.wo_a", out, heads * head_dim // config.o_groups, Split(0))
    yield from _fp8(f"{prefix}attn.wo_b", hidden, out, Split(1))
    yield f"{prefix}attn.q_norm.weight", TensorSpec((config.q_lora_rank,), "BF16")
    yield f"{prefix}attn.kv_norm.weight", TensorSpec((head_dim,), "BF16")
    yield f"{prefix}attn.attn_sink", TensorSpec((heads,), "F32", Split(0))


def _compressor(config: ModelConfig, layer: int) -> Named:
    if layer not in config.kv_source_layer_ids:
        return
    prefix = f"layers.{layer}.attn.compressor."
    shape = (config.head_dim, config.hidden_size)
    yield f"{prefix}wkv.weight", TensorSpec(shape, "BF16")
    if config.compress_ratios[layer] > 1:  # one token per entry needs no pooling weights
        yield f"{prefix}wgate.weight", TensorSpec(shape, "BF16")
    yield f"{prefix}norm.weight", TensorSpec((config.head_dim,), "BF16")


def _indexer(config: ModelConfig, layer: int) -> Named:
    if layer not in config.index_source_layer_ids:
        return
    prefix = f"layers.{layer}.attn.indexer."
    yield from _fp8(f"{prefix}wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield f"{prefix}weights_proj.weight", TensorSpec((config.index_n_heads, config.hidden_size), "BF16")
    if layer in config.kv_source_layer_ids:
        yield f"{prefix}wk.weight", TensorSpec((config.index_head_dim, config.head_dim), "BF16")
        yield f"{prefix}k_norm.weight", TensorSpec((config.index_head_dim,), "BF16")


def _engram(config: ModelConfig, layer: int) -> Named:
    prefix = f"layers.{layer}.engram."
    index = config.engram_layer_ids.index(layer)
    rows, dim = config.engram_num_embeddings[index], config.engram_head_dim
    by_prime = Split(0, config.engram_primes[index])
    yield f"{prefix}embed.weight", TensorSpec((rows, dim), "F8_E4M3", by_prime)
    yield f"{prefix}embed.scale", TensorSpec((rows, dim // FP8_BLOCK), "F8_E8M0", by_prime)
    sizes = config.engram_max_ngram_size - 1
    columns = config.engram_columns * dim
    wkv_rows = (config.hc_mult + 1) * config.hidden_size  # one key per residual copy, then the value
    for (name, spec), head_columns in zip(
        _fp8(f"{prefix}wkv", wkv_rows, columns), (dim, dim // FP8_BLOCK), strict=True
    ):
        by_head = Split(1, ((head_columns,) * config.engram_n_heads,) * sizes)
        yield name, replace(spec, split=by_head)
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}{name}", TensorSpec((config.hc_mult, config.hidden_size), "BF16")


def _moe(config: ModelConfig, prefix: str, num_experts: int) -> Named:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}ffn_norm.weight", TensorSpec((hidden,), "BF16")
    yield f"{prefix}ffn.gate.weight", TensorSpec((num_experts, hidden), "BF16")
    yield f"{prefix}ffn.gate.bias", TensorSpec((num_experts,), "F32")
    shared = f"{prefix}ffn.shared_experts."
    yield from _fp8(f"{shared}w1", inner, hidden, Split(0))
    yield from _fp8(f"{shared}w2", hidden, inner, Split(1))
    yield from _fp8(f"{shared}w3", inner, hidden, Split(0))
    for expert in range(num_experts):
        routed = f"{prefix}ffn.experts.{expert}."
        yield from _fp4(f"{routed}w1", inner, hidden, Split(0))
        yield from _fp4(f"{routed}w2", hidden, inner, Split(1))
        yield from _fp4(f"{routed}w3", inner, hidden, Split(0))


def _hyper_connections(config: ModelConfig, prefix: str) -> Named:
    mixes = (2 + config.hc_mult) * config.hc_mult
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}hc_{sublayer}_fn", TensorSpec((mixes, config.hc_mult * config.hidden_size), "F32")
        yield f"{prefix}hc_{sublayer}_base", TensorSpec((mixes,), "F32")
        yield f"{prefix}hc_{sublayer}_scale", TensorSpec((3,), "F32")
