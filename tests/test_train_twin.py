"""The training twin against the golden vectors, and its roundings against `flashstep.formats`."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from flashstep import formats
from flashstep.config import ModelConfig
from flashstep.stages.engram.token_map import compressed_token_map

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the scripts are not part of the package

from scripts.train_tiny import weights as storage  # noqa: E402
from scripts.train_tiny.twin import Twin  # noqa: E402

GOLDEN = ROOT.parent / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="golden vectors are not at ../shared/golden")


@pytest.fixture(scope="module")
def golden():
    folder = GOLDEN / "a"
    config = ModelConfig.from_file(folder)
    token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    twin = Twin(config, token_map, dtype=torch.float32, quantize=False)
    return twin, storage.load(folder, config), load_file(folder / "vectors" / "noquant.safetensors")


@needs_golden
@pytest.mark.parametrize("prompt", ["p1", "p3", "p5"])
def test_twin_computes_the_exact_function(golden, prompt):
    twin, weights, vectors = golden
    recorded = load_file(GOLDEN / "a" / "vectors" / f"{prompt}.safetensors")
    known = torch.cat((recorded["prompt"], recorded["decode_tokens"])).long()
    ids = torch.nn.functional.pad(known, (0, -len(known) % 16 + 16), value=5)[None]
    start = len(recorded["prompt"])
    with torch.no_grad():
        output = twin(weights, ids)
        wanted = torch.cat((vectors[f"{prompt}.prefill_logits"], vectors[f"{prompt}.decode_logits"]))
        torch.testing.assert_close(output.logits[: len(wanted)], wanted, atol=1e-3, rtol=0)

        drafts = vectors[f"{prompt}.draft_ids"].long()
        calls = len(vectors[f"{prompt}.draft_logits"])
        anchors = torch.arange(start, start + len(drafts))[None]
        assert ids[0, start + 1 : start + 1 + len(drafts)].equal(drafts[:, 0])
        hidden, logits, _ = twin.draft(weights, ids, output.taps, anchors)
        logits = (logits + twin.markov(weights, drafts[:, :5]))[0]
        torch.testing.assert_close(logits[:calls], vectors[f"{prompt}.draft_logits"], atol=1e-3, rtol=0)
        assert logits.argmax(-1).equal(drafts[:, 1:])
        confidence = twin.confidence(weights, hidden, drafts[None, :, :5])[0]
        torch.testing.assert_close(confidence, vectors[f"{prompt}.confidence"], atol=1e-4, rtol=0)


@needs_golden
def test_dense_attention_gives_other_logits(golden):
    twin, weights, _ = golden
    ids = torch.arange(64)[None] + 20
    with torch.no_grad():
        assert not torch.allclose(twin(weights, ids).logits, twin(weights, ids, dense=True).logits, atol=1e-2)


@pytest.mark.parametrize("kind", ["fp4", "fp8", "fp8_rows"])
def test_fake_rounding_is_what_gets_stored(kind):
    torch.manual_seed(0)
    weight = torch.randn(3, 96, 64) * torch.exp2(torch.randint(-8, 4, (3, 96, 1)))
    weight[0, 0] = 0
    weight[0, 1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8)  # every tie
    if kind == "fp4":
        stored = [formats.decode_fp4_weight(*formats.encode_fp4_weight(matrix)) for matrix in weight]
    elif kind == "fp8":
        stored = [formats.decode_fp8_weight(*formats.encode_fp8_weight(matrix)) for matrix in weight]
    else:
        stored = [formats.fp8_round_trip(matrix) for matrix in weight]
    rounded = storage.as_stored(weight, kind)
    assert rounded.equal(torch.stack(stored))
    assert storage.as_stored(rounded, kind).equal(rounded)  # what is loaded again stays as it is


def test_checkpoint_survives_the_disk(tmp_path):
    config = ModelConfig.from_dict(storage.tiny_config(vocab_size=300, compressed_vocab_size=250))
    weights = storage.initial_weights(config, seed=1)
    storage.save(weights, config, tmp_path)
    loaded = storage.load(tmp_path, config)
    for name, spec in storage.tensor_specs(config).items():
        assert loaded[name].equal(storage.as_stored(weights[name], spec.kind)), name


def test_gradients_reach_every_weight():
    config = ModelConfig.from_dict(storage.tiny_config(vocab_size=300, compressed_vocab_size=250))
    twin = Twin(config, torch.arange(300) % 250)
    weights = storage.initial_weights(config, seed=1)
    rounded = {
        name: storage.as_stored(weights[name], spec.kind).requires_grad_(not name.endswith("gate.bias"))
        for name, spec in storage.tensor_specs(config).items()
    }
    ids = torch.randint(11, 300, (2, 256))
    output = twin(rounded, ids)
    anchors = torch.tensor([[70, 100], [3, 200]])
    hidden, logits, _ = twin.draft(rounded, ids, output.taps, anchors)
    previous = ids[:, :2, None].expand(-1, -1, 5)
    loss = (logits + twin.markov(rounded, previous)).logsumexp(-1).mean() + output.logits.logsumexp(-1).mean()
    loss = loss + twin.confidence(rounded, hidden, previous).mean() + output.index_loss
    loss.backward()
    silent = [name for name, weight in rounded.items() if weight.requires_grad and weight.grad is None]
    assert not silent
    assert all(weight.grad.isfinite().all() for weight in rounded.values() if weight.grad is not None)
