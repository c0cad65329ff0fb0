"""Configuration: what the release says, and every way to be refused, by full key path."""

import copy
import json
from dataclasses import fields
from pathlib import Path

import pytest

from flashstep.config import ConfigError, ModelConfig
from flashstep.tiny import small_config

RELEASED = Path(__file__).parents[2] / "shared" / "spec" / "config.json"
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "a"
TOP_LEVEL = {"bos_token_id", "eos_token_id", "pad_token_id"}
REQUIRED = [field.name for field in fields(ModelConfig) if field.name != "image_token_id"]

# The sizes of the released Engrams; hash constants depend on nothing else.
RELEASED_ENGRAM = {
    "vocab_size": 129280,
    "num_hidden_layers": 15,
    "compress_ratios": [0, 2] + [2] * 12 + [1] + [0, 0],
    "kv_source_layer_ids": [1, 14],
    "index_source_layer_ids": [1, 14],
    "candidate_source_layer_id": -1,
    "dspark_target_layer_ids": [14],
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 16_000_000,
    "engram_compressed_vocab_size": 99_092,
}


def problems_of(raw):
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dict(raw)
    assert all(problem in str(raised.value) for problem in raised.value.problems)
    return raised.value.problems


def refused(**overrides):
    return problems_of(small_config(**overrides))


def path_of(key):
    return key if key in TOP_LEVEL else f"text_config.{key}"


# -- what is accepted -------------------------------------------------------------------------------------------------


def test_engram_constants_of_the_release():
    config = ModelConfig.from_dict(small_config(**RELEASED_ENGRAM))
    first, second = config.engram_primes
    assert first[0][:3] == (16000057, 16000079, 16000081)
    assert (second[0][0], second[-1][-1]) == (16000477, 16000889)
    assert [sum(map(sum, layer)) for layer in (first, second)] == [384_006_168, 384_016_682]
    flat = [prime for layer in config.engram_primes for heads in layer for prime in heads]
    assert len(set(flat)) == 48
    assert config.engram_multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


@pytest.mark.skipif(not RELEASED.exists(), reason="the released config.json is not beside the repository")
def test_released_configuration():
    config = ModelConfig.from_file(RELEASED)
    assert config.num_hidden_layers == 40
    assert config.rms_norm_eps == 1e-20
    assert config.context_bytes_per_token == 890
    assert config.kv_entry_bytes == 288
    assert config.index_entry_bytes == 68
    assert config.window_entry_bytes == 528
    assert config.engram_columns == 24
    sources = [(config.kv_source(layer), config.index_source(layer)) for layer in (0, 2, 7, 19, 20, 23, 24, 39)]
    assert sources == [(None, None), (2, 2), (2, 2), (14, 14), (20, 20), (20, 20), (20, 24), (20, 36)]
    assert [layer for layer in range(40) if config.uses_candidates(layer)] == [24, 28, 32, 36]


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden checkpoint is not beside the repository")
def test_directory_or_file():
    assert ModelConfig.from_file(GOLDEN) == ModelConfig.from_file(GOLDEN / "config.json")
    dense = ModelConfig.from_file(GOLDEN / "config_dense.json")
    assert dense.index_topk == 512


@pytest.mark.parametrize("keys", [{"rope_type"}, {"type"}, {"rope_type", "type"}])
def test_both_spellings_of_the_rope_type(keys):
    raw = small_config()
    scaling = raw["text_config"]["rope_scaling"]
    del scaling["rope_type"]
    scaling.update(dict.fromkeys(keys, "yarn"))
    assert ModelConfig.from_dict(raw).rope_scaling.factor == 16
    for key in keys:
        wrong = copy.deepcopy(raw)
        wrong["text_config"]["rope_scaling"][key] = "linear"
        assert "rope_scaling.rope_type" in problems_of(wrong)[0]


def test_optional_key_and_integers_for_floats():
    config = ModelConfig.from_dict(small_config(hc_eps=1, image_token_id=5))
    assert config.hc_eps == 1.0
    assert isinstance(config.hc_eps, float)
    assert config.image_token_id == 5
    assert ModelConfig.from_dict(small_config()).image_token_id is None


