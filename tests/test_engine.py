"""The engine: many requests at once, each with the text that it would get alone; nothing is lost, nothing leaks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
import torch

from flashstep.engine import Engine
from flashstep.loading import LoadedModel, load
from flashstep.params import SamplingParams
from flashstep.requests import Delta, EngineDead, GenerationRequest, Grammar, QueueFull, RequestError
from flashstep.settings import EngineConfig
from flashstep.state import State

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load()


def engine_of(loaded: LoadedModel, **settings) -> Engine:
    defaults = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 128, "kv_cache_memory": 1 << 26}
    return Engine(loaded, EngineConfig(**(defaults | settings)))


def ask(loaded: LoadedModel, text: str, **fields) -> GenerationRequest:
    tokens = (loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text))
    return GenerationRequest(**({"prompt": tokens, "params": GREEDY, "max_tokens": 24} | fields))


def serve(engine: Engine, requests: Sequence[GenerationRequest], *, stagger: bool = False) -> list[list[Delta]]:
    """Run requests together until all have ended."""
    deltas: list[list[Delta]] = [[] for _ in requests]
    for request, mine in zip(requests, deltas, strict=True):
        engine.submit(request, mine.append)
        if stagger:
            engine.step()
    while engine.step():
        engine.state.pool.check()
    assert all(mine[-1].finish_reason is not None for mine in deltas)
    return deltas


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def at_rest(engine: Engine) -> bool:
    stats = engine.stats()
    engine.state.pool.check()
    return (stats.running, stats.waiting) == (0, 0) and (stats.free_slots, stats.free_pages) == (
        stats.total_slots,
        stats.total_pages,
    )


PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n    def push(self",
    "import os\n\ndef walk(path):\n    for name in os.listdir(path):\n        " * 3,
    "x",
    '    """Return the sum of',
    "try:\n    import json\nexcept ImportError:\n" * 8,
]


def mixed(loaded: LoadedModel) -> list[GenerationRequest]:
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=5)
    penalized = SamplingParams(temperature=0.7, seed=6, presence_penalty=1.0, repetition_penalty=1.2)
    choices = [GREEDY, sampled, penalized, GREEDY, SamplingParams(temperature=1.0, top_k=20, seed=9), sampled]
    return [
        ask(loaded, text, params=params, max_tokens=20 + 3 * i, logprobs=1 if i == 3 else None)
        for i, (text, params) in enumerate(zip(PROMPTS, choices, strict=True))
    ]


def test_every_request_gets_the_text_it_would_get_alone(loaded):
    requests = mixed(loaded)
    alone = [tokens_of(serve(engine_of(loaded), [request])[0]) for request in requests]
    engine = engine_of(loaded)
    together = serve(engine, requests)
    staggered = serve(engine_of(loaded, enable_prefix_caching=False), requests, stagger=True)
    assert [tokens_of(deltas) for deltas in together] == alone
    assert [tokens_of(deltas) for deltas in staggered] == alone
    assert at_rest(engine)
    for request, deltas in zip(requests, together, strict=True):
        usage = deltas[-1].usage
        assert usage.completion_tokens == len(tokens_of(deltas)) <= request.max_tokens
        assert usage.prompt_tokens == len(request.prompt)
        assert usage.steps == len(deltas)
        assert sum(usage.accepted) <= sum(usage.drafted)


def test_more_requests_than_slots_all_end_in_order_of_arrival(loaded):
    engine = engine_of(loaded, max_num_seqs=2)
    starts: list[int] = []
    for i in range(7):
        engine.submit(
            ask(loaded, PROMPTS[i % 6], max_tokens=6),
            lambda delta, i=i: starts.append(i) if i not in starts else None,
        )
    while engine.step():
        assert engine.stats().running <= 2
    assert starts == sorted(starts)
    assert len(starts) == 7
    assert at_rest(engine)


