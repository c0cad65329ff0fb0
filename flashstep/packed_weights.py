"""One rank's weights in the layouts of the kernels, from a checkpoint or made up at the same shapes.

Owns which tensor goes into which packed weight; the layouts themselves belong to the stages that read them. Packing
runs on the device, layer by layer, so that at most one layer exists twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.layout import TensorSpec, tensor_specs
from flashstep.stages.boundary import cuda as boundary
from flashstep.stages.dense import pack as dense
from flashstep.stages.dense.pack import PackedWeight
from flashstep.stages.engram.tables import Placement, Table, locked_table, place
from flashstep.stages.head.cuda import HeadWeights
from flashstep.stages.indexer import cuda as indexer
from flashstep.stages.moe import cuda as moe

Progress = Callable[[str, int, int], None]  # layer or part, parts done, parts in all


class Source(Protocol):
    """Gives a rank its weights, packed and on its device; names as in the checkpoint, without `.weight`."""

    device: torch.device

    def plain(self, name: str) -> Tensor:
        """The rank's part of the whole tensor `name`, as stored."""

    def product(self, name: str) -> PackedWeight:
        """A dense weight."""

    def experts(self, prefix: str, shape: moe.Shape) -> moe.Weights:
        """Routed and shared experts below `prefix`."""

    def engram_table(self, layer: int) -> Table:
        """A layer's table, where it is to lie."""


# -- what a rank holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HyperConnection:
    """Mixes of one sublayer."""

    fn: Tensor  # `boundary.pack_fn`
    base: Tensor  # f32 [24]
    scale: Tensor  # f32 [3]


@dataclass(frozen=True)
class Block:
    """What backbone and draft layers have in common."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    wq_a: PackedWeight
    q_norm: Tensor  # f32
    wkv: PackedWeight
    kv_norm: Tensor
    wq_b: PackedWeight
    attn_sink: Tensor
    wo_a: tuple[PackedWeight, ...]  # per output group of the rank
    wo_b: PackedWeight
    gate: PackedWeight
    bias: Tensor
    moe_shape: moe.Shape
    experts: moe.Weights


@dataclass(frozen=True)
class Compressor:
    """Of a KV source."""

    wkv: PackedWeight
    wgate: PackedWeight | None
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class IndexQuery:
    """Of an index source."""

    wq_b: PackedWeight
    weights_proj: PackedWeight


@dataclass(frozen=True)
class Engram:
    """Of a layer that carries one."""

    wkv: PackedWeight
    q_weight: Tensor
    k_weight: Tensor
    table: Tensor  # where `engram.tables` placed it
    table_scale: Tensor
    whole_table: bool  # the rows of all ranks; else those of this one


@dataclass(frozen=True)
class Layer:
    """One backbone layer; what it does not have is None."""

    block: Block
    compressor: Compressor | None
    index_query: IndexQuery | None
    engram: Engram | None


@dataclass(frozen=True)
class Draft:
    """The draft layers and their heads."""

    main_proj: PackedWeight
    main_norm: Tensor
    blocks: tuple[Block, ...]
    norm: Tensor
    heads: HeadWeights
    markov_head: Tensor  # bf16 [vocab of the rank, rank], for tokens that the host chooses


@dataclass(frozen=True)
class Weights:
    """Everything that one rank of `world` computes with."""

    config: ModelConfig
    rank: int
    world: int
    embedding: Tensor  # bf16 [vocab, hidden]
    norm: Tensor
    head: PackedWeight
    layers: tuple[Layer, ...]
    draft: Draft

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.embedding.device

    @property
    def heads(self) -> int:
        """Attention heads of the rank."""
        return self.config.num_attention_heads // self.world

    @property
    def groups(self) -> int:
        """Output groups of the rank."""
        return self.config.o_groups // self.world

    @property
    def vocab(self) -> int:
        """Vocabulary rows of the rank's head."""
        return self.config.vocab_size // self.world


def read(
    config: ModelConfig, source: Source, rank: int = 0, world: int = 1, progress: Progress | None = None
) -> Weights:
    """Pack all weights of `rank` of `world`, layer by layer."""
    parts = config.num_hidden_layers + config.num_nextn_predict_layers + 1
    done = 0

    def note(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, parts)

    layers = []
    for number in range(config.num_hidden_layers):
        layers.append(_layer(config, source, number, world))
        note(f"layers.{number}")
    blocks = []
    for number in range(config.num_nextn_predict_layers):
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        blocks.append(_block(config, source, f"mtp.{number}.", *experts, world))
        note(f"mtp.{number}")
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    markov_head = source.plain(f"{last}markov_head.head.weight")
    draft = Draft(
        source.product("mtp.0.main_proj"),
        source.plain("mtp.0.main_norm.weight"),
        tuple(blocks),
        source.plain(f"{last}norm.weight"),
        HeadWeights.pack(
            source.plain(f"{last}markov_head.embed.weight"),
            markov_head,
            source.plain(f"{last}confidence_head.proj.weight"),
        ),
        markov_head,
    )
    weights = Weights(
        config,
        rank,
        world,
        source.plain("embed.weight"),
        source.plain("norm.weight"),
        source.product("head"),
        tuple(layers),
        draft,
    )
    note("embedding and heads")
    return weights


