"""The bundled model: drafts change nothing but speed on real text, and are worth having; what it is and what it weighs.

Nothing here knows the model's text: it may be trained anew at any time.
"""

from __future__ import annotations

import ast
import json
import math
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch

from flashstep.chat import TokenizerError
from flashstep.chat.tokens import BEGIN, END
from flashstep.checkpoint import CheckpointError
from flashstep.config import ModelConfig
from flashstep.executor import Request, Step
from flashstep.loading import BUNDLED_MODEL, LoadedModel, load
from flashstep.params import SamplingParams
from flashstep.state import Rows, State

HELD_OUT = Path(__file__).parents[1] / "scripts" / "prompts_heldout.json"
NUM_PROMPTS, NUM_TOKENS = 200, 64
BATCH = 50
PAGE_TOKENS = 128
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load()


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    """Held-out prompts as token ids."""
    texts = [prompt["text"] for prompt in json.loads(HELD_OUT.read_text(encoding="utf-8"))["prompts"]]
    return [[loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)] for text in texts]


class Writer:
    """Writes greedily behind a batch of prompts, and keeps what became of every drafted block."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[list[int]], *, drafts: int) -> None:
        longest = max(map(len, prompts))
        state = State(
            loaded.config,
            num_slots=len(prompts),
            num_pages=len(prompts) * -(-(longest + NUM_TOKENS + 8) // PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            rows_per_request=longest + drafts,
            dtype=loaded.model.num.dtype,
        )
        self.step = Step(loaded.model, loaded.draft, state, num_speculative_tokens=drafts)
        self.requests = [Request(state.acquire(), list(p), GREEDY, 0, loaded.config.vocab_size) for p in prompts]
        self.blocks: list[tuple[int, int]] = []  # (drafted, accepted) of each decoding step of each request

    def write(self, count: int) -> list[list[int]]:
        """`count` tokens behind each prompt."""
        for request in self.requests:  # one by one: a forward over many prompts costs more than its parts
            self.step([request])
        active = self.requests
        while active:
            results = self.step(active)
            self.blocks += [(result.drafted, result.accepted) for result in results]
            active = [r for r in active if len(r.tokens) - r.prompt_length < count]
        return [r.tokens[r.prompt_length :][:count] for r in self.requests]


def first_difference(loaded: LoadedModel, found: list[list[int]], wanted: list[list[int]]) -> str | None:
    """Where two lots of texts differ first, for a message; None where they are equal."""
    for prompt, (a, b) in enumerate(zip(found, wanted, strict=True)):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                before = loaded.tokenizer.decode(b[:place])
                return f"prompt {prompt}, token {place}: found {x}, wanted {y}, behind {before!r}"
    return None


@pytest.fixture(scope="module")
def sample(loaded, prompts) -> Sample:
    return Sample(loaded, prompts[:40])


class Sample:
    """40 held-out prompts written on with drafts, and the confidence in each draft beside its fate."""

    def __init__(self, loaded: LoadedModel, prompts: list[list[int]]) -> None:
        writer = Writer(loaded, prompts, drafts=loaded.config.dspark_block_size)
        confidence: dict[int, list[float]] = {}  # by slot, in the last block
        propose, step = loaded.draft.propose, writer.step
        self.reached: list[tuple[float, bool]] = []  # probability given to a draft that was reached, and if it stood

        def proposing(state, slots, *args, **kwargs):
            proposal = propose(state, slots, *args, **kwargs)
            confidence.update(zip(slots.tolist(), proposal.confidence.sigmoid().tolist(), strict=True))
            return proposal

        def stepping(requests):
            given = {slot: list(values) for slot, values in confidence.items()}
            results = step(requests)
            for request, result in zip(requests, results, strict=True):
                for place in range(min(result.accepted + 1, result.drafted)):
                    self.reached.append((given[request.slot][place], place < result.accepted))
            return results

        loaded.draft.propose, writer.step = proposing, stepping
        try:
            self.tokens = writer.write(NUM_TOKENS)
        finally:
            del loaded.draft.propose


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_greedy_text_is_the_same_with_and_without_drafts_and_takes_fewer_steps(loaded, prompts):
    prompts = prompts[:NUM_PROMPTS]
    assert len({tuple(p) for p in prompts}) == NUM_PROMPTS
    plain: list[list[int]] = []
    drafted: list[list[int]] = []
    blocks: list[tuple[int, int]] = []
    for first in range(0, NUM_PROMPTS, BATCH):
        batch = prompts[first : first + BATCH]
        plain += Writer(loaded, batch, drafts=0).write(NUM_TOKENS)
        writer = Writer(loaded, batch, drafts=loaded.config.dspark_block_size)
        drafted += writer.write(NUM_TOKENS)
        blocks += writer.blocks
    assert first_difference(loaded, drafted, plain) is None
    assert len({tuple(text) for text in plain}) > NUM_PROMPTS * 0.9, "the texts are too much alike to tell apart"
    full = [accepted for drafts, accepted in blocks if drafts == loaded.config.dspark_block_size]
    assert len(full) == len(blocks) > 1000
    assert sum(full) / len(full) + 1 >= 2.5  # tokens of a step: the accepted drafts, and one that the verifier draws


def test_a_request_alone_writes_what_it_writes_in_a_batch(loaded, prompts, sample):
    count = 24
    alone = [
        Writer(loaded, [prompt], drafts=loaded.config.dspark_block_size).write(count)[0] for prompt in prompts[:40]
    ]
    assert first_difference(loaded, alone, [tokens[:count] for tokens in sample.tokens]) is None


def test_confidence_tells_which_drafts_will_stand(sample):
    given, stood = torch.tensor([[p, float(s)] for p, s in sample.reached], dtype=torch.float64).T
    assert len(given) > 1000
    assert 0.2 < stood.mean() < 0.95, "nearly all drafts shared one fate: nothing to tell apart"
    correlation = float(torch.corrcoef(torch.stack((given, stood)))[0, 1])
    assert correlation > 0.1
    # Neither bold nor timid as a whole, and those it trusts stand far more often than those it doubts.
    assert abs(float(given.mean() - stood.mean())) < 0.2
    order = given.argsort()
    third = len(order) // 3
    assert stood[order[-third:]].mean() > stood[order[:third]].mean() + 0.1


def test_comparison_sees_one_wrong_token(loaded):
    texts = [[5, 6, 7], [5, 6, 7]]
    assert first_difference(loaded, texts, texts) is None
    assert first_difference(loaded, [[5, 6, 7], [5, 9, 7]], texts).startswith("prompt 1, token 1: found 9, wanted 6")


# -- what it has learned ----------------------------------------------------------------------------------------------


def python_lines(texts: Iterable[str]) -> float:
    """The share of complete lines of code that Python can parse, a line that opens a block with an empty one."""
    lines = [line.strip() for text in texts for line in text.split("\n")[1:-1]]
    lines = [line for line in lines if sum(map(str.isalpha, line)) > 3 and not line.startswith("#")]
    return sum(map(parses, lines)) / len(lines) if lines else 0.0


def parses(line: str) -> bool:
    """Whether Python can parse `line` alone or as the head of a block."""
    word = line.partition(" ")[0].rstrip(":")
    before = {"else": "if x: pass\n", "elif": "if x: pass\n", "except": "try: pass\n", "finally": "try: pass\n"}
    behind = " pass" if line.endswith(":") else ""
    behind += "\nfinally: pass" if word == "try" else ""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        try:
            ast.parse(before.get(word, "") + line + behind)
        except (SyntaxError, ValueError):
            return False
    return True


def test_it_writes_python(loaded, sample):
    written = python_lines(map(loaded.tokenizer.decode, sample.tokens))
    draws = random.Random(0)
    ordinary = [token for token in range(loaded.tokenizer.vocab_size) if loaded.tokenizer.special_name(token) is None]
    noise = python_lines(loaded.tokenizer.decode(draws.choices(ordinary, k=NUM_TOKENS)) for _ in sample.tokens)
    assert written > 0.6
    assert noise < 0.3, "the measure takes anything for Python"


def test_it_expects_held_out_text(loaded, prompts):
    """Nats per token of prompts that training never saw, against guessing among the whole vocabulary."""
    losses = []
    for prompt in prompts[:20]:
        state = State(loaded.config, num_pages=-(-len(prompt) // PAGE_TOKENS), rows_per_request=len(prompt))
        state.reserve(slot := state.acquire(), len(prompt))
        with torch.inference_mode():
            logits = loaded.model.logits(loaded.model.forward(state, Rows.of([(slot, 0, prompt)])).hidden)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(prompt[1:]), reduction="none"))
    assert torch.cat(losses).mean() < 0.45 * math.log(loaded.config.vocab_size)


# -- what it is -------------------------------------------------------------------------------------------------------


def test_all_its_files_together_fit_a_wheel():
    assert sum(file.stat().st_size for file in BUNDLED_MODEL.rglob("*")) <= 12_000_000


def test_it_has_every_role_of_the_released_model():
    config = ModelConfig.from_file(BUNDLED_MODEL)
    assert set(config.compress_ratios) == {0, 1, 2}
    assert any(config.uses_candidates(layer) for layer in range(config.num_hidden_layers))
    roles = " ".join(config.role(layer) for layer in range(config.num_hidden_layers))
    for word in ("window only", "KV source", "index source", "candidate source", "Engram", "draft tap"):
        assert word in roles
    assert config.num_nextn_predict_layers == 3
    assert config.dspark_block_size == 5


def test_its_record_says_what_rounding_cost():
    record = json.loads((BUNDLED_MODEL / "training.json").read_text(encoding="utf-8"))
    losses = record["losses"]["held_out"]
    assert losses.keys() >= {"float", "quantized", "reloaded"}
    assert all(0 < loss < 0.45 * math.log(ModelConfig.from_file(BUNDLED_MODEL).vocab_size) for loss in losses.values())
    assert abs(losses["quantized"] - losses["float"]) < 0.2
    assert abs(losses["reloaded"] - losses["quantized"]) < 0.02  # what was written is what was measured


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


def test_another_tokenizer_is_refused(copy):
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BEGIN, END], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    other.train_from_iterator([json.dumps({"another": "text", "numbers": list(range(200))})], trainer)
    other.save(str(copy / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: its tokens fold into \d+ compressed ids, expected "):
        load(copy)


@pytest.mark.parametrize("content", [b"", b"\x93\xff binary", b"{}", b"[]", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_named(copy, content):
    (copy / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*(download|check the path)"):
        load(copy)


def test_a_missing_shard_is_named(copy):
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: missing, with \d+ tensors"):
        load(copy)


def test_scales_that_are_not_numbers_are_named_all_at_once(copy):
    names = ["layers.0.attn.wq_a.scale", "layers.1.ffn.experts.1.w1.scale", "mtp.2.attn.wkv.scale"]
    for name in names:
        shard = copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][name]
        content = bytearray(shard.read_bytes())
        header = int.from_bytes(content[:8], "little")
        start, _ = json.loads(content[8 : 8 + header])[name]["data_offsets"]
        content[8 + header + start] = 0xFF  # UE8M0 has no other NaN
        shard.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    for name in names:
        assert re.search(rf"{name}: (block )?row 0, block 0", str(caught.value)), name


@pytest.mark.parametrize("device", ["meta", "no such device", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device):
    with pytest.raises(ValueError, match=f"device {device}: .*flashstep doctor"):
        load(device=device)
