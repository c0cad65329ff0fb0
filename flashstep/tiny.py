"""Small checkpoints in the released layout: the configuration that tests share, and random weights for any other.

Owns the scale of random weights. It is chosen so that no part of the model is idle or saturated: activations, index
scores and logits of order one, softmaxes neither flat nor one-hot, block scales that differ from block to block, so
that an exchanged scale, row or head changes the result.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from flashstep.checkpoint import write_checkpoint
from flashstep.config import FP8_BLOCK, MODEL_TYPE, TEXT_MODEL_TYPE, ModelConfig
from flashstep.formats import encode_fp4_weight, encode_fp8_weight, fp8_quantize, ue8m0_encode
from flashstep.layout import TensorSpec, tensor_specs

_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


def small_config(**overrides: Any) -> dict[str, Any]:
    """A valid raw configuration with every role in 6 layers; it divides over 1, 2 and 4 ranks.

    `overrides` are keys of `text_config` (or token ids of the top level), as the file spells them. What follows from
    them is adapted unless given: `engram_num_embeddings` (the hash primes), `engram_compressed_vocab_size` (the whole
    vocabulary: an identity map, since there is no tokenizer) and the zero ratios of the draft layers.
    """
    raw = _base()
    text = raw["text_config"]
    unknown = overrides.keys() - {field.name for field in fields(ModelConfig)} - text.keys()
    if unknown:
        raise TypeError(f"small_config: no such key: {', '.join(sorted(unknown))}")
    base = ModelConfig.from_dict(_base())
    for key, value in overrides.items():
        (raw if key in _TOP_LEVEL else text)[key] = value
    if "compress_ratios" not in overrides:
        drafts = text["num_nextn_predict_layers"]
        text["compress_ratios"] = text["compress_ratios"][: base.num_hidden_layers] + [0] * drafts
    if "engram_compressed_vocab_size" not in overrides:
        text["engram_compressed_vocab_size"] = text["vocab_size"]
    if "engram_num_embeddings" not in overrides:
        sizing = ("engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")
        primes = replace(base, **{key: text[key] for key in sizing}).engram_primes
        text["engram_num_embeddings"] = [sum(map(sum, sizes)) for sizes in primes]
    return raw


def random_checkpoint(
    config: Mapping[str, Any],
    directory: Path | str,
    seed: int = 0,
    *,
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 1_000_000,
) -> Path:
    """Write random weights for the raw `config` to `directory` (which must not exist), with further `files`."""
    tensors = random_tensors(ModelConfig.from_dict(config), seed)
    write_checkpoint(directory, config, tensors, files=files, max_shard_bytes=max_shard_bytes)
    return Path(directory)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `config`, as stored. A tensor depends on its name, its shape and `seed` alone."""
    specs = tensor_specs(config)
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        stem, _, part = name.rpartition(".")
        if part == "scale" and spec.dtype == "F8_E8M0":
            continue  # made with its weight
        draws = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # torch keeps 32 bits of it
        if spec.dtype == "F8_E4M3" and stem.endswith("engram.embed"):
            codes, scale = fp8_quantize(_blocks(spec.shape, (1, FP8_BLOCK), draws))
            tensors[name], tensors[f"{stem}.scale"] = codes, ue8m0_encode(scale)
        elif spec.dtype == "F8_E4M3":
            weight = _blocks(spec.shape, (FP8_BLOCK, FP8_BLOCK), draws) * spec.shape[1] ** -0.5
            tensors[name], tensors[f"{stem}.scale"] = encode_fp8_weight(weight)
        elif spec.dtype == "I8":
            rows, columns = spec.shape[0], spec.shape[1] * 2
            weight = _blocks((rows, columns), (1, FP8_BLOCK), draws) * columns**-0.5
            tensors[name], tensors[f"{stem}.scale"] = encode_fp4_weight(weight)
        else:
            value = _plain(name, spec, draws)
            tensors[name] = value.bfloat16() if spec.dtype == "BF16" else value
    return {name: tensors[name] for name in specs}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _blocks(shape: tuple[int, ...], block: tuple[int, int], draws: Generator) -> Tensor:
    """Normal values whose magnitude differs by a factor of 1/2, 1 or 2 from block to block."""
    counts = [-(-size // length) for size, length in zip(shape, block, strict=True)]
    factors = 2.0 ** torch.randint(-1, 2, counts, generator=draws)
    spread = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    return torch.randn(shape, generator=draws) * spread


def _plain(name: str, spec: TensorSpec, draws: Generator) -> Tensor:
    """float32 values of a tensor that is stored as bf16 or float32."""
    value = torch.randn(spec.shape, generator=draws)
    if name.endswith(("norm.weight", "_scale", ".q_weight", ".k_weight")):
        return 1 + 0.1 * value
    if name.endswith(".gate.bias"):
        return 0.1 * value
    if name.endswith("_base"):
        return 0.5 * value
    if name.endswith(("embed.weight", "attn_sink")):
        return value
    gain = 2.0 if name == "head.weight" else 0.25 if name.endswith("confidence_head.proj.weight") else 1.0
    return gain * value * spec.shape[1] ** -0.5


def _base() -> dict[str, Any]:
    """The default of `small_config`. The swiglu clamp is low enough to act, the contexts short enough to outgrow."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": TEXT_MODEL_TYPE,
            "vocab_size": 512,
            "hidden_size": 128,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 64,
            "o_lora_rank": 32,
            "o_groups": 4,
            "hidden_act": "silu",
            "swiglu_limit": 3.0,
            "rms_norm_eps": 1e-20,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": 1024,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 64,
            },
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 16,
            "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3, 5],
            "index_n_heads": 4,
            "index_head_dim": 32,
            "index_topk": 8,
            "candidate_source_layer_id": 3,
            "candidate_topk_blocks": 4,
            "candidate_block_size": 4,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "engram_layer_ids": [1, 3],
            "engram_num_embeddings": [1092, 1854],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 64,
            "engram_n_heads": 4,
            "engram_head_dim": 32,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 512,
            "num_nextn_predict_layers": 2,
            "dspark_block_size": 5,
            "dspark_noise_token_id": 3,
            "dspark_target_layer_ids": [3, 4, 5],
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 8,
            "dspark_num_experts_per_tok": 2,
        },
    }
