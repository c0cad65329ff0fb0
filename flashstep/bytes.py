"""Bytes of a model: what a checkpoint holds, what a rank keeps, what a request owns, what one step reads.

Owns the formulas behind `flashstep info` and behind every "multiple of the floor" in a benchmark. Weights come from
`layout.py`, so these figures cannot drift from what is loaded. All functions are pure and need no tensor.

What a step is taken to read, per rank (weights of one verification and one draft):
- every dense weight of the backbone once, whatever the rows; embeddings and Engram tables by the looked-up row;
- routed experts: the expected number of distinct ones if every row chose uniformly, `distinct_experts`; masked rows
  none. The draft chooses among its own experts over one block per request;
- the head twice (verification, draft), the Markov head once per drafted token;
- `main_proj` once (for the committed rows);
- activations and collectives: not counted. Caches: `state_read_bytes`, given apart, for they grow with
  the context while the rest does not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flashstep.config import ModelConfig
from flashstep.layout import TensorSpec, check_world, tensor_specs

_specs = functools.lru_cache(maxsize=2)(tensor_specs)  # 96,000 entries for a release, asked for by every function here

KINDS = (
    "routed experts",
    "shared experts",
    "dense fp8",
    "bf16 and f32",
    "embedding and head",
    "Engram tables",
    "draft experts",
    "draft, other",
)


def kind(name: str, spec: TensorSpec) -> str:
    """The row of the size table, one of `KINDS`, that tensor `name` belongs to."""
    if name.startswith("mtp."):
        return "draft experts" if ".ffn.experts." in name else "draft, other"
    if ".engram.embed." in name:
        return "Engram tables"
    if ".ffn.experts." in name:
        return "routed experts"
    if ".ffn.shared_experts." in name:
        return "shared experts"
    if name in ("embed.weight", "head.weight"):
        return "embedding and head"
    return "dense fp8" if spec.dtype in ("F8_E4M3", "F8_E8M0") else "bf16 and f32"


@dataclass(frozen=True)
class Size:
    """Parameters (scales are none; a packed byte holds two) and bytes, scales included."""

    parameters: int = 0
    nbytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.parameters + other.parameters, self.nbytes + other.nbytes)


def sizes(config: ModelConfig) -> dict[str, Size]:
    """Whole-checkpoint size by `KINDS`."""
    table = dict.fromkeys(KINDS, Size())
    for name, spec in _specs(config).items():
        count = 0 if spec.dtype == "F8_E8M0" else math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
        table[kind(name, spec)] += Size(count, spec.nbytes)
    return table


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank of `world` keeps: weights without tables, and its Engram tables, wherever they are placed."""

    world: int
    experts: int  # routed experts of the backbone
    weights: int  # everything but the tables, experts included
    engram_tables: int


def rank_memory(config: ModelConfig, world: int, rank: int = 0) -> RankMemory:
    """What `rank` of `world` keeps. Raises `ConfigError` where the model does not divide."""
    check_world(config, world)
    local = dict.fromkeys(KINDS, 0)
    for name, spec in _specs(config).items():
        local[kind(name, spec)] += spec.local_bytes(rank, world)
    tables = local["Engram tables"]
    return RankMemory(world, local["routed experts"], sum(local.values()) - tables, tables)


def request_bytes(config: ModelConfig) -> int:
    """Bytes of fixed state of one request, on every rank, whatever its length.

    Window entries of all backbone and draft layers, in rings of the window and one verification; the float32
    (k, gate) pairs of the compressors that pool, over one verification and the group it may have found open; the
    Engram's history of token ids.
    """
    rows = config.dspark_block_size + 1
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    windows = layers * (config.sliding_window + rows) * config.window_entry_bytes
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    groups = sum((rows + ratio - 1) * 2 * config.head_dim * 4 for ratio in ratios if ratio > 1)
    return windows + groups + (config.engram_max_ngram_size - 1) * 4


# -- a step -----------------------------------------------------------------------------------------------------------


def distinct_experts(experts: int, per_row: int, rows: float) -> float:
    """Expected number of distinct experts that `rows` rows choose, `per_row` each, if all are equally likely."""
    return experts * (1 - (1 - per_row / experts) ** rows)


@dataclass(frozen=True)
class StageBytes:
    """Weight bytes that a stage reads in one step on one rank: `per_call` on average, `calls` times."""

    part: str  # backbone, head or draft
    stage: str
    calls: int
    nbytes: float

    @property
    def per_call(self) -> float:
        """Bytes of one call, averaged over the layers that have the stage."""
        return self.nbytes / self.calls