def test_keys_of_the_image_path_are_left_alone():
    raw = small_config()
    raw["vision_config"] = {"hidden_size": 7}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(small_config())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", REQUIRED)
def test_required_key(key):
    """Missing or null: named by its full path, and nothing fills the gap."""
    for change in ("missing", "null"):
        raw = small_config()
        where = raw if key in TOP_LEVEL else raw["text_config"]
        if change == "missing":
            del where[key]
        else:
            where[key] = None
        assert problems_of(raw) == [f"{path_of(key)}: required key is missing"]


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_required_rope_key(key):
    raw = small_config()
    del raw["text_config"]["rope_scaling"][key]
    (problem,) = problems_of(raw)
    assert problem.startswith(f"text_config.rope_scaling.{key} = None")


def test_all_missing_keys_at_once():
    raw = small_config()
    for key in ("hidden_size", "hc_eps", "kv_source_layer_ids"):
        del raw["text_config"][key]
    del raw["pad_token_id"]
    found = {problem.split(":")[0] for problem in problems_of(raw)}
    assert found == {"text_config.hidden_size", "text_config.hc_eps", "text_config.kv_source_layer_ids", "pad_token_id"}


def test_flat_v4_layout():
    raw = small_config()
    flat = raw | raw.pop("text_config") | {"model_type": "deepseek_v41"}
    (problem,) = problems_of(flat)
    assert problem.startswith("text_config: expected an object")
    assert "V4" in problem


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41_vision", "deepseek_v411", "DEEPSEEK_V41", None])
def test_model_type_is_matched_exactly(name):
    raw = small_config()
    raw["model_type"] = name
    assert problems_of(raw) == [f"model_type = {name!r}: expected 'deepseek_v41'"]
    raw = small_config(model_type=name)
    assert problems_of(raw) == [f"text_config.model_type = {name!r}: expected 'deepseek_v41_text'"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 2),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
    ],
)
def test_functions_that_are_not_implemented(key, value):
    (problem,) = refused(**{key: value})
    assert problem.startswith(f"text_config.{key} = {value!r}: expected")


def test_router_temperature():
    for value, accepted in ((1, True), (1.0, True), (0.5, False)):
        raw = small_config()
        raw["text_config"]["gate_temp"] = value
        if accepted:
            assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(small_config())
        else:
            assert problems_of(raw)[0].startswith("text_config.gate_temp = 0.5: expected 1")


@pytest.mark.parametrize(
    ("key", "value"),
    [("quant_method", "awq"), ("weight_block_size", [128, 128]), ("scale_fmt", "f32"), ("expert_dtype", "fp8")],
)
def test_quantization(key, value):
    raw = small_config()
    raw["quantization_config"][key] = value
    (problem,) = problems_of(raw)
    assert problem.startswith(f"quantization_config.{key} = {value!r}")
    del raw["quantization_config"]
    assert problems_of(raw)[0].startswith("quantization_config: expected an object")


@pytest.mark.parametrize("value", ["128", 128.0, True, [128], {}])
def test_integer_of_another_type(value):
    assert refused(sliding_window=value) == [f"text_config.sliding_window = {value!r}: expected an integer"]


@pytest.mark.parametrize("value", ["1e-6", True, []])
def test_number_of_another_type(value):
    assert refused(hc_eps=value) == [f"text_config.hc_eps = {value!r}: expected a number"]


@pytest.mark.parametrize("value", [3, "3", [1.0], [True], [None]])
def test_list_of_another_type(value):
    problem = f"text_config.kv_source_layer_ids = {value!r}: expected a list of integers"
    assert refused(kv_source_layer_ids=value) == [problem]


@pytest.mark.parametrize("raw", [[], "deepseek_v41", None, 3])
def test_not_an_object(raw):
    assert problems_of(raw) == [f"expected a JSON object, found {type(raw).__name__}"]