def _layer(config: ModelConfig, source: Source, number: int, world: int) -> Layer:
    prefix = f"layers.{number}."
    block = _block(config, source, prefix, config.n_routed_experts, config.num_experts_per_tok, world)
    compressor = index_query = engram = None
    if number in config.kv_source_layer_ids:
        name = f"{prefix}attn.compressor."
        compressor = Compressor(
            source.product(name + "wkv"),
            source.product(name + "wgate") if config.compress_ratios[number] > 1 else None,
            source.plain(name + "norm.weight"),
            indexer.pack_wk(source.plain(f"{prefix}attn.indexer.wk.weight")),
            source.plain(f"{prefix}attn.indexer.k_norm.weight"),
        )
    if number in config.index_source_layer_ids:
        name = f"{prefix}attn.indexer."
        index_query = IndexQuery(source.product(name + "wq_b"), source.product(name + "weights_proj"))
    if number in config.engram_layer_ids:
        name = f"{prefix}engram."
        engram = Engram(
            source.product(name + "wkv"),
            source.plain(name + "q_weight"),
            source.plain(name + "k_weight"),
            *source.engram_table(number),
        )
    return Layer(block, compressor, index_query, engram)


def _block(config: ModelConfig, source: Source, prefix: str, experts: int, top_k: int, world: int) -> Block:
    shape = moe.Shape(
        config.hidden_size,
        config.moe_intermediate_size // world,
        experts,
        top_k,
        config.routed_scaling_factor,
        config.swiglu_limit,
    )
    attn = f"{prefix}attn."
    wo_a = source.product(attn + "wo_a")
    return Block(
        attn_norm=source.plain(f"{prefix}attn_norm.weight"),
        ffn_norm=source.plain(f"{prefix}ffn_norm.weight"),
        hc_attn=_hyper_connection(source, f"{prefix}hc_attn_"),
        hc_ffn=_hyper_connection(source, f"{prefix}hc_ffn_"),
        wq_a=source.product(attn + "wq_a"),
        q_norm=source.plain(attn + "q_norm.weight").float(),
        wkv=source.product(attn + "wkv"),
        kv_norm=source.plain(attn + "kv_norm.weight"),
        wq_b=source.product(attn + "wq_b"),
        attn_sink=source.plain(attn + "attn_sink"),
        wo_a=_split(wo_a, config.o_lora_rank),
        wo_b=source.product(attn + "wo_b"),
        gate=source.product(f"{prefix}ffn.gate"),
        bias=source.plain(f"{prefix}ffn.gate.bias"),
        moe_shape=shape,
        experts=source.experts(f"{prefix}ffn.", shape),
    )


