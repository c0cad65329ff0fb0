"""Verification: passes on recorded numbers, fails on damaged ones, and takes every size from the files."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashstep.checkpoint import Checkpoint, CheckpointError
from flashstep.config import ConfigError, ModelConfig
from flashstep.draft import Draft
from flashstep.formats import Numerics
from flashstep.loading import token_map
from flashstep.model import Model
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.moe import reference as moe
from flashstep.state import Rows, State
from flashstep.tiny import random_checkpoint, small_config
from flashstep.verify import GoldenError, Report, print_report, verify

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors in ../shared/golden")


# -- recorded by the published code -----------------------------------------------------------------------------------


@needs_golden
def test_the_kernels_pass_as_a_whole_model() -> None:
    report = verify(GOLDEN / "a", backend="hopper")
    assert report.passed
    assert sum(row.mode == "bf16" for row in report.rows) == 30  # six prompts: logits, drafts, confidences


@needs_golden
@pytest.mark.slow
def test_the_portable_kernels_pass_on_a_short_prompt(tmp_path: Path) -> None:
    """A few rows, for the interpreter takes seconds for each; on a GPU `flashstep verify` takes all of them."""
    steps = 2
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(GOLDEN / "a" / name, tmp_path)
    for file in (GOLDEN / "a").glob("model*"):
        shutil.copy(file, tmp_path)
    recorded = load_file(GOLDEN / "a" / "vectors" / "p1.safetensors")
    by_step = {"decode_logits", "draft_ids", "draft_logits", "confidence"}
    kept = {name: value[:steps] for name, value in recorded.items() if name in by_step}
    kept |= {name: recorded[name] for name in ("prompt", "prefill_logits")}
    kept["decode_tokens"] = recorded["decode_tokens"][: steps + 1]
    (tmp_path / "vectors").mkdir()
    save_file({name: value.contiguous() for name, value in kept.items()}, tmp_path / "vectors" / "p1.safetensors")
    report = verify(tmp_path, backend="portable")
    assert report.passed, report.failures
    assert sum(row.mode == "bf16" for row in report.rows) == 5


@needs_golden
def test_golden_passes() -> None:
    report = verify(GOLDEN)
    assert report.passed, report.failures
    files = {row.file for row in report.rows}
    assert {"a/p0", "a/p5", "a/dense_p5", "a/layers", "a/noquant", "units/moe", "units/engram"} <= files
    assert all("unknown" not in note.reason for note in report.notes), report.notes


@needs_golden
def test_units_alone_find_their_configuration_beside_them() -> None:
    report = verify(GOLDEN / "units")
    assert report.passed, report.failures
    assert any(row.quantity == "engram.out" for row in report.rows)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "units", tmp_path / "units")


@needs_golden
def test_units_without_a_configuration_skip_its_weights(units: Path) -> None:
    report = verify(units)
    assert report.passed
    assert not any(row.quantity == "engram.out" for row in report.rows)
    assert any(note.quantity == "out" and "beside" in note.reason for note in report.notes)


@needs_golden
@pytest.mark.parametrize(
    ("file", "tensor", "quantity"),
    [
        ("act_quant", "q", "act_quant.q"),
        ("window_indices", "decode_13", "window_indices.decode_13"),
        ("rope", "yarn160k.y_f32", "rope.yarn160k.y_f32"),
        ("indexer_r2", "user_sel", "indexer.user_sel"),
        ("gate", "biased_scores", "gate.biased_scores (their weights)"),
        ("moe", "moe.y", "moe.moe.y"),
        ("draft_heads", "chain.ids", "draft_heads.chain.ids"),
    ],
)
def test_one_changed_value_fails_its_quantity(units: Path, file: str, tensor: str, quantity: str) -> None:
    path = units / f"{file}.safetensors"
    tensors = load_file(path)
    flat = tensors[tensor].view(-1)
    if flat.dtype.itemsize == 1:
        flat.view(torch.uint8)[-1] ^= 1
    else:
        flat[-1] = flat[-1] * 2 + 1
    save_file(tensors, path)
    assert quantity in {row.quantity for row in verify(units).failures}


@needs_golden
def test_tensors_that_are_listed_but_missing_are_an_error(units: Path) -> None:
    tensors = load_file(units / "gate.safetensors")
    del tensors["indices"]
    save_file(tensors, units / "gate.safetensors")
    with pytest.raises(GoldenError, match="gate: no tensor indices"):
        verify(units)


@needs_golden
def test_absent_and_unknown_tensors_are_reported(units: Path) -> None:
    index = json.loads((units / "index.json").read_text())
    del index["gate"]["tensors"]
    (units / "index.json").write_text(json.dumps(index))
    tensors = load_file(units / "gate.safetensors")
    del tensors["indices"]
    save_file(tensors | {"something": torch.zeros(3)}, units / "gate.safetensors")
    save_file({"x": torch.zeros(3)}, units / "novel.safetensors")
    report = verify(units)
    assert report.passed
    reasons = {(note.file, note.quantity): note.reason for note in report.notes}
    assert reasons["gate", "indices"] == "not in this file"
    assert "nothing here compares it" in reasons["gate", "something"]
    assert "unknown unit file" in reasons["novel", "all tensors"]


# -- damaged directories ----------------------------------------------------------------------------------------------


@needs_golden
def test_broken_unit_files_are_all_named(units: Path) -> None:
    (units / "moe.safetensors").unlink()
    content = (units / "rope.safetensors").read_bytes()
    (units / "rope.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(GoldenError) as error:
        verify(units)
    assert "moe.safetensors: no such file" in str(error.value)
    assert "rope.safetensors: not a readable safetensors file" in str(error.value)


def test_directories_without_vectors_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="found nothing; expected"):
        verify(tmp_path)
    with pytest.raises(GoldenError, match="no such directory"):
        verify(tmp_path / "absent")
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(GoldenError, match="not valid JSON"):
        verify(tmp_path)


def test_an_unknown_backend_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no backend 'nonesuch': expected one of hopper, portable, reference"):
        verify(tmp_path, backend="nonesuch")


# -- another configuration --------------------------------------------------------------------------------------------

# Differs from the recorded one in every count that a comparison could have assumed.
OTHER = {
    "num_hidden_layers": 5,
    "hc_mult": 2,
    "sliding_window": 11,
    "compress_ratios": [0, 0, 2, 2, 1, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4],
    "index_topk": 6,
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [2],
    "engram_max_ngram_size": 3,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [1, 4],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "o_groups": 2,
}
PROMPTS = {"q0": (3, 5), "q1": (38, 4)}  # tokens, decode steps
HC_LAYER = 1


def record(config: ModelConfig, model: Model, draft: Draft, tokens: list[int], length: int) -> dict[str, Tensor]:
    """Every table of a prompt file, from a run of one request."""
    total = len(tokens) - 1
    state = State(config, num_slots=1, num_pages=4, page_tokens=32, rows_per_request=64, dtype=model.num.dtype)
    slot = state.acquire()
    state.reserve(slot, total)
    values: dict[str, list[Tensor]] = {}
    drafts: dict[str, list[Tensor]] = {}
    starts = [0, *range(length, total)]
    for start, end in zip(starts, [*starts[1:], total], strict=True):
        rows = Rows.of([(slot, start, tokens[start:end])])
        output = model.forward(state, rows, lambda name, value: values.setdefault(name, []).append(value))
        values.setdefault("final_hidden", []).append(output.hidden)
        values.setdefault("main_hidden", []).append(output.taps)
        values.setdefault("logits", []).append(model.logits(output.hidden))
        draft.observe(state, rows, output.taps)
        if start:
            anchor = torch.tensor([tokens[end]])
            found = draft.propose(
                state, torch.tensor([slot]), torch.tensor([start]), anchor, lambda _, logits: logits.argmax(-1)
            )
            drafts.setdefault("draft_ids", []).append(torch.cat((anchor, found.tokens[0])).int())
            drafts.setdefault("draft_logits", []).append(found.logits[0])
            drafts.setdefault("confidence", []).append(found.confidence[0])
    run = {name: torch.cat(parts) for name, parts in values.items()}
    layers = range(config.num_hidden_layers)
    snapshots = torch.tensor([0, length - 1, total - 1])

    def stacked(name: str) -> Tensor:
        return torch.stack([run[f"layer.{layer}.{name}"] for layer in layers])

    routes = [moe.route(run[f"layer.{n}.ffn_in"], model.layers[n].block.ffn, config) for n in layers]
    streams = torch.cat((stacked("stream_in"), run[f"layer.{layers[-1]}.stream_out"][None]))
    tables = {
        "prefill_logits": run["logits"][:length],
        "decode_logits": run["logits"][length:],
        **{name: torch.stack(parts) for name, parts in drafts.items()},
        "router_idx": torch.stack([chosen for chosen, _ in routes]).short(),
        "router_w": torch.stack([weights for _, weights in routes]).float(),
        "index_sel": torch.stack([run[f"layer.{n}.index_sel"] for n in config.index_source_layer_ids]).int(),
        "engram_hash": run["engram_hash"].int(),
        "snap_pos": snapshots.int(),
        "snap.stream": streams[:, snapshots],
        **{f"snap.{n}": stacked(n)[:, snapshots] for n in ("attn_in", "attn_out", "ffn_in", "ffn_out")},
        "snap.final_hidden": run["final_hidden"][snapshots],
        "snap.main_hidden": run["main_hidden"][snapshots],
    }
    for kind, stream in (("attn", "stream_in"), ("ffn", "stream_mid")):
        weights = getattr(model.layers[HC_LAYER].block, f"hc_{kind}")
        found = boundary.mixes(run[f"layer.{HC_LAYER}.{stream}"], weights, config)
        tables |= {f"hc_{kind}_{part}": c.float() for part, c in zip(("pre", "post", "comb"), found, strict=True)}
    return {name: value.contiguous().clone() for name, value in tables.items()} | {"run": run}


def record_layers(config: ModelConfig, model: Model, run: dict[str, Tensor], prompt: list[int]) -> dict[str, Tensor]:
    """A layers file: what the run's prompt rows went through."""
    length = len(prompt)
    found = {name: value[:length] for name, value in run.items() if name.startswith("layer.")}
    found = {name: value for name, value in found.items() if not name.endswith(("stream_in", "index_sel"))}
    found |= {"prompt": torch.tensor(prompt).int(), "layer.0.stream_in": run["layer.0.stream_in"][:length]}
    found |= {name: run[name][:length] for name in ("final_hidden", "main_hidden")}
    for number, layer in enumerate(model.layers):
        before = run.get(f"layer.{number}.stream_engram", run[f"layer.{number}.stream_in"])[:length]
        for kind, stream in (("attn", before), ("ffn", found[f"layer.{number}.stream_mid"])):
            mixes = boundary.mixes(stream, getattr(layer.block, f"hc_{kind}"), config)
            for part, value in zip(("pre", "post", "comb"), mixes, strict=True):
                found[f"layer.{number}.hc_{kind}_{part}"] = value.float()
    state = State(config, num_slots=1, num_pages=2, page_tokens=32, rows_per_request=64)
    state.reserve(state.acquire(), length)
    model.forward(state, Rows.of([(0, 0, prompt)]))
    for source in config.kv_source_layer_ids:
        count = length // config.compress_ratios[source]
        found[f"cache.compressed.{source}"] = state.read_entries(source, torch.tensor([0]), torch.arange(count)[None])[
            0
        ]
        found[f"cache.index_k.{source}"] = state.read_index_keys(source, 0, count)
    return {name: value.contiguous().clone() for name, value in found.items()}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration directory of other sizes, recorded from the reference itself."""
    directory = tmp_path_factory.mktemp("golden") / "other"
    raw = small_config(**OTHER)
    words = {f"t{number}": number for number in range(raw["text_config"]["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    random_checkpoint(raw, directory, seed=5, files={"tokenizer.json": tokenizer.to_str().encode()})
    dense = small_config(**OTHER)
    dense["text_config"] |= {"index_topk": 64, "num_experts_per_tok": 6, "dspark_num_experts_per_tok": 8}
    (directory / "config_every.json").write_text(json.dumps(dense))
    vectors = directory / "vectors"
    vectors.mkdir()
    draws = torch.Generator().manual_seed(0)
    checkpoint = Checkpoint.open(directory)
    ids = token_map(directory, checkpoint.config)
    listed = []
    for prefix, file in (("", "config.json"), ("every_", "config_every.json")):
        config = ModelConfig.from_file(directory / file)
        noquant: dict[str, Tensor] = {}
        for name, (length, steps) in PROMPTS.items():
            tokens = torch.randint(4, config.vocab_size, (length + steps + 1,), generator=draws).tolist()
            found = {
                "prompt": torch.tensor(tokens[:length]).int(),
                "decode_tokens": torch.tensor(tokens[length:]).int(),
            }
            for mode, num in (
                ("", Numerics()),
                ("f32.", Numerics(torch.float32)),
                ("nq", Numerics(torch.float32, False)),
            ):
                model = Model(config, checkpoint, ids, num)
                tables: dict[str, Any] = record(config, model, Draft(model, checkpoint), tokens, length)
                run = tables.pop("run")
                if mode == "nq":
                    noquant |= {
                        f"{name}.{key}": tables[key] for key in ("prefill_logits", "decode_logits", "index_sel")
                    }
                else:
                    found |= {mode + key: value for key, value in tables.items()}
                if name == "q1" and not prefix and not mode:
                    save_file(record_layers(config, model, run, tokens[:length]), vectors / "layers.safetensors")
            save_file(found, vectors / f"{prefix}{name}.safetensors")
            listed.append({"file": f"vectors/{prefix}{name}.safetensors"})
        if not prefix:
            save_file(noquant, vectors / "noquant.safetensors")
    (vectors / "index.json").write_text(json.dumps({"hc_layer": HC_LAYER, "prompts": listed}))
    return directory


def test_other_sizes_pass(other: Path) -> None:
    report = verify(other)
    assert report.passed, report.failures
    rows = {(row.file, row.quantity, row.mode) for row in report.rows}
    for quantity in ("router_idx", "index_sel", "router_w", "engram_hash", "hc_attn_comb", "snap.stream", "draft_ids"):
        assert ("q1", quantity, "bf16") in rows
        assert ("every_q0", quantity, "bf16") in rows
    assert ("noquant", "q1.prefill_logits + decode_logits", "noquant") in rows
    assert ("noquant", "q0.logits verified in blocks", "noquant") in rows
    assert ("layers", "layer.2.stream_engram", "") in rows
    assert {("layers", f"layer.{layer}.attn_out", "") for layer in range(5)} <= rows
    skipped = {(note.file, note.quantity): note.reason for note in report.notes}
    assert skipped["q0", "candidate_blocks"] == "not in this file"
    # Where nothing can be chosen the close tolerances apply.
    limits = {row.file: row.limits for row in report.rows if row.quantity == "router_idx" and row.mode == "bf16"}
    assert limits["every_q1"] == {"differing": 0} != limits["q1"]


@pytest.fixture
def copy(other: Path, tmp_path: Path) -> Path:
    return shutil.copytree(other, tmp_path / "copy")


def change(path: Path, tensor: str, index: tuple[int, ...], value: float) -> None:
    tensors = load_file(path)
    tensors[tensor][index] = value
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "tensor", "index", "value", "quantity"),
    [
        ("q1", "decode_logits", (2, 7), 99.0, "prefill_logits + decode_logits"),
        ("q1", "f32.prefill_logits", (30, 7), 99.0, "prefill_logits + decode_logits"),
        ("q1", "engram_hash", (5, 0, 1), 0, "engram_hash"),
        ("q0", "f32.router_idx", (1, 2, 0), 17, "router_idx"),
        ("q0", "snap.ffn_out", (1, 2, 3), 1e3, "snap.ffn_out"),
        ("q0", "confidence", (1, 2), 50.0, "confidence"),
        ("noquant", "q0.index_sel", (1, 2, 0), 5, "q0.index_sel"),
        ("noquant", "q1.decode_logits", (3, 100), 0.01, "q1.prefill_logits + decode_logits"),
        ("layers", "layer.3.ffn_out", (7, 3), 1e3, "layer.3.ffn_out"),
        ("layers", "cache.index_k.2", (7, 3), 1e3, "cache.index_k.2"),
    ],
)
def test_one_changed_vector_fails(
    copy: Path, file: str, tensor: str, index: tuple[int, ...], value: float, quantity: str
) -> None:
    change(copy / "vectors" / f"{file}.safetensors", tensor, index, value)
    report = verify(copy)
    assert not report.passed
    assert (file, quantity) in {(row.file, row.quantity) for row in report.failures}


def test_nan_fails(copy: Path) -> None:
    change(copy / "vectors" / "q0.safetensors", "decode_logits", (0, 0), float("nan"))
    assert ("q0", "bf16") in {(row.file, row.mode) for row in verify(copy).failures}


def test_one_changed_weight_scale_fails(copy: Path) -> None:
    name = "layers.1.attn.wkv.scale"
    shard = copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name].view(torch.uint8)[1, 2] += 1
    save_file(tensors, shard)
    failures = {(row.file, row.quantity, row.mode) for row in verify(copy).failures}
    assert ("noquant", "q1.prefill_logits + decode_logits", "noquant") in failures
    assert ("layers", "layer.1.attn_out", "") in failures


def test_missing_and_broken_files_are_errors(copy: Path) -> None:
    vectors = copy / "vectors"
    (vectors / "q0.safetensors").unlink()
    (vectors / "noquant.safetensors").write_bytes((vectors / "noquant.safetensors").read_bytes()[:1000])
    with pytest.raises(GoldenError) as error:
        verify(copy)
    assert "q0.safetensors: no such file" in str(error.value)
    assert "noquant.safetensors: not a readable" in str(error.value)


def test_a_broken_checkpoint_is_an_error(copy: Path) -> None:
    shard = sorted(copy.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(CheckpointError):
        verify(copy)
    shard.unlink()
    with pytest.raises(CheckpointError):
        verify(copy)
    (copy / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        verify(copy)


def test_optional_files_may_be_absent(copy: Path) -> None:
    for name in ("layers", "noquant"):
        (copy / "vectors" / f"{name}.safetensors").unlink()
    save_file({"x": torch.zeros(2)}, copy / "vectors" / "novel.safetensors")
    report = verify(copy)
    assert report.passed
    notes = {(note.file, note.reason) for note in report.notes}
    assert ("vectors/layers", "no such file in this directory") in notes
    assert ("novel", "unknown file: neither prompt, layers nor noquant") in notes
    # The way a sequence is cut is still checked.
    assert ("q1", "logits verified in blocks") in {(row.file, row.quantity) for row in report.rows}


# -- report -----------------------------------------------------------------------------------------------------------


def test_printed_and_json_reports(other: Path) -> None:
    report = verify(other)
    output = StringIO()
    print_report(report, Console(file=output, width=160))
    assert "all within tolerance" in output.getvalue()
    assert "layer.N.attn_out" in output.getvalue()
    assert "Not compared:" in output.getvalue()
    parsed = json.loads(json.dumps(report.as_dict()))
    assert parsed["passed"] is True
    assert len(parsed["rows"]) == len(report.rows)
    assert {"file", "quantity", "mode", "measured", "limits", "reason", "passed"} <= parsed["rows"][0].keys()


def test_a_report_without_rows_has_not_passed() -> None:
    assert not Report("reference", "nowhere").passed