@pytest.mark.parametrize("key", ["vocab_size", "hc_mult", "dspark_block_size", "index_topk", "engram_n_heads"])
def test_counts_are_positive(key):
    raw = small_config()
    raw["text_config"][key] = 0
    assert f"text_config.{key} = 0: expected a positive integer" in problems_of(raw)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"hidden_size": 100}, "text_config.hidden_size = 100: expected a multiple of the 32-column"),
        ({"moe_intermediate_size": 72}, "text_config.moe_intermediate_size = 72: expected a multiple of the 32"),
        ({"q_lora_rank": 33}, "text_config.q_lora_rank = 33: expected a multiple of the 32-column"),
        ({"head_dim": 80}, "text_config.head_dim = 80: expected a multiple of the 32-column"),
        ({"index_head_dim": 48}, "text_config.index_head_dim = 48: expected a multiple of the 32-column"),
        ({"engram_head_dim": 16}, "text_config.engram_head_dim = 16: expected a multiple of the 32-column"),
        ({"num_attention_heads": 6}, "text_config.num_attention_heads = 6: expected a multiple of o_groups (4)"),
        ({"o_lora_rank": 10}, "text_config.o_lora_rank = 10: expected o_groups x o_lora_rank"),
        ({"qk_rope_head_dim": 31}, "text_config.qk_rope_head_dim = 31: expected even"),
        ({"qk_rope_head_dim": 64}, "text_config.qk_rope_head_dim = 64: expected at most index_head_dim (32)"),
        ({"num_experts_per_tok": 9}, "text_config.num_experts_per_tok = 9: expected at most n_routed_experts (8)"),
        ({"dspark_num_experts_per_tok": 9}, "text_config.dspark_num_experts_per_tok = 9: expected at most"),
        ({"engram_compressed_vocab_size": 513}, "text_config.engram_compressed_vocab_size = 513: expected at most"),
        ({"eos_token_id": 512}, "eos_token_id = 512: expected an id below vocab_size (512)"),
        ({"dspark_noise_token_id": -1}, "text_config.dspark_noise_token_id = -1: expected an id below"),
        ({"n_shared_experts": 2}, "text_config.n_shared_experts = 2: expected 1"),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1, 0]}, "text_config.compress_ratios has 7 entries: expected 8"),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1, 0, 1]}, "text_config.compress_ratios[7] = 1: expected 0"),
        ({"compress_ratios": [2, 2, 2, 1, 1, 1, 0, 0]}, "text_config.compress_ratios[0] = 2: expected a source"),
        ({"compress_ratios": [0, 2, 1, 1, 1, 1, 0, 0]}, "text_config.compress_ratios[2] = 1: expected 2, the ratio"),
        ({"compress_ratios": [0, 0, 2, 1, 1, 1, 0, 0]}, "text_config.compress_ratios[1] = 0: expected a positive"),
        ({"kv_source_layer_ids": [2, 3]}, "text_config.compress_ratios[1] = 2: expected a source at or below"),
        ({"kv_source_layer_ids": [3, 1]}, "text_config.kv_source_layer_ids = [3, 1]: expected distinct ascending"),
        ({"index_source_layer_ids": [1, 3, 6]}, "text_config.index_source_layer_ids = [1, 3, 6]: expected distinct"),
        ({"index_source_layer_ids": [1, 5]}, "text_config.index_source_layer_ids = [1, 5]: layer 3 reads the entries"),
        ({"candidate_source_layer_id": 4}, "text_config.candidate_source_layer_id = 4: expected one of"),
        ({"candidate_source_layer_id": 1}, "text_config.candidate_source_layer_id = 1: its blocks filter"),
        ({"dspark_target_layer_ids": []}, "text_config.dspark_target_layer_ids = []: expected at least one"),
        ({"engram_num_embeddings": [1092]}, "text_config.engram_num_embeddings = [1092]: expected [1092, 1854]"),
        ({"engram_num_embeddings": [1092, 1855]}, "text_config.engram_num_embeddings = [1092, 1855]: expected"),
        ({"engram_max_ngram_size": 1, "engram_num_embeddings": [0]}, "text_config.engram_max_ngram_size = 1"),
    ],
)
def test_inconsistency_is_named(overrides, expected):
    assert any(problem.startswith(expected) for problem in refused(**overrides)), refused(**overrides)


def test_sizes_that_do_not_fit_are_collected():
    found = refused(hidden_size=100, num_attention_heads=6, eos_token_id=-1)
    assert len(found) == 3


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    assert ModelConfig.from_file(tmp_path).num_hidden_layers == 6