def _split(weight: PackedWeight, outputs: int) -> tuple[PackedWeight, ...]:
    """Views of equal runs of `outputs` outputs (whole tiles)."""
    parts = weight.data.split(outputs // dense.TILE)
    return tuple(PackedWeight(part, outputs, weight.columns, weight.kind) for part in parts)


def _hyper_connection(source: Source, prefix: str) -> HyperConnection:
    return HyperConnection(
        boundary.pack_fn(source.plain(prefix + "fn")), source.plain(prefix + "base"), source.plain(prefix + "scale")
    )


# -- sources ----------------------------------------------------------------------------------------------------------


class CheckpointSource:
    """Reads the rank's part of each tensor of a checkpoint and packs it on the device."""

    def __init__(
        self, checkpoint: Checkpoint, rank: int, world: int, device: torch.device, engram: Placement = "device"
    ) -> None:
        self._checkpoint, self._rank, self._world, self.device = checkpoint, rank, world, device
        self._engram = engram

    def plain(self, name: str) -> Tensor:
        """The rank's part of `name`, aligned as kernels and wider views of it need."""
        tensor = self._checkpoint.tensor(name, self._rank, self._world, self.device)
        return tensor.clone() if tensor.data_ptr() % 16 else tensor

    def product(self, name: str) -> PackedWeight:
        """A dense weight, bf16 or fp8 as it is stored."""
        weight = self.plain(f"{name}.weight")
        if weight.dtype == torch.bfloat16:
            return dense.pack_bf16(weight)
        return dense.pack_fp8(weight, self.plain(f"{name}.scale"))

    def experts(self, prefix: str, shape: moe.Shape) -> moe.Weights:
        """All experts of a layer; each tensor goes to the device once and is packed there with its siblings."""

        def routed(part: str, suffix: str) -> Tensor:
            return torch.stack(
                [
                    self.plain(f"{prefix}experts.{expert}.{part}.{suffix}").view(torch.uint8)
                    for expert in range(shape.experts)
                ]
            )

        def pairs(*parts: str) -> list[Tensor]:
            return [routed(part, "weight") for part in parts] + [routed(part, "scale") for part in parts]

        shared = {
            f"{part}.{suffix}": self.plain(f"{prefix}shared_experts.{part}.{suffix}")
            for part in ("w1", "w2", "w3")
            for suffix in ("weight", "scale")
        }
        return moe.Weights(
            moe.pack_gate_up(*pairs("w1", "w3")),
            moe.pack_down(*pairs("w2")),
            moe.pack_shared_gate_up(shared["w1.weight"], shared["w3.weight"], shared["w1.scale"], shared["w3.scale"]),
            moe.pack_shared_down(shared["w2.weight"], shared["w2.scale"]),
        )

    def engram_table(self, layer: int) -> Table:
        """A layer's table, where the placement says."""
        return place(self._checkpoint.engram_table(layer, self._rank, self._world), self._engram, self.device)


class RandomSource:
    """Weights at the shapes of `config` that keep activations of order one. For timing: the text is worthless."""

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        world: int,
        device: torch.device,
        seed: int = 0,
        engram: Placement = "device",
    ) -> None:
        """engram: "device" or "pinned"; there is no file to map."""
        if engram == "mapped":
            raise ValueError("--engram-placement mapped needs a checkpoint: random tables are device or pinned")
        self._specs = tensor_specs(config)
        self._rank, self._world, self.device, self._seed = rank, world, device, seed
        self._engram = engram

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._spec(name).local_shape(self._rank, self._world)

    def _spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def _draws(self, name: str, *, replicated: bool) -> torch.Generator:
        """A replicated tensor is the same on every rank."""
        text = f"{self._seed} {name}" if replicated else f"{self._seed} {name} {self._rank}"
        return torch.Generator(self.device).manual_seed(zlib.crc32(text.encode()))

    def plain(self, name: str) -> Tensor:
        """Normal values of the scale that `tiny.random_tensors` gives tensors of this name."""
        spec, shape = self._spec(name), self._shape(name)
        dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        draws = self._draws(name, replicated=spec.split is None)
        value = torch.randn(shape, generator=draws, device=self.device, dtype=dtype)
        if name.endswith(("norm.weight", "_scale", ".q_weight", ".k_weight")):
            return value.mul_(0.1).add_(1)
        if name.endswith(".gate.bias"):
            return value.mul_(0.01)
        if name.endswith("_base"):
            return value.mul_(0.5)
        if name.endswith(("embed.weight", "attn_sink")):
            return value
        return value.mul_(shape[1] ** -0.5)

    def product(self, name: str) -> PackedWeight:
        """A dense weight of the stored kind."""
        spec = self._spec(f"{name}.weight")
        outputs, columns = self._shape(f"{name}.weight")
        kind: dense.Kind = "bf16" if spec.dtype == "BF16" else "fp8"
        draws = self._draws(name, replicated=spec.split is None)
        return dense.random_packed(outputs, columns, kind, draws, self.device)

    def experts(self, prefix: str, shape: moe.Shape) -> moe.Weights:
        """All experts of a layer."""
        return moe.random_packed(self.device, shape, self._draws(prefix, replicated=False))

    def engram_table(self, layer: int) -> Table:
        """The rank's rows: every e4m3 code of middling size, scales of 1."""
        rows, width = self._shape(f"layers.{layer}.engram.embed.weight")
        if self._engram == "pinned":
            table = locked_table(rows, width, self.device)
        else:
            codes = torch.empty(rows, width, dtype=torch.uint8, device=self.device)
            table = Table(codes, torch.empty(rows, width // 32, dtype=torch.uint8, device=self.device), whole=False)
        draws = self._draws(f"engram {layer}", replicated=False)
        step = max(1, (1 << 30) // width)
        for start in range(0, rows, step):
            target = table.codes[start : start + step]
            made = torch.empty(target.shape, dtype=torch.uint8, device=self.device)
            made.view(torch.int64).random_(-(2**63), None, generator=draws)
            target.copy_(made.bitwise_and_(0xBF))  # exponents below 8: no NaN, values up to 1.9
        table.scales.fill_(127)
        return table
