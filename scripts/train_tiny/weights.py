"""The tiny checkpoint's sizes, its tensors, and their way to disk and back in the released layout.

Training keeps the experts of a layer stacked under one name (`layers.0.ffn.experts.w1.weight` [experts, rows,
columns]); export splits them. Everything is float32 in memory; `Spec.kind` says how a tensor is stored.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashstep import formats
from flashstep.config import FP8_BLOCK, ModelConfig

NUM_SHARDS = 2
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Spec:
    """Shape in memory and storage: fp4, fp8 (32 x 32 blocks), fp8_rows (a scale per row and 32 columns), bf16, f32."""

    shape: tuple[int, ...]
    kind: str


def tiny_config(vocab_size: int, compressed_vocab_size: int) -> dict[str, Any]:
    """`config.json` of the tiny model: every role of the released one, sizes that split over 1, 2 and 4 ranks."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 32,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [0, 0],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 640,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 10,
        "dspark_target_layer_ids": [4, 5, 6],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 6,
        "dspark_num_experts_per_tok": 2,
    }
    text["engram_num_embeddings"] = _table_rows(text)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "activation_scheme": "dynamic",
        },
        "text_config": text,
    }


def _table_rows(text: dict[str, Any]) -> list[int]:
    """Engram rows by layer: ModelConfig knows the primes, but is complete only with their sums."""
    bare = object.__new__(ModelConfig)
    for key in ("engram_layer_ids", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads"):
        object.__setattr__(bare, key, text[key])
    return [sum(map(sum, sizes)) for sizes in bare.engram_primes]


# -- the tensors ----------------------------------------------------------------------------------------------------


def tensor_specs(config: ModelConfig) -> dict[str, Spec]:
    """Every tensor by its name in memory, scales left out."""
    c, width = config, config.hidden_size
    specs = {"embed.weight": Spec((c.vocab_size, width), "bf16")}
    for layer in range(c.num_hidden_layers):
        name = f"layers.{layer}"
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            columns = c.engram_columns * c.engram_head_dim
            specs[f"{name}.engram.embed.weight"] = Spec((rows, c.engram_head_dim), "fp8_rows")
            specs[f"{name}.engram.wkv.weight"] = Spec(((c.hc_mult + 1) * width, columns), "fp8")
            specs[f"{name}.engram.q_weight"] = Spec((c.hc_mult, width), "bf16")
            specs[f"{name}.engram.k_weight"] = Spec((c.hc_mult, width), "bf16")
        specs |= _layer_specs(config, name, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            specs[f"{name}.attn.compressor.wkv.weight"] = Spec((c.head_dim, width), "bf16")
            if c.compress_ratios[layer] > 1:
                specs[f"{name}.attn.compressor.wgate.weight"] = Spec((c.head_dim, width), "bf16")
            specs[f"{name}.attn.compressor.norm.weight"] = Spec((c.head_dim,), "bf16")
            specs[f"{name}.attn.indexer.wk.weight"] = Spec((c.index_head_dim, c.head_dim), "bf16")
            specs[f"{name}.attn.indexer.k_norm.weight"] = Spec((c.index_head_dim,), "bf16")
        if layer in c.index_source_layer_ids:
            heads = c.index_n_heads
            specs[f"{name}.attn.indexer.wq_b.weight"] = Spec((heads * c.index_head_dim, c.q_lora_rank), "fp8")
            specs[f"{name}.attn.indexer.weights_proj.weight"] = Spec((heads, width), "bf16")
    specs["norm.weight"] = Spec((width,), "bf16")
    specs["head.weight"] = Spec((c.vocab_size, width), "bf16")
    last = f"mtp.{c.num_nextn_predict_layers - 1}"
    for draft in range(c.num_nextn_predict_layers):
        if draft == 0:
            taps = len(c.dspark_target_layer_ids)
            specs["mtp.0.main_proj.weight"] = Spec((width, taps * width), "fp8")
            specs["mtp.0.main_norm.weight"] = Spec((width,), "bf16")
        specs |= _layer_specs(config, f"mtp.{draft}", c.dspark_n_routed_experts)
    specs[f"{last}.norm.weight"] = Spec((width,), "bf16")
    specs[f"{last}.markov_head.embed.weight"] = Spec((c.vocab_size, c.dspark_markov_rank), "bf16")
    specs[f"{last}.markov_head.head.weight"] = Spec((c.vocab_size, c.dspark_markov_rank), "bf16")
    specs[f"{last}.confidence_head.proj.weight"] = Spec((1, width + c.dspark_markov_rank), "bf16")
    return specs


def _layer_specs(config: ModelConfig, name: str, num_experts: int) -> dict[str, Spec]:
    """What backbone and draft layers share: norms, attention, experts, hyper-connections."""
    c, width, inner = config, config.hidden_size, config.moe_intermediate_size
    mixes = (2 + c.hc_mult) * c.hc_mult
    heads = c.num_attention_heads * c.head_dim
    specs = {
        "attn_norm.weight": Spec((width,), "bf16"),
        "attn.wq_a.weight": Spec((c.q_lora_rank, width), "fp8"),
        "attn.q_norm.weight": Spec((c.q_lora_rank,), "bf16"),
        "attn.wq_b.weight": Spec((heads, c.q_lora_rank), "fp8"),
        "attn.wkv.weight": Spec((c.head_dim, width), "fp8"),
        "attn.kv_norm.weight": Spec((c.head_dim,), "bf16"),
        "attn.attn_sink": Spec((c.num_attention_heads,), "f32"),
        "attn.wo_a.weight": Spec((c.o_groups * c.o_lora_rank, heads // c.o_groups), "fp8"),
        "attn.wo_b.weight": Spec((width, c.o_groups * c.o_lora_rank), "fp8"),
        "ffn_norm.weight": Spec((width,), "bf16"),
        "ffn.gate.weight": Spec((num_experts, width), "bf16"),
        "ffn.gate.bias": Spec((num_experts,), "f32"),
    }
    for part in ("w1", "w3", "w2"):
        shape = (width, inner) if part == "w2" else (inner, width)
        specs[f"ffn.experts.{part}.weight"] = Spec((num_experts, *shape), "fp4")
        specs[f"ffn.shared_experts.{part}.weight"] = Spec(shape, "fp8")
    for sublayer in ("attn", "ffn"):
        specs[f"hc_{sublayer}_fn"] = Spec((mixes, c.hc_mult * width), "f32")
        specs[f"hc_{sublayer}_base"] = Spec((mixes,), "f32")
        specs[f"hc_{sublayer}_scale"] = Spec((3,), "f32")
    return {f"{name}.{key}": spec for key, spec in specs.items()}


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random float32 weights. Copies of the stream start alike, so the hyper-connection bases tell them apart."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in tensor_specs(config).items():
        if len(spec.shape) == 1 or name.endswith(("q_weight", "k_weight")):
            weights[name] = torch.zeros(spec.shape) if name.endswith(("sink", "bias")) else torch.ones(spec.shape)
        else:
            gain = spec.shape[-1] ** -0.5
            if name == "embed.weight":
                gain = 0.5
            elif "engram.embed" in name:
                gain = 0.1
            elif name.endswith(("wo_b.weight", "w2.weight", "head.weight", "proj.weight", "hc_attn_fn", "hc_ffn_fn")):
                gain *= 0.3  # what is added to the stream starts small beside the embedding
            weights[name] = torch.randn(spec.shape, generator=generator) * gain
    copies = config.hc_mult
    layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
    layers += [f"mtp.{i}" for i in range(config.num_nextn_predict_layers)]
    sublayers = [f"{layer}.hc_{part}" for layer in layers for part in ("attn", "ffn")]
    for count, name in enumerate(sublayers):
        # Sublayer n writes mostly to copy n + 1, and lets the next one read mostly from there.
        favoured = torch.nn.functional.one_hot(torch.tensor((count + 1) % copies), copies).float()
        weights[f"{name}_base"] = torch.cat((2 * favoured - 1, 1.5 * favoured - 0.5, 4 * torch.eye(copies).flatten()))
        weights[f"{name}_scale"] = torch.full((3,), 0.5)
    return weights


# -- fake quantization ----------------------------------------------------------------------------------------------


def as_stored(weight: Tensor, kind: str) -> Tensor:
    """`weight` [..., shape] float32 as its storage kind holds it; leading dimensions are a stack of tensors.

    The same rounding as the encoders of `flashstep.formats`, over many tensors at once and without their checks,
    which would stop the device at each step.
    """
    if kind == "fp4":
        return round_e2m1(weight, *formats.fp4_ue8m0_scale(weight))
    if kind == "fp8_rows":
        return formats.fp8_round_trip(weight)
    if kind == "fp8":
        rows, columns = weight.shape[-2:]
        padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        tiles = padded.unflatten(-2, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
        amax = tiles.abs().amax((-3, -1), keepdim=True).clamp(min=1e-4)
        scale = formats.ceil_power_of_two(amax * (1 / formats.FP8_MAX))
        tiles = (tiles / scale).clamp(-formats.FP8_MAX, formats.FP8_MAX).to(torch.float8_e4m3fn).float() * scale
        return tiles.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    return weight.bfloat16().float() if kind == "bf16" else weight


def round_e2m1(x: Tensor, scale: Tensor, group: int) -> Tensor:
    """`formats.fp4_round_trip` by arithmetic alone: its tables live on the CPU and would be copied at each call."""
    scaled = x.float().unflatten(-1, (-1, group)) / scale.unsqueeze(-1)
    size = scaled.abs().clamp(max=formats.FP4_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # Half to even in units of the step is half to the even code, also where the step changes.
    rounded = torch.copysign(torch.round(size / step) * step, scaled)
    return (rounded * scale.unsqueeze(-1)).view(x.shape).to(x.dtype)


# -- disk -----------------------------------------------------------------------------------------------------------


def encode(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under their released names and types."""
    encoded: dict[str, Tensor] = {}
    for name, spec in tensor_specs(config).items():
        weight = weights[name].detach().float().cpu()
        if spec.kind == "fp4":
            for expert, matrix in enumerate(weight):
                expert_name = name.replace(".experts.", f".experts.{expert}.")
                _put(encoded, expert_name, *formats.encode_fp4_weight(matrix))
        elif spec.kind == "fp8":
            _put(encoded, name, *formats.encode_fp8_weight(weight))
        elif spec.kind == "fp8_rows":
            codes, scale = formats.fp8_quantize(weight)
            _put(encoded, name, codes, formats.ue8m0_encode(scale))
        else:
            encoded[name] = weight.to(torch.bfloat16 if spec.kind == "bf16" else torch.float32).contiguous()
    return encoded


def _put(encoded: dict[str, Tensor], name: str, codes: Tensor, scale: Tensor) -> None:
    encoded[name] = codes.contiguous()
    encoded[name.removesuffix("weight") + "scale"] = scale.contiguous().view(torch.float8_e8m0fnu)


def decode(encoded: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Inverse of `encode`: float32 weights by their names in memory, with the values that were stored."""

    def values(name: str, kind: str) -> Tensor:
        if kind not in ("fp4", "fp8", "fp8_rows"):
            return encoded[name].float()
        codes, scale = encoded[name], encoded[name.removesuffix("weight") + "scale"].view(torch.uint8)
        if kind == "fp4":
            return formats.decode_fp4_weight(codes, scale)
        return formats.decode_fp8_weight(codes, scale) if kind == "fp8" else _decode_rows(codes, scale)

    weights = {}
    for name, spec in tensor_specs(config).items():
        if spec.kind == "fp4":
            names = [name.replace(".experts.", f".experts.{expert}.") for expert in range(spec.shape[0])]
            weights[name] = torch.stack([values(expert_name, "fp4") for expert_name in names])
        else:
            weights[name] = values(name, spec.kind)
        if tuple(weights[name].shape) != spec.shape:
            raise ValueError(f"{name}: shape {tuple(weights[name].shape)}, expected {spec.shape}")
    return weights


def _decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    return formats.decode_fp8_rows(codes, scale).float()


def save(weights: dict[str, Tensor], config: ModelConfig, folder: Path) -> int:
    """Write the shards and their index, each under a temporary name first. Returns the bytes written."""
    encoded = encode(weights, config)
    total = sum(tensor.nbytes for tensor in encoded.values())
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in encoded.items():
        if filled >= total * len(shards) / NUM_SHARDS and len(shards) < NUM_SHARDS:
            shards.append({})
        shards[-1][name] = tensor
        filled += tensor.nbytes
    written, weight_map = 0, {}
    for count, shard in enumerate(shards, 1):
        file_name = f"model-{count:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file_name)
        save_file(shard, folder / f"{file_name}.part", metadata={"format": "pt"})
        (folder / f"{file_name}.part").chmod(0o644)  # the writer leaves it readable by its owner alone
        os.replace(folder / f"{file_name}.part", folder / file_name)
        written += (folder / file_name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return written + write_json(folder / INDEX_FILE, index)


def load(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Float32 weights by their names in memory, from a checkpoint in the released layout."""
    index = json.loads((folder / INDEX_FILE).read_text())
    encoded: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        encoded |= load_file(folder / file_name)
    return decode(encoded, config)


def write_json(path: Path, value: object, indent: int | None = 1) -> int:
    """Write `value` under a temporary name, then rename; returns the bytes written."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path.stat().st_size