# Stage of a layer by the tensor's name below the layer. The first match counts.
_STAGES = (
    ("attn.indexer.wk.", "compressor"),
    ("attn.indexer.k_norm.", "compressor"),
    ("attn.compressor.", "compressor"),
    ("attn.indexer.", "indexer query"),
    ("attn.wq_a.", "wq_a, wkv"),
    ("attn.wkv.", "wq_a, wkv"),
    ("attn.wq_b.", "wq_b"),
    ("attn.wo_a.", "wo_a"),
    ("attn.wo_b.", "wo_b"),
    ("attn.attn_sink", "attention"),
    ("ffn.gate.", "router"),
    ("ffn.shared_experts.w2.", "down"),
    ("ffn.shared_experts.", "gate/up"),
    ("engram.", "Engram"),
    ("hc_", "mixes"),
    ("main_", "main"),
    ("markov_head.head.", "Markov head"),
    ("confidence_head.", "confidence"),
)


def step_bytes(config: ModelConfig, *, requests: int = 1, rows: int | None = None, world: int = 1) -> list[StageBytes]:
    """Weight bytes of one step by stage, for one rank of `world`.

    `rows` are the verified rows of all requests together; by default every request verifies a whole block.
    """
    check_world(config, world)
    rows = requests * (config.dspark_block_size + 1) if rows is None else rows
    chosen = {
        "backbone": distinct_experts(config.n_routed_experts, config.num_experts_per_tok, rows)
        / config.n_routed_experts,
        "draft": distinct_experts(
            config.dspark_n_routed_experts, config.dspark_num_experts_per_tok, requests * config.dspark_block_size
        )
        / config.dspark_n_routed_experts,
    }
    nbytes: dict[tuple[str, str], float] = {}
    layers: dict[tuple[str, str], set[str]] = {}

    def add(part: str, stage: str, layer: str, amount: float) -> None:
        nbytes[part, stage] = nbytes.get((part, stage), 0.0) + amount
        layers.setdefault((part, stage), set()).add(layer)

    for name, spec in _specs(config).items():
        local = spec.local_bytes(0, world)
        if name == "head.weight":
            add("head", "head (verify)", name, local)
            add("head", "head (draft)", name, local)
        elif "embed." in name:
            continue  # looked up by row: embedding, Markov embedding, Engram tables
        elif name == "norm.weight":
            add("head", "norms", name, local)
        else:
            part = "draft" if name.startswith("mtp.") else "backbone"
            layer, rest = name.split(".", 2)[1:]
            if rest.startswith("ffn.experts."):
                add(part, "down" if ".w2." in rest else "gate/up", layer, local * chosen[part])
            else:
                stage = next((stage for prefix, stage in _STAGES if rest.startswith(prefix)), "norms")
                add(part, stage, layer, local)
    table = []
    for (part, stage), amount in nbytes.items():
        calls = len(layers[part, stage])
        if stage in ("Markov head", "confidence"):
            calls = config.dspark_block_size
            amount *= calls
        table.append(StageBytes(part, stage, calls, amount))
    return sorted(table, key=lambda row: ("backbone", "head", "draft").index(row.part))


def state_read_bytes(config: ModelConfig, context: int, *, rows: int | None = None) -> float:
    """Cache bytes that one request's step reads at `context` tokens, on every rank: caches are replicated.

    Window entries once per layer; chosen compressed entries once per row (rows may choose differently); index keys of
    all visible entries once, for index sources behind the candidate source only those inside candidate blocks, per row.
    """
    rows = config.dspark_block_size + 1 if rows is None else rows
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    nbytes = float(layers * min(context, config.sliding_window) * config.window_entry_bytes)
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        if not ratio:
            continue
        visible = context // ratio
        nbytes += min(visible, rows * min(visible, config.index_topk)) * config.kv_entry_bytes
        if layer in config.index_source_layer_ids:
            scored = visible
            if config.uses_candidates(layer):
                scored = min(visible, rows * config.candidate_topk_blocks * config.candidate_block_size)
            nbytes += scored * config.index_entry_bytes
    return nbytes


def floor_ms(nbytes: float, tb_s: float) -> float:
    """Milliseconds that reading `nbytes` takes at `tb_s` TB/s: no step that reads them is shorter."""
    return nbytes / tb_s / 1e9
