"""The packed state gives the reference the same forward, bit for bit, as the state that keeps values decoded."""

from __future__ import annotations

import pytest
import torch

from flashstep.draft import Draft
from flashstep.executor import Request, Step
from flashstep.loading import load
from flashstep.packed_state import PackedState, PackedValues
from flashstep.params import SamplingParams
from flashstep.state import State


@pytest.mark.parametrize("kind", ["window", "kv", "index key"])
def test_values_that_a_cache_holds_survive_packing(kind):
    values = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    store = PackedValues.zeros(kind, 5, 7, columns=64, device=torch.device("cpu"))
    store[torch.arange(5)] = values
    once = store[torch.arange(5)]
    assert (once - values).abs().max() > 0  # the format rounds
    store[torch.arange(5)] = once
    assert torch.equal(store[torch.arange(5)], once)


def test_the_step_writes_the_same_text_on_either_state():
    loaded = load()
    texts = []
    for kind in (State, PackedState):
        state = kind(loaded.config, num_slots=2, num_pages=16, page_tokens=64, rows_per_request=64, keep_windows=True)
        assert isinstance(loaded.draft, Draft)
        step = Step(loaded.model, loaded.draft, state, num_speculative_tokens=5)
        request = Request(state.acquire(), list(range(3, 150)), SamplingParams(), 1, loaded.config.vocab_size)
        while len(request.tokens) < 200:
            step([request], [60])
        state.save_windows(request.slot, 2)
        other = state.acquire()
        before = state.window[:, request.slot, torch.arange(128, 192) % state.ring]
        state.attach(other, state.pages(request.slot)[:3], state.history[request.slot, 189:192])
        assert torch.equal(state.window[:, other, torch.arange(128, 192) % state.ring], before)
        texts.append(request.tokens)
    assert texts[0] == texts[1]