# -- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_warm_answers_equal_cold_ones_at_any_length(loaded, page_tokens):
    base = loaded.tokenizer.encode(PROMPTS[2] * 5)[:260]
    engine = engine_of(loaded, page_tokens=page_tokens)
    serve(engine, [GenerationRequest(prompt=tuple(base), params=GREEDY, max_tokens=4)])
    serve(engine, [ask(loaded, PROMPTS[5])])  # somebody else in between, in the same slot
    for length in [1, 2, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens, 129, 200, 255, 259]:
        request = GenerationRequest(prompt=(*base[:length], 500, 501), params=GREEDY, max_tokens=12)
        warm = serve(engine, [request])[0]
        cold = serve(engine_of(loaded, enable_prefix_caching=False), [request])[0]
        assert tokens_of(warm) == tokens_of(cold), length
        assert warm[-1].usage.cached_tokens == length // page_tokens * page_tokens, length
        # The draft's context came back too: the same drafts stand at the same places.
        assert warm[-1].usage.accepted == cold[-1].usage.accepted, length
    assert at_rest(engine)


def test_a_prefix_hit_restores_every_window(loaded, monkeypatch):
    """The mutation that a cache without windows would be: it must change the answer."""
    base = tuple(loaded.tokenizer.encode(PROMPTS[2] * 5)[:200])
    request = GenerationRequest(prompt=base, params=GREEDY, max_tokens=24)
    engine = engine_of(loaded)
    cold = tokens_of(serve(engine, [request])[0])
    assert tokens_of(serve(engine, [request])[0]) == cold
    engine.state.page_windows.zero_()
    broken = serve(engine, [request])[0]
    assert broken[-1].usage.cached_tokens == 192
    assert tokens_of(broken) != cold


def test_a_conversation_finds_its_own_answer_again(loaded):
    engine = engine_of(loaded, page_tokens=16)
    first = ask(loaded, PROMPTS[1], max_tokens=60)
    answer = tokens_of(serve(engine, [first])[0])
    follow_up = GenerationRequest(prompt=(*first.prompt, *answer, 300, 301), params=GREEDY, max_tokens=8)
    warm = serve(engine, [follow_up])[0]
    assert warm[-1].usage.cached_tokens >= (len(first.prompt) + len(answer) - 1) // 16 * 16 - 16
    cold = serve(engine_of(loaded, enable_prefix_caching=False), [follow_up])[0]
    assert tokens_of(warm) == tokens_of(cold)


def test_cache_reasons_are_counted(loaded):
    engine = engine_of(loaded)
    serve(engine, [ask(loaded, "x")])
    serve(engine, [ask(loaded, PROMPTS[2])])
    serve(engine, [ask(loaded, PROMPTS[2])])
    serve(engine, [ask(loaded, PROMPTS[2], prompt_logprobs=0)])
    stats = engine.stats()
    assert (stats.cache_queries, stats.cache_hits) == (4, 1)
    assert stats.cache_misses == {"too_short": 1, "no_match": 1, "prompt_logprobs": 1}


# -- pages run out ----------------------------------------------------------------------------------------------------


