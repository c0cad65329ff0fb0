"""ModelConfig: the sizes and roles of a DeepSeek-V4.1 checkpoint, under the checkpoint's own names.

Owns reading and validating `config.json` (released layout: the text model nested under `text_config`) and every
value that follows from it: which layer is a KV, index or candidate source, which one carries an Engram, the Engram's
hash constants. Nothing else in the package spells a number of the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
FP8_BLOCK = 32  # rows and columns of one fp8 weight scale, columns of one activation or fp4 scale
KV_GROUP = 16  # columns that share one E4M3 scale in a compressed KV entry


class ConfigError(ValueError):
    """A `config.json` that cannot be served; the message lists every problem found."""

    def __init__(self, source: str, problems: list[str]) -> None:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{source}: {len(problems)} problem(s) in the model configuration:\n{lines}")
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (`rope_scaling`)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model of a checkpoint. Field names are the keys of `text_config`; counts are in elements.

    `candidate_source_layer_id` is -1 where no layer marks candidate blocks.
    `compress_ratios` has one entry per backbone layer, then one per draft layer; it names the compressed cache that
    a layer reads (0 = window attention alone).
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read `config.json` (or a directory that holds one). Raises `ConfigError`, which lists every problem."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(str(path), ["no such file: expected the config.json of a V4.1 checkpoint"]) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), [f"not valid JSON: {error}"]) from None
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: Any, source: str = "config") -> ModelConfig:
        """Build from parsed JSON in the released layout. Raises `ConfigError`, which lists every problem."""
        if not isinstance(raw, Mapping):
            raise ConfigError(source, [f"expected a JSON object, found {type(raw).__name__}"])
        problems = _check_kind(raw)
        text = raw.get("text_config")
        if problems or not isinstance(text, Mapping):
            if not isinstance(text, Mapping):
                problems.append(
                    "text_config: expected an object that nests the text model, found "
                    f"{'nothing' if text is None else type(text).__name__} (flat V4 layouts are not V4.1)"
                )
            raise ConfigError(source, problems)
        values = _collect(raw, text, problems)
        if problems:
            raise ConfigError(source, problems)
        config = cls(**values)
        problems = config._inconsistencies()
        if problems:
            raise ConfigError(source, problems)
        return config

    # -- roles --------------------------------------------------------------------------------------------------

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV backbone layer `layer` reads, or None where its ratio is 0."""
        return _last_at_or_below(self.kv_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose choice of compressed entries `layer` attends to, or None where its ratio is 0."""
        return _last_at_or_below(self.index_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def uses_candidates(self, layer: int) -> bool:
        """Whether index source `layer` chooses only inside the blocks that the candidate source marked."""
        return layer in self.index_source_layer_ids and -1 < self.candidate_source_layer_id < layer

    def first_layers(self, count: int) -> ModelConfig:
        """The first `count` backbone layers with the draft, for timing: taps come from the last of them.

        Raises ValueError unless there are more layers than taps and no more than the model has.
        """
        taps = len(self.dspark_target_layer_ids)
        if not taps < count <= self.num_hidden_layers:
            raise ValueError(f"{count} layers: expected {taps + 1}..{self.num_hidden_layers}")

        def kept(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(layer for layer in layers if layer < count)

        engrams = kept(self.engram_layer_ids)
        return replace(
            self,
            num_hidden_layers=count,
            compress_ratios=self.compress_ratios[:count] + (0,) * self.num_nextn_predict_layers,
            kv_source_layer_ids=kept(self.kv_source_layer_ids),
            index_source_layer_ids=kept(self.index_source_layer_ids),
            engram_layer_ids=engrams,
            engram_num_embeddings=self.engram_num_embeddings[: len(engrams)],
            dspark_target_layer_ids=tuple(range(count - taps, count)),
        )

    def role(self, layer: int) -> str:
        """What backbone layer `layer` is, in words, for tables."""
        words = [f"ratio {self.compress_ratios[layer]}" if self.compress_ratios[layer] else "window only"]
        for ids, word in (
            (self.kv_source_layer_ids, "KV source"),
            (self.index_source_layer_ids, "index source"),
            ((self.candidate_source_layer_id,), "candidate source"),
            (self.engram_layer_ids, "Engram"),
            (self.dspark_target_layer_ids, "draft tap"),
        ):
            if layer in ids:
                words.append(word)
        return ", ".join(words)

    # -- derived sizes ------------------------------------------------------------------------------------------

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per position and Engram layer: one per n-gram size and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def kv_entry_bytes(self) -> int:
        """Bytes of one compressed KV entry in a cache: e2m1 codes and one E4M3 scale per 16 columns."""
        return self.head_dim // 2 + self.head_dim // KV_GROUP

    @property
    def index_entry_bytes(self) -> int:
        """Bytes of one index key: e2m1 codes and one UE8M0 scale per 32 columns."""
        return self.index_head_dim // 2 + self.index_head_dim // FP8_BLOCK

    @property
    def window_entry_bytes(self) -> int:
        """Bytes of one window entry: fp8 codes and one UE8M0 scale per 32 columns."""
        return self.head_dim + self.head_dim // FP8_BLOCK

    @property
    def context_bytes_per_token(self) -> float:
        """Bytes of cache that one more token of context costs, over all KV sources, index keys included."""
        return sum(
            (self.kv_entry_bytes + (self.index_entry_bytes if layer in self.index_source_layer_ids else 0))
            / self.compress_ratios[layer]
            for layer in self.kv_source_layer_ids
        )

    @functools.cached_property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Table sizes `[engram layer][ngram size - 2][head]`: each the smallest unused prime above the last one."""
        used: set[int] = set()
        layers = []
        for _ in self.engram_layer_ids:
            sizes = []
            for _ in range(self.engram_max_ngram_size - 1):
                candidate = self.engram_vocab_size - 1
                heads = []
                for _ in range(self.engram_n_heads):
                    candidate += 1
                    while candidate in used or not _is_prime(candidate):
                        candidate += 1
                    used.add(candidate)
                    heads.append(candidate)
                sizes.append(tuple(heads))
            layers.append(tuple(sizes))
        return tuple(layers)

    @functools.cached_property
    def engram_multipliers(self) -> tuple[tuple[int, ...], ...]:
        """Hash multipliers `[engram layer][tokens back]`: odd, drawn from a generator seeded with the layer id."""
        bound = max(1, (2**63 - 1) // self.engram_compressed_vocab_size // 2)
        return tuple(
            tuple(
                int(draw) * 2 + 1
                for draw in np.random.default_rng(10007 * layer).integers(0, bound, size=self.engram_max_ngram_size)
            )
            for layer in self.engram_layer_ids
        )

    # -- consistency --------------------------------------------------------------------------------------------

    def _inconsistencies(self) -> list[str]:
        problems: list[str] = []

        def expect(condition: bool, key: str, value: object, wanted: str) -> None:
            if not condition:
                problems.append(f"text_config.{key} = {value!r}: expected {wanted}")

        for key in [
            "vocab_size",
            "hidden_size",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "qk_rope_head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "o_groups",
            "n_routed_experts",
            "num_experts_per_tok",
            "sliding_window",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "candidate_topk_blocks",
            "candidate_block_size",
            "hc_mult",
            "hc_sinkhorn_iters",
            "engram_vocab_size",
            "engram_n_heads",
            "engram_head_dim",
            "engram_compressed_vocab_size",
            "num_nextn_predict_layers",
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
            "dspark_num_experts_per_tok",
            "max_position_embeddings",
        ]:
            expect(getattr(self, key) >= 1, key, getattr(self, key), "a positive integer")
        for key in ("swiglu_limit", "rms_norm_eps", "rope_theta", "compress_rope_theta", "hc_eps"):
            expect(getattr(self, key) > 0, key, getattr(self, key), "a positive number")
        scaling = self.rope_scaling
        for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            expect(getattr(scaling, key) > 0, f"rope_scaling.{key}", getattr(scaling, key), "a positive number")
        expect(self.engram_max_ngram_size >= 2, "engram_max_ngram_size", self.engram_max_ngram_size, "at least 2")
        expect(self.n_shared_experts == 1, "n_shared_experts", self.n_shared_experts, "1 (one shared expert per layer)")
        if problems:
            return problems  # the checks below divide by these values

        for key, divisor, wanted in (
            ("hidden_size", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("moe_intermediate_size", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("q_lora_rank", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("head_dim", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("index_head_dim", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("engram_head_dim", FP8_BLOCK, "a multiple of the 32-column scale block"),
            ("num_attention_heads", self.o_groups, f"a multiple of o_groups ({self.o_groups})"),
            ("qk_rope_head_dim", 2, "even (rotation takes pairs)"),
        ):
            expect(getattr(self, key) % divisor == 0, key, getattr(self, key), wanted)
        expect(
            (self.o_groups * self.o_lora_rank) % FP8_BLOCK == 0,
            "o_lora_rank",
            self.o_lora_rank,
            f"o_groups x o_lora_rank to be a multiple of {FP8_BLOCK} (o_groups is {self.o_groups})",
        )
        for key, limit_key in (
            ("qk_rope_head_dim", "head_dim"),
            ("qk_rope_head_dim", "index_head_dim"),
            ("num_experts_per_tok", "n_routed_experts"),
            ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
            ("engram_compressed_vocab_size", "vocab_size"),
        ):
            limit = getattr(self, limit_key)
            expect(getattr(self, key) <= limit, key, getattr(self, key), f"at most {limit_key} ({limit})")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, key) < self.vocab_size:
                problems.append(f"{key} = {getattr(self, key)!r}: expected an id below vocab_size ({self.vocab_size})")
        for key in ("engram_pad_token_id", "dspark_noise_token_id"):
            inside = 0 <= getattr(self, key) < self.vocab_size
            expect(inside, key, getattr(self, key), f"an id below vocab_size ({self.vocab_size})")
        self._check_layers(expect, problems)
        return problems

    def _check_layers(self, expect: Any, problems: list[str]) -> None:
        layers, ratios = self.num_hidden_layers, self.compress_ratios
        total = layers + self.num_nextn_predict_layers
        if len(ratios) != total:
            problems.append(
                f"text_config.compress_ratios has {len(ratios)} entries: expected {total} "
                f"(num_hidden_layers {layers} + num_nextn_predict_layers {self.num_nextn_predict_layers})"
            )
            return
        expect(min(ratios) >= 0, "compress_ratios", list(ratios), "non-negative ratios")
        for draft, ratio in enumerate(ratios[layers:]):
            key = f"compress_ratios[{layers + draft}]"
            expect(ratio == 0, key, ratio, "0 (draft layers attend to their window alone)")
        lists_ok = True
        for key in (
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "engram_layer_ids",
            "dspark_target_layer_ids",
        ):
            ids = getattr(self, key)
            good = all(0 <= layer < layers for layer in ids) and list(ids) == sorted(set(ids))
            lists_ok = lists_ok and good
            expect(good, key, list(ids), f"distinct ascending layer ids in 0..{layers - 1}")
        if not lists_ok:
            return
        expect(len(self.dspark_target_layer_ids) > 0, "dspark_target_layer_ids", [], "at least one layer")
        for layer in self.kv_source_layer_ids:
            expect(ratios[layer] > 0, f"compress_ratios[{layer}]", ratios[layer], "a positive ratio: it is a KV source")
        for layer in self.index_source_layer_ids:
            expect(
                ratios[layer] > 0, f"compress_ratios[{layer}]", ratios[layer], "a positive ratio: it is an index source"
            )
        expect(
            self.candidate_source_layer_id in (-1, *self.index_source_layer_ids),
            "candidate_source_layer_id",
            self.candidate_source_layer_id,
            f"one of index_source_layer_ids ({list(self.index_source_layer_ids)}), or -1 for none",
        )
        for layer in range(layers):
            if ratios[layer] == 0:
                continue
            source, chooser = self.kv_source(layer), self.index_source(layer)
            if source is None or chooser is None:
                missing = "kv_source_layer_ids" if source is None else "index_source_layer_ids"
                problems.append(
                    f"text_config.compress_ratios[{layer}] = {ratios[layer]}: expected a source at or below the "
                    f"layer in {missing} ({list(getattr(self, missing))}); a reader cannot come before its source"
                )
                continue
            if ratios[source] != ratios[layer]:
                problems.append(
                    f"text_config.compress_ratios[{layer}] = {ratios[layer]}: expected {ratios[source]}, the ratio "
                    f"of its KV source, layer {source}"
                )
            if chooser < source:
                problems.append(
                    f"text_config.index_source_layer_ids = {list(self.index_source_layer_ids)}: layer {layer} reads "
                    f"the entries of layer {source} with the choice of layer {chooser}, which was made from an older "
                    f"source; expected an index source in {source}..{layer}"
                )
            if source not in self.index_source_layer_ids:
                problems.append(
                    f"text_config.index_source_layer_ids = {list(self.index_source_layer_ids)}: expected KV source "
                    f"{source} among them, since index source {chooser} scores the index keys of its KV source"
                )
            if self.uses_candidates(layer) and source != self.kv_source(self.candidate_source_layer_id):
                problems.append(
                    f"text_config.candidate_source_layer_id = {self.candidate_source_layer_id}: its blocks filter "
                    f"index source {layer}, which reads another KV source ({source})"
                )
        wanted = tuple(sum(map(sum, sizes)) for sizes in self.engram_primes)
        expect(
            self.engram_num_embeddings == wanted,
            "engram_num_embeddings",
            list(self.engram_num_embeddings),
            f"{list(wanted)}, the sums of the hash primes above engram_vocab_size ({self.engram_vocab_size})",
        )


# -- helpers ------------------------------------------------------------------------------------------------------

_TOP_LEVEL = {"bos_token_id", "eos_token_id", "pad_token_id"}
_OPTIONAL = {"image_token_id"}
# One value each is implemented; another one means another function, so it is refused rather than ignored.
_FIXED = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_FIXED_IF_PRESENT = {"gate_temp": 1}  # the router's temperature; no released configuration sets another
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
}


def _check_kind(raw: Mapping[str, Any]) -> list[str]:
    """Problems with what kind of model this is: type names and quantization, matched exactly."""
    problems = []
    if raw.get("model_type") != MODEL_TYPE:
        problems.append(f"model_type = {raw.get('model_type')!r}: expected {MODEL_TYPE!r}")
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        if text.get("model_type") != TEXT_MODEL_TYPE:
            problems.append(f"text_config.model_type = {text.get('model_type')!r}: expected {TEXT_MODEL_TYPE!r}")
        for key, wanted in _FIXED.items():
            if text.get(key) != wanted:
                problems.append(f"text_config.{key} = {text.get(key)!r}: expected {wanted!r}, the only one supported")
        for key, wanted in _FIXED_IF_PRESENT.items():
            if text.get(key, wanted) != wanted:
                problems.append(f"text_config.{key} = {text[key]!r}: expected {wanted!r} or no such key")
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, Mapping):
        problems.append("quantization_config: expected an object, found none (only fp8 + fp4 checkpoints are served)")
    else:
        for key, wanted in _FIXED_QUANTIZATION.items():
            if quantization.get(key) != wanted:
                problems.append(f"quantization_config.{key} = {quantization.get(key)!r}: expected {wanted!r}")
    return problems


def _collect(raw: Mapping[str, Any], text: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Typed values of every field; what is missing or of another type is appended to `problems` by its full path."""
    values: dict[str, Any] = {}
    for field in fields(ModelConfig):
        where, name = (raw, field.name)
        path = field.name
        if field.name not in _TOP_LEVEL and field.name != "image_token_id":
            where, path = text, f"text_config.{field.name}"
        if name not in where or where[name] is None:
            if field.name not in _OPTIONAL:
                problems.append(f"{path}: required key is missing")
            continue
        value = where[name]
        if field.name == "rope_scaling":
            values[field.name] = _rope_scaling(value, problems)
        elif field.type == "int" or field.name == "image_token_id":
            if isinstance(value, bool) or not isinstance(value, int):
                problems.append(f"{path} = {value!r}: expected an integer")
            values[field.name] = value
        elif field.type == "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"{path} = {value!r}: expected a number")
            else:
                values[field.name] = float(value)
        else:
            if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
                problems.append(f"{path} = {value!r}: expected a list of integers")
            else:
                values[field.name] = tuple(value)
    return values


def _rope_scaling(value: Any, problems: list[str]) -> RopeScaling | None:
    if not isinstance(value, Mapping):
        problems.append(f"text_config.rope_scaling = {value!r}: expected an object")
        return None
    kinds = {key: value[key] for key in ("rope_type", "type") if key in value}  # both spellings are in the field
    if not kinds or any(kind != "yarn" for kind in kinds.values()):
        problems.append(f"text_config.rope_scaling.rope_type = {kinds or None!r}: expected 'yarn'")
    numbers = {}
    for field in fields(RopeScaling):
        number = value.get(field.name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            problems.append(f"text_config.rope_scaling.{field.name} = {number!r}: expected a number")
            continue
        numbers[field.name] = int(number) if field.type == "int" else float(number)
    return RopeScaling(**numbers) if len(numbers) == len(fields(RopeScaling)) else None  # type: ignore[arg-type]


def _last_at_or_below(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _is_prime(number: int) -> bool:
    """Trial division: the released tables need primes near 16 million, so at most 4,000 divisions each."""
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))
