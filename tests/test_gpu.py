"""The reference on a GPU: the same text and the same state as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_step import EXACT, decode, live_state, make_step, prompt_logits, start

from flashstep.formats import Numerics
from flashstep.loading import load
from flashstep.params import SamplingParams

PROMPTS = Path(__file__).parents[1] / "scripts" / "prompts_heldout.json"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95)])
def test_the_bundled_model_writes_the_same_text(params):
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text())["prompts"]][:16]
    written, states = [], []
    for device in ("cpu", "cuda"):
        loaded = load(device=device)
        step = make_step(loaded.model, loaded.draft, requests=len(texts), rows=256, device=device)
        prompts = [[loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)] for text in texts]
        requests = [start(step, prompt, params, seed) for seed, prompt in enumerate(prompts)]
        written.append(decode(step, requests, 64))
        states.append(live_state(step.state, requests[0].slot, len(prompts[0])))
    assert written[0] == written[1]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name].cpu()), name


def test_logits_agree_without_quantizers():
    assert isinstance(EXACT, Numerics)
    prompt = list(range(11, 300))
    on_cpu, on_gpu = (
        prompt_logits(load(num=EXACT, device=device).model, prompt, [128, 128, 33]) for device in ("cpu", "cuda")
    )
    assert (on_cpu - on_gpu.cpu()).abs().max() < 1e-4