def test_preempted_requests_go_on_as_if_nothing_had_happened(loaded):
    choices = [GREEDY, SamplingParams(seed=1), GREEDY, SamplingParams(seed=2), GREEDY, SamplingParams(seed=3)]
    requests = [ask(loaded, text, params=params, max_tokens=90) for text, params in zip(PROMPTS, choices, strict=True)]
    alone = [tokens_of(serve(engine_of(loaded), [request])[0]) for request in requests]
    bytes_per_page = State.page_bytes(loaded.config, 16, keep_windows=True, dtype=torch.bfloat16)
    slots = 8 * State.slot_bytes(loaded.config, 16, 128, dtype=torch.bfloat16)
    engine = engine_of(loaded, page_tokens=16, max_model_len=256, kv_cache_memory=slots + 24 * bytes_per_page)
    deltas = serve(engine, requests)
    assert [tokens_of(mine) for mine in deltas] == alone
    assert engine.stats().preemptions > 0, "the pool was too large to test anything"
    assert at_rest(engine)
    # The oldest request is never the one that gives way.
    assert deltas[0][-1].usage.preemptions == 0


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_token_limit_is_exact_and_an_end_token_comes_first(loaded):
    request = ask(loaded, PROMPTS[0], max_tokens=40)
    whole = tokens_of(serve(engine_of(loaded), [request])[0])
    assert len(whole) == 40
    engine = engine_of(loaded)
    for limit in range(1, 13):
        deltas = serve(engine, [dataclasses.replace(request, max_tokens=limit)])[0]
        assert tokens_of(deltas) == whole[:limit]
        assert deltas[-1].finish_reason == "length"
    for place in range(12):
        token = whole[place]
        first = whole.index(token)
        for limit in (first + 1, first + 2, 40):
            ends = dataclasses.replace(request, max_tokens=limit, stop_token_ids=frozenset({token}))
            deltas = serve(engine, [ends])[0]
            assert tokens_of(deltas) == whole[: first + 1]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", token)
            assert deltas[-1].usage.completion_tokens == first + 1
    assert at_rest(engine)


def test_end_of_sentence_inside_a_block_ends_exactly_there(loaded):
    request = ask(loaded, PROMPTS[0], max_tokens=40)
    whole = tokens_of(serve(engine_of(loaded), [request])[0])
    for place in range(8, 16):
        config = dataclasses.replace(loaded.config, eos_token_id=whole[place])
        engine = engine_of(dataclasses.replace(loaded, config=config))
        first = whole.index(whole[place])
        deltas = serve(engine, [request])[0]
        assert tokens_of(deltas) == whole[: first + 1]
        assert deltas[-1].finish_reason == "stop"
        assert text_of(deltas) == loaded.tokenizer.decode(whole[:first])
        ignoring = serve(engine, [dataclasses.replace(request, ignore_eos=True)])[0]
        assert tokens_of(ignoring) == whole
        held_back = serve(engine, [dataclasses.replace(request, min_tokens=first + 4)])[0]
        assert config.eos_token_id not in tokens_of(held_back)[: first + 4]


def test_stop_strings_cut_text_and_tokens(loaded):
    request = ask(loaded, PROMPTS[0], max_tokens=40)
    deltas = serve(engine_of(loaded), [request])[0]
    whole, text = tokens_of(deltas), text_of(deltas)
    engine = engine_of(loaded)
    for begin in range(0, len(text) - 4, 7):
        stop = text[begin : begin + 4]
        found = serve(engine, [dataclasses.replace(request, stop=(stop, "never said"))])[0]
        at = text.index(stop)
        assert text_of(found) == text[:at]
        assert found[-1].stop_reason == stop
        used = tokens_of(found)
        assert used == whole[: len(used)]
        said = loaded.tokenizer.decode(used)
        assert stop in said
        assert stop not in loaded.tokenizer.decode(used[:-1])
        assert found[-1].usage.completion_tokens == len(used)


def test_logprobs_are_those_of_the_text_alone(loaded):
    request = ask(loaded, PROMPTS[1], max_tokens=30, logprobs=3)
    deltas = serve(engine_of(loaded), [request])[0]
    tokens = tokens_of(deltas)
    found = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token for entry in found] == tokens
    assert any(delta.accepted for delta in deltas), "no draft stood: nothing is tested about speculation"
    forced = GenerationRequest(prompt=(*request.prompt, *tokens), params=GREEDY, max_tokens=1, prompt_logprobs=3)
    given = serve(engine_of(loaded), [forced])[0][0].prompt_logprobs
    assert len(given) == len(forced.prompt)
    assert given[0] is None
    assert given[len(request.prompt) :] == found
    assert all(entry.top[0][0] == entry.token for entry in found)  # greedy says the likeliest


# -- leaving and failing ----------------------------------------------------------------------------------------------


