"""Six layers of random weights: the kernels, packed from a checkpoint, against the reference that reads it as well."""

from __future__ import annotations

import json

import pytest
import torch

from flashstep import packed_weights as packed
from flashstep.checkpoint import Checkpoint
from flashstep.draft import Draft
from flashstep.loading import BUNDLED_MODEL, CheckpointReader
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.specialized.model import SpecializedDraft, SpecializedModel
from flashstep.state import Rows, State
from flashstep.tiny import random_checkpoint, small_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 12  # as in test_specialized.py: few, because every bucket is compiled
SIZES = ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank", "sliding_window", "index_topk")
# Random layers amplify roundings: a flipped choice of an expert or an entry moves a row. 0.06 to 0.21 were seen;
# values that share nothing have 1.4.
NEAR = 0.3


def raw_config() -> dict:
    """The roles of `small_config`, the sizes of the bundled model."""
    bundled = json.loads((BUNDLED_MODEL / "config.json").read_text())["text_config"]
    return small_config(**{size: bundled[size] for size in (*SIZES, "dspark_markov_rank")})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("random") / "model"
    return Checkpoint.open(random_checkpoint(raw_config(), directory, seed=5))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference, relative to that of `want`."""
    return float((got.float().cpu() - want.float()).norm() / want.float().norm())


def test_values_agree_with_the_reference(checkpoint):
    config, token_map = checkpoint.config, torch.arange(checkpoint.config.vocab_size)
    assert config.num_hidden_layers == 6
    reader = CheckpointReader(checkpoint, "cpu")
    reference = Model(config, reader, token_map)
    specialized = SpecializedModel(
        packed.read(config, packed.CheckpointSource(checkpoint, 0, 1, DEVICE)), token_map, max_rows=ROWS
    )
    sizes = {"num_pages": 4, "page_tokens": 64, "rows_per_request": ROWS, "max_model_len": 256}
    states = PackedState(config, **sizes, device=DEVICE), State(config, **sizes)
    drafts = SpecializedDraft(specialized), Draft(reference, reader)
    devices = DEVICE, torch.device("cpu")
    tokens = torch.randint(config.vocab_size, (120,), generator=torch.Generator().manual_seed(6)).tolist()
    for state in states:
        state.acquire()
        state.reserve(0, 256)
    done = 0
    for count in [12] * 9 + [1, 6, 5]:  # past a window, past the index's top-k, across a page
        part = [(0, done, tokens[done : done + count])]
        rows = [Rows.of(part, device) for device in devices]
        outputs = specialized.forward(states[0], rows[0]), reference.forward(states[1], rows[1])
        logits = specialized.logits(outputs[0].hidden), reference.logits(outputs[1].hidden)
        for name in ("hidden", "taps"):
            assert distance(getattr(outputs[0], name), getattr(outputs[1], name)) < NEAR, (name, done)
        assert distance(*logits) < NEAR, done
        for draft, state, row, output in zip(drafts, states, rows, outputs, strict=True):
            draft.observe(state, row, output.taps)
        done += count
    every = slice(None)
    for name in ("window", "draft_window"):
        assert distance(*(getattr(state, name)[:, 0, torch.arange(done) % state.ring] for state in states)) < NEAR
    for source in config.kv_source_layer_ids:
        for name in ("kv", "index_keys"):
            assert distance(*(getattr(state, name)[source][every] for state in states)) < NEAR, (name, source)
    proposals = [
        draft.propose(
            state,
            torch.tensor([0], device=device),
            torch.tensor([done - 2], device=device),
            torch.tensor(tokens[-1:], device=device),
            lambda place, logits: torch.tensor([place + 7], device=logits.device),
            config.dspark_block_size,
        )
        for draft, state, device in zip(drafts, states, devices, strict=True)
    ]
    assert distance(proposals[0].logits, proposals[1].logits) < NEAR
    assert (proposals[0].confidence.cpu() - proposals[1].confidence).abs().max() < 0.5
