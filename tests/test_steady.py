"""Steady decoding: the host waits for nothing but records, nothing is allocated, and a thousand steps do not drift."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_specialized import CONFIG, DEVICE, NEARLY_LEVEL, TEXT, ask
from test_step import live_state
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function

from flashstep.engine import Engine
from flashstep.executor import Request
from flashstep.loading import LoadedModel, load
from flashstep.packed_state import PackedState
from flashstep.params import SamplingParams
from flashstep.specialized.loading import load_specialized
from flashstep.specialized.step import SpecializedStep
from flashstep.state import Rows, State

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")]
ROWS = 12  # two requests of six rows; few, because every bucket is compiled


@pytest.fixture(scope="module")
def specialized() -> LoadedModel:
    return load_specialized(device=DEVICE, max_rows=ROWS)


@pytest.fixture
def steady(specialized) -> Engine:
    """An engine with one request that decodes steadily, its graph captured."""
    engine = Engine(specialized, replace(CONFIG, max_model_len=2048))
    engine.submit(ask(specialized, tokens=2000, temperature=0.8, top_p=0.95, seed=1), lambda delta: None)
    for _ in range(8):
        engine.step()
    assert isinstance(engine.core, SpecializedStep)
    assert engine.core._in_flight
    return engine


def test_batches_without_filters_run_no_search(steady):
    decoder = steady.core._decoder
    chains = decoder.current.chain, decoder.bucket(1, levels=0).chain
    searching, plain = ([launch.name for launch in chain.launches] for chain in chains)
    assert [name for name in searching if name not in ("narrow", "cut")] == plain
    assert len(searching) > len(plain)


# ---- nobody waits ---------------------------------------------------------------------------------------------------

READS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)


class NoReads(TorchFunctionMode):
    """Fails where the host asks for the values of a tensor, other than of the ring that the device reports to."""

    def __init__(self, ring: Tensor) -> None:
        super().__init__()
        self.ring, self.looks = ring, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            assert args[0] is self.ring, f"the host waits for a tensor: {function.__name__}"
            self.looks += 1
        return function(*args, **(kwargs or {}))


def test_no_tensor_of_the_device_is_read_in_steady_steps(steady):
    with NoReads(torch.zeros(1)), pytest.raises(AssertionError, match="waits for a tensor: item"):
        torch.ones(1).item()
    with NoReads(steady.core._decoder._ring.buffer) as watched:
        for _ in range(4):
            steady.step()
    assert watched.looks >= 4


class TestOnAGPU:
    pytestmark = needs_gpu

    def test_nothing_waits_for_the_device(self, steady):
        before = steady.stats().completion_tokens
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                torch.ones(1, device=DEVICE).item()
            for _ in range(80):
                steady.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert steady.stats().completion_tokens > before + 64, "a page has to be added on the way"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            with record_function("steady"):
                for _ in range(40):
                    steady.step()
            torch.cuda.synchronize()
        events = profiler.events() or []
        host = [event for event in events if event.device_type == DeviceType.CPU]
        (span,) = {(event.time_range.start, event.time_range.end) for event in host if event.name == "steady"}
        inside = [event.name for event in host if span[0] <= event.time_range.start < span[1]]
        assert any(name.startswith("cudaGraphLaunch") for name in inside), "the profiler saw nothing"
        assert [name for name in inside if "Synchronize" in name or name == "cudaMemcpy"] == []

    def test_nothing_is_allocated_after_the_warm_up(self, steady):
        """A page that is full takes its windows along, through tensors that live for a moment; all other steps none."""
        counts, segments = [], torch.cuda.memory_stats(DEVICE)["segment.all.allocated"]
        for _ in range(200):
            counts.append(torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"])
            steady.step()
        changes = sum(after != before for before, after in itertools.pairwise(counts))
        full_pages = 200 * 6 / steady.core.state.page_tokens  # at most: six tokens a step
        assert changes <= full_pages + 1
        assert torch.cuda.memory_stats(DEVICE)["segment.all.allocated"] == segments
        before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
        torch.ones(1, device=DEVICE)
        assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before + 1, "it counts"


# ---- no drift -------------------------------------------------------------------------------------------------------


def distance(got: Tensor, want: Tensor) -> float:
    """The norm of the difference, relative to that of `want`."""
    return float((got.float().cpu() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize(
    "steps",
    [pytest.param(1000, marks=needs_gpu), pytest.param(40, marks=[] if DEVICE.type == "cuda" else pytest.mark.slow)],
)
def test_many_steps_do_not_drift(specialized, steps):
    """Two requests, greedy and sampled, against the reference that reads the same text in large chunks."""
    length = 64 * (-(-6 * steps // 64) + 2)
    state = PackedState(
        specialized.config,
        num_slots=2,
        page_tokens=64,
        rows_per_request=2 * ROWS,  # two steps in flight displace nothing that the last one collected still sees
        max_model_len=length,
        device=DEVICE,
    )
    step = specialized.step(state, num_speculative_tokens=5)
    prompt, vocab = specialized.tokenizer.encode(TEXT), specialized.config.vocab_size
    requests = [
        Request(state.acquire(), list(prompt), SamplingParams(temperature=temperature), seed, vocab)
        for seed, temperature in enumerate((0, 1.0))
    ]
    for request in requests:
        step([request], [ROWS])
    for _ in range(steps):
        step(requests)
    for request in requests:
        assert len(request.tokens) > len(prompt) + steps

    reference = load()
    for request in requests:
        done, texts = request.computed, request.tokens
        whole = State(reference.config, page_tokens=64, rows_per_request=256, max_model_len=length)
        slot = whole.acquire()
        whole.reserve(slot, done)
        margins = []
        for first in range(0, done, 256):
            rows = Rows.of([(slot, first, texts[first : min(first + 256, done)])])
            output = reference.model.forward(whole, rows)
            reference.draft.observe(whole, rows, output.taps)
            logits = reference.model.logits(output.hidden)
            said = torch.tensor(texts[first + 1 : first + 1 + len(logits)])
            margins.append(logits.amax(-1) - logits.gather(-1, said[:, None])[:, 0])
        if request.params.temperature == 0:
            worst = torch.cat(margins)[len(prompt) :]
            assert worst.max() < NEARLY_LEVEL, f"token {int(worst.argmax())} of {len(worst)}: margin {worst.max():.2f}"
        got, want = live_state(state, request.slot, done), live_state(whole, slot, done)
        assert torch.equal(got.pop("history").cpu(), want.pop("history"))
        for name, value in want.items():
            if not value.numel():
                continue
            over_all = distance(got[name], value)
            assert over_all < 0.2, name
            if name.startswith(("kv", "index")):  # all of the context; the others hold its end alone
                last = slice(-max(1, value.shape[-2] // 10), None)
                late = distance(got[name].flatten(0, -2)[last], value.flatten(0, -2)[last])
                assert late < 2 * over_all + 0.05, (name, over_all, late)