def test_aborted_requests_free_everything_at_any_moment(loaded):
    draws = random.Random(0)
    engine = engine_of(loaded, max_num_seqs=3, page_tokens=16)
    expected = tokens_of(serve(engine_of(loaded), [ask(loaded, PROMPTS[0])])[0])
    for _ in range(12):
        numbers = [
            engine.submit(ask(loaded, draws.choice(PROMPTS), max_tokens=50), lambda delta: None) for _ in range(5)
        ]
        for _ in range(draws.randrange(6)):
            engine.step()
        draws.shuffle(numbers)
        for number in numbers:
            engine.abort(number)
            engine.state.pool.check()
        assert at_rest(engine)
    assert tokens_of(serve(engine, [ask(loaded, PROMPTS[0])])[0]) == expected


def test_one_bad_row_ends_one_request_and_spoils_nobody(loaded, monkeypatch):
    engine = engine_of(loaded, page_tokens=16)
    good, bad = ask(loaded, PROMPTS[2], max_tokens=30), ask(loaded, PROMPTS[5], max_tokens=30)
    expected = tokens_of(serve(engine_of(loaded), [good])[0])
    deltas: list[list[Delta]] = [[], []]
    engine.submit(good, deltas[0].append)
    engine.submit(bad, deltas[1].append)
    while not deltas[1]:
        engine.step()
    cached = engine.stats().cached_pages
    real = type(loaded.model).logits

    def poisoned(self, hidden):
        logits = real(self, hidden)
        logits[-1] = float("nan")  # rows of the younger request come last
        return logits

    monkeypatch.setattr(type(loaded.model), "logits", poisoned)
    engine.step()
    monkeypatch.undo()
    while engine.step():
        pass
    assert deltas[1][-1].finish_reason == "error"
    assert "non-finite" in deltas[1][-1].error
    assert tokens_of(deltas[0]) == expected
    assert engine.stats().cached_pages < cached + 4
    again = serve(engine, [bad])[0]
    assert again[-1].usage.cached_tokens == 0, "pages of a failed request were served again"
    assert tokens_of(again) == tokens_of(serve(engine_of(loaded), [bad])[0])


def test_a_full_queue_and_a_dead_engine_refuse(loaded):
    engine = engine_of(loaded, max_num_seqs=1, max_queue=2)
    deltas: list[Delta] = []
    engine.submit(ask(loaded, PROMPTS[0]), deltas.append)
    engine.step()
    for _ in range(2):
        engine.submit(ask(loaded, PROMPTS[0]), deltas.append)
    with pytest.raises(QueueFull) as full:
        engine.submit(ask(loaded, PROMPTS[0]), deltas.append)
    assert full.value.retry_after_s >= 1
    engine.fail("the power is out")
    assert [delta.error for delta in deltas if delta.finish_reason == "error"] == ["the power is out"] * 3
    with pytest.raises(EngineDead, match="the power is out"):
        engine.submit(ask(loaded, PROMPTS[0]), deltas.append)
    assert at_rest(engine)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (5, 10_000)}, "prompt"),
        ({"prompt": (5,) * 1024}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1024}, "max_tokens"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop_token_ids": frozenset({5000})}, "stop_token_ids"),
        ({"params": SamplingParams(logit_bias={5000: 1.0})}, "logit_bias"),
    ],
)
def test_impossible_requests_are_refused_by_name(loaded, fields, param):
    engine = engine_of(loaded)
    with pytest.raises(RequestError, match=param):
        engine.submit(ask(loaded, "x", **fields), lambda delta: None)
    assert at_rest(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 5}, "expected at least 6"),
        ({"max_model_len": 10**9}, "max_position_embeddings"),
        ({"kv_cache_memory": 10}, "one page"),
        ({"max_num_seqs": 0, "rule": "fast"}, "max_num_seqs = 0.*rule = 'fast'"),
        ({"page_tokens": 7}, "multiple of every ratio"),
    ],
)
def test_impossible_settings_are_refused(loaded, settings, message):
    with pytest.raises(ValueError, match=message):
        engine_of(loaded, **settings)


# -- one request's trouble --------------------------------------------------------------------------------------------


