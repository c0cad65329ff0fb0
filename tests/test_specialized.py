"""The specialized step on the bundled model: kernels on a GPU where there is one, else the same kernels emulated.

Against the reference a chain of bf16 roundings is compared, in which the last bit of one float32 sum can decide the
next rounding: texts may part where two tokens are nearly level, values agree to a few percent. The kernels themselves
are held to far tighter bounds beside their sources.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashstep.engine import Engine
from flashstep.loading import LoadedModel, load
from flashstep.packed_state import PackedState
from flashstep.params import SamplingParams
from flashstep.requests import GenerationRequest
from flashstep.settings import EngineConfig
from flashstep.specialized.loading import load_specialized
from flashstep.specialized.step import SpecializedStep
from flashstep.stages.engram import tables
from flashstep.state import Rows, State

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 12  # two requests of six rows; few, because every bucket is compiled
NEARLY_LEVEL = 1.0  # logits; the greedy texts of two roundings may part here
CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=ROWS, max_model_len=512)
TEXT = "class Stack:\n    def push(self, item):\n"


@pytest.fixture(scope="module")
def specialized() -> LoadedModel:
    return load_specialized(device=DEVICE, max_rows=ROWS)


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    return load()


@pytest.fixture
def engine(specialized) -> Engine:
    return Engine(specialized, CONFIG)


def run(engine: Engine, *asked: GenerationRequest, joins_after: int = 0) -> list[list[int]]:
    """Tokens of requests that run side by side; each but the first joins some steps after the one before."""
    outputs: list[list[int]] = [[] for _ in asked]
    waiting = list(enumerate(asked))
    steps = 0
    while waiting or engine.busy:
        if waiting and steps >= joins_after * (len(asked) - len(waiting)):
            place, request = waiting.pop(0)

            def take(delta, place=place):
                assert delta.error is None
                outputs[place] += delta.tokens

            engine.submit(request, take)
        engine.step()
        steps += 1
    return outputs


def ask(loaded: LoadedModel, text: str = TEXT, *, tokens: int = 24, **params) -> GenerationRequest:
    return GenerationRequest(
        prompt=tuple(loaded.tokenizer.encode(text)),
        params=SamplingParams(**{"temperature": 0, **params}),
        max_tokens=tokens,
        ignore_eos=True,
    )


def assert_same_up_to_near_ties(loaded: LoadedModel, prompt: tuple[int, ...], got: list[int], want: list[int]) -> None:
    parted = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
    if parted is None:
        return
    state = State(loaded.config, num_pages=8, page_tokens=64, rows_per_request=512, max_model_len=512)
    slot = state.acquire()
    tokens = [*prompt, *want[:parted]]
    state.reserve(slot, len(tokens))
    logits = loaded.model.logits(loaded.model.forward(state, Rows.of([(slot, 0, tokens)])).hidden[-1:])[0]
    margin = float(logits[want[parted]] - logits[got[parted]])
    assert margin < NEARLY_LEVEL, f"texts part at token {parted}: {got[parted]} for {want[parted]}, margin {margin:.2f}"


def test_values_agree_with_the_reference(specialized, reference):
    states = (
        PackedState(specialized.config, num_pages=8, page_tokens=64, rows_per_request=ROWS, device=DEVICE),
        State(reference.config, num_pages=8, page_tokens=64, rows_per_request=ROWS),
    )
    tokens = reference.tokenizer.encode(TEXT * 3)
    for state in states:
        state.acquire()
        state.reserve(0, 256)
    done = 0
    for count in (5, 1, 6, 12, 2):
        part = [(0, done, tokens[done : done + count])]
        got = specialized.model.forward(states[0], Rows.of(part, DEVICE))
        want = reference.model.forward(states[1], Rows.of(part))
        for name in ("hidden", "taps"):
            one, other = getattr(got, name).float().cpu(), getattr(want, name).float()
            assert (one - other).norm() / other.norm() < 0.15, name
        assert torch.isfinite(got.hidden.float()).all()
        specialized.draft.observe(states[0], Rows.of(part, DEVICE), got.taps)
        reference.draft.observe(states[1], Rows.of(part), want.taps)
        done += count
    for one, other in ((states[0].window, states[1].window), (states[0].draft_window, states[1].draft_window)):
        got, want = (store[:, 0, torch.arange(done)].float().cpu() for store in (one, other))
        assert (got - want).norm() / want.norm() < 0.15


def test_greedy_text_is_the_references(engine, specialized, reference):
    asked = ask(specialized, tokens=48)
    assert isinstance(engine.core, SpecializedStep)
    got = run(engine, asked)[0]
    want = run(Engine(reference, replace(CONFIG, max_num_batched_tokens=64)), asked)[0]
    assert len(got) == 48
    assert_same_up_to_near_ties(reference, asked.prompt, got, want)
    assert engine.stats().steps < 40  # drafts were accepted


def test_f16_products_give_the_same_text_up_to_near_ties(reference):
    loaded = load_specialized(device=DEVICE, max_rows=ROWS, wgmma=False)
    asked = ask(loaded)
    got = run(Engine(loaded, CONFIG), asked)[0]
    want = run(Engine(reference, replace(CONFIG, max_num_batched_tokens=64)), asked)[0]
    assert_same_up_to_near_ties(reference, asked.prompt, got, want)


def test_a_seed_gives_the_same_text_again_and_in_company(engine, specialized):
    asked = ask(specialized, temperature=0.9, top_p=0.95, seed=11)
    other = ask(specialized, "def main():\n", temperature=1.0, seed=3)
    alone = run(engine, asked)[0]
    assert run(engine, asked)[0] == alone
    together = run(engine, asked, other, joins_after=3)
    assert run(engine, asked, other, joins_after=3) == together
    if DEVICE.type == "cpu":  # on a GPU float32 sums of another bucket may round apart where two tokens are level
        assert together[0] == alone
        assert run(engine, other, asked, joins_after=2)[1] == alone
    assert run(engine, ask(specialized, temperature=0.9, top_p=0.95, seed=12))[0] != alone


def test_requests_that_need_the_host_run_beside_steady_ones(engine, specialized, reference):
    steady = ask(specialized, "def main():\n")
    alone = run(engine, steady)[0]
    penalized = ask(specialized, repetition_penalty=1.3)
    got = run(engine, steady, penalized, joins_after=2)
    assert got[0] == alone
    assert got[1] == run(engine, penalized)[0]
    want = run(Engine(reference, replace(CONFIG, max_num_batched_tokens=64)), penalized)[0]
    assert len(got[1]) == len(want) == 24  # a penalty moves many tokens level: the texts themselves may part early


def test_limits_and_stops_cut_inside_a_step(engine, specialized):
    whole = run(engine, ask(specialized, tokens=12))[0]
    for limit in range(1, 9):
        assert run(engine, ask(specialized, tokens=limit))[0] == whole[:limit]
    stop = whole[7]
    asked = replace(ask(specialized, tokens=12), stop_token_ids=(stop,))
    assert run(engine, asked)[0] == whole[: whole.index(stop) + 1]


def test_the_prefix_cache_continues_exactly(specialized):
    text = TEXT * 8  # more than one page
    engine = Engine(specialized, CONFIG)
    first = run(engine, ask(specialized, text))[0]
    again = run(engine, ask(specialized, text))[0]
    assert engine.stats().cache_hits == 1
    assert again == first


def test_scarce_pages_and_the_end_of_the_context(specialized):
    state = PackedState.page_bytes(specialized.config, 64, keep_windows=False, dtype=torch.bfloat16)
    slots = PackedState.slot_bytes(specialized.config, 64, ROWS, dtype=torch.bfloat16)
    config = replace(CONFIG, enable_prefix_caching=False, max_model_len=128, kv_cache_memory=2 * slots + 3 * state)
    engine = Engine(specialized, config)
    asked = [ask(specialized, text, tokens=72) for text in (TEXT * 3, "def main():\n" * 10)]
    assert all(len(one.prompt) < 64 < len(one.prompt) + 72 for one in asked)  # each needs its second page
    together = run(engine, *asked)
    assert engine.stats().preemptions > 0
    roomy = Engine(specialized, replace(config, kv_cache_memory=CONFIG.kv_cache_memory))
    assert together == [run(roomy, one)[0] for one in asked]
    full = ask(specialized, TEXT * 6, tokens=1)
    full = replace(full, max_tokens=128 - len(full.prompt))
    assert len(run(roomy, full)[0]) == 128 - len(full.prompt)
    stats = engine.stats()
    assert stats.free_slots == 2
    assert stats.free_pages == stats.total_pages


@pytest.mark.parametrize("engram", ["pinned", "mapped"])
def test_the_text_does_not_depend_on_where_engram_tables_lie(engine, specialized, engram):
    if engram == "mapped" and DEVICE.type == "cuda" and not tables.reads_mapped_files(DEVICE):
        pytest.skip("this GPU does not read mapped files")
    asked = ask(specialized, tokens=12)
    moved = Engine(load_specialized(device=DEVICE, max_rows=ROWS, engram=engram), CONFIG)
    assert run(moved, asked) == run(engine, asked)