def ends_alone(engine: Engine, loaded: LoadedModel, bad: GenerationRequest, reason: str) -> None:
    """`bad` ends with an error that names `reason`, and a request beside it writes what it writes alone."""
    good = ask(loaded, PROMPTS[2], max_tokens=30)
    expected = tokens_of(serve(engine_of(loaded), [good])[0])
    deltas: list[list[Delta]] = [[], []]
    engine.submit(good, deltas[0].append)
    engine.step()
    engine.submit(bad, deltas[1].append)
    while engine.step():
        pass
    assert deltas[1][-1].finish_reason == "error"
    assert reason in deltas[1][-1].error
    assert tokens_of(deltas[0]) == expected
    assert at_rest(engine)


def test_a_penalty_that_overflows_ends_its_request(loaded):
    params = SamplingParams(temperature=1.0, seed=1, repetition_penalty=1e-308)
    ends_alone(engine_of(loaded), loaded, ask(loaded, PROMPTS[0], params=params), "beyond the range")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_whose_end_is_banned_ends_its_request(loaded, temperature):
    params = SamplingParams(temperature=temperature, seed=1, logit_bias={loaded.config.eos_token_id: -math.inf})
    bad = ask(loaded, PROMPTS[0], params=params, grammar=Grammar("regex", "a"))
    ends_alone(engine_of(loaded), loaded, bad, "every token is banned")


def test_a_bad_row_of_an_echoed_prompt_ends_its_request(loaded, monkeypatch):
    real = type(loaded.model).logits
    bad = ask(loaded, PROMPTS[5], prompt_logprobs=1)

    def poisoned(self, hidden):
        logits = real(self, hidden)
        if len(logits) == len(bad.prompt):  # the rows of the whole prompt, which only an echo asks for
            logits[3] = float("nan")
        return logits

    monkeypatch.setattr(type(loaded.model), "logits", poisoned)
    ends_alone(engine_of(loaded, decode_slowdown=math.inf), loaded, bad, "non-finite")


def test_prompt_logprobs_survive_preemption(loaded):
    long = ask(loaded, PROMPTS[2] * 3, max_tokens=4, prompt_logprobs=1)
    expected = serve(engine_of(loaded), [long])[0]
    engine = engine_of(loaded, max_num_batched_tokens=24)
    deltas: list[Delta] = []
    engine.submit(long, deltas.append)
    for _ in range(3):
        engine.step()
    assert not deltas, "the prompt was short enough for three steps"
    engine._preempt(engine._running[0])
    while engine.step():
        pass
    assert deltas[-1].usage.preemptions == 1
    assert deltas[0].prompt_logprobs == expected[0].prompt_logprobs
    assert tokens_of(deltas) == tokens_of(expected)


def test_the_queue_is_bounded_between_steps(loaded):
    engine = engine_of(loaded, max_num_seqs=2, max_queue=3)
    for _ in range(2 + 3):  # slots, then the queue
        engine.submit(ask(loaded, "x"), lambda delta: None)
    with pytest.raises(QueueFull):
        engine.submit(ask(loaded, "x"), lambda delta: None)


def test_prompts_advance_beside_decoders_that_fill_the_budget(loaded):
    engine = engine_of(loaded, max_num_batched_tokens=14, max_num_seqs=4)
    requests = [ask(loaded, text, max_tokens=40) for text in PROMPTS[:4]]
    alone = [tokens_of(serve(engine_of(loaded), [request])[0]) for request in requests]
    deltas: list[list[Delta]] = [[] for _ in requests]
    for request, mine in zip(requests[:2], deltas[:2], strict=True):
        engine.submit(request, mine.append)
    while not all(deltas[:2]):
        engine.step()
    for request, mine in zip(requests[2:], deltas[2:], strict=True):
        engine.submit(request, mine.append)
    for _ in range(60):
        engine.step()
        if deltas[2]:
            break
    assert deltas[2], "the third request never got its turn"
    while engine.step():
        pass
    assert [tokens_of(mine) for mine in deltas] == alone
