"""The step: speculation changes nothing but speed, rejected rows leave no trace, neighbours do not matter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flashstep.draft import Draft
from flashstep.executor import Request, Step
from flashstep.formats import Numerics
from flashstep.model import Model
from flashstep.pages import OutOfPages
from flashstep.params import SamplingParams
from flashstep.stages.accept.reference import SamplingError, probabilities
from flashstep.state import Rows, State

BF16 = Numerics()
FLOAT32 = Numerics(torch.float32)
EXACT = Numerics(torch.float32, quantize=False)
GREEDY = SamplingParams(temperature=0.0)


def make_step(
    model: Model, draft: Draft, *, requests: int = 1, drafts: int = 5, rows: int = 64, device: str = "cpu", **options
) -> Step:
    state = State(
        model.config,
        num_slots=requests,
        num_pages=requests * 16,
        page_tokens=32,
        rows_per_request=rows,
        dtype=model.num.dtype,
        device=device,
    )
    return Step(model, draft, state, num_speculative_tokens=drafts, **options)


def start(step: Step, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> Request:
    return Request(step.state.acquire(), list(prompt), params, seed, step.model.config.vocab_size)


def decode(step: Step, requests: list[Request], count: int) -> list[list[int]]:
    """Run until each request has `count` new tokens; requests leave the batch one by one."""
    active = list(requests)
    while active:
        step(active)
        active = [r for r in active if len(r.tokens) - r.prompt_length < count]
    return [r.tokens[r.prompt_length :][:count] for r in requests]


def random_prompts(model: Model, count: int, longest: int, seed: int = 0) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draws).tolist()
    vocab = model.config.vocab_size
    return [torch.randint(3, vocab, (length,), generator=draws).tolist() for length in lengths]


# -- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "num", "rule"), [(0, FLOAT32, "standard"), (2, FLOAT32, "block"), (0, BF16, "block")])
def test_greedy_text_is_the_same_with_and_without_drafts(random_model, seed, num, rule):
    # Random drafts stand by chance alone, so a small vocabulary lets some of them stand.
    model, draft = random_model(seed, num, vocab_size=12, dspark_noise_token_id=2)
    prompts = random_prompts(model, 12, 70, seed)
    texts, accepted = [], 0
    for drafts in (0, 5, 2):
        step = make_step(model, draft, requests=12, drafts=drafts, rule=rule)
        requests = [start(step, p) for p in prompts]
        for _ in range(8):
            accepted += sum(result.accepted for result in step(requests))
        texts.append(decode(step, requests, 30))
    assert texts[0] == texts[1] == texts[2]
    assert accepted > 10, "too few drafts stood to test anything"
    assert len({tuple(t) for t in texts[0]}) > 8, "the texts are too much alike to tell requests apart"


def right_and_wrong(truth: list[int], accept: int, drafts: int, vocab: int) -> list[int]:
    """Drafts of which exactly the first `accept` are what greedy decoding will say."""
    wrong = [(token + 1) % vocab for token in truth[accept : accept + 1]]
    return (truth[:accept] + wrong + truth[accept + 1 :])[:drafts]


def force_drafts(request: Request, tokens: list[int]) -> None:
    request.drafts = tokens
    request.draft_probs = torch.nn.functional.one_hot(torch.tensor(tokens).long(), request.vocab_size).double()


def live_state(state: State, slot: int, length: int) -> dict[str, torch.Tensor]:
    """Every cache value that a request of `length` committed positions can still see."""
    config = state.config
    slots = torch.tensor([slot], device=state.device)
    window = state.window_positions(torch.tensor([length - 1], device=state.device))
    window = window[window >= 0][None]
    live = {f"window {i}": state.read_ring(ring, slots, window) for i, ring in enumerate(state.window)}
    live |= {f"draft window {i}": state.read_ring(ring, slots, window) for i, ring in enumerate(state.draft_window)}
    back = torch.arange(max(0, length - config.engram_max_ngram_size + 1), length, device=state.device)[None]
    live["history"] = state.read_ring(state.history, slots, back)
    for source, ring in state.raw.items():
        ratio = config.compress_ratios[source]
        complete = length // ratio
        opened = torch.arange(complete * ratio, length, device=state.device)[None]
        live[f"open group {source}"] = state.read_ring(ring, slots, opened)
        live[f"kv {source}"] = state.read_entries(source, slots, torch.arange(complete, device=state.device)[None])
        live[f"index keys {source}"] = state.read_index_keys(source, slot, complete)
    return live


@settings(max_examples=15, deadline=None)
@given(
    prompt_length=st.integers(1, 45),
    pattern=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12),
    data_seed=st.integers(0, 3),
)
def test_any_pattern_of_acceptance_leaves_the_state_of_a_run_that_never_drafted(
    random_model, prompt_length, pattern, data_seed
):
    """Forced drafts of up to 8 rows, of which any number stands, against one row at a time; all cache bytes equal."""
    model, draft = random_model(2, BF16, dspark_block_size=8)
    vocab = model.config.vocab_size
    prompt = torch.randint(3, vocab, (prompt_length,), generator=torch.Generator().manual_seed(data_seed)).tolist()

    plain = make_step(model, draft, drafts=0)
    truth = decode(plain, [plain_request := start(plain, prompt)], 12 * 9 + 12)[0]

    step = make_step(model, draft, drafts=8)
    request = start(step, prompt)
    step([request])
    for accept, drafted in pattern:
        done = len(request.tokens) - request.prompt_length
        force_drafts(request, right_and_wrong(truth[done : done + drafted], accept, drafted, vocab))
        result = step([request])[0]
        assert result.accepted == min(accept, drafted)
    assert request.tokens[request.prompt_length :] == truth[: len(request.tokens) - request.prompt_length]

    # The same tokens, one row at a time, with the draft caches filled as they are committed.
    single = make_step(model, draft, drafts=1)
    other = start(single, prompt)
    while other.computed < request.computed:
        other.drafts, other.draft_probs = [], None
        single([other])
    expected = live_state(single.state, other.slot, request.computed)
    found = live_state(step.state, request.slot, request.computed)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), f"{name} differs after {pattern}"
    assert plain_request.tokens[: len(request.tokens)] == request.tokens


def test_state_comparison_sees_a_changed_cache(random_model):
    model, draft = random_model(2, BF16, dspark_block_size=8)
    step = make_step(model, draft)
    request = start(step, list(range(3, 40)))
    step([request])
    before = {name: value.clone() for name, value in live_state(step.state, request.slot, request.computed).items()}
    for source in step.state.kv:
        step.state.kv[source] += 1
    after = live_state(step.state, request.slot, request.computed)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        f"kv {source}" for source in step.state.kv
    ]


# -- chunks and batches -----------------------------------------------------------------------------------------------


def prompt_logits(model: Model, prompt: list[int], chunks: Sequence[int]) -> torch.Tensor:
    state = State(
        model.config, num_pages=16, page_tokens=32, rows_per_request=128, dtype=model.num.dtype, device=model.device
    )
    slot, done, logits = state.acquire(), 0, []
    state.reserve(slot, len(prompt))
    for chunk in chunks:
        output = model.forward(state, Rows.of([(slot, done, prompt[done : done + chunk])], model.device))
        logits.append(model.logits(output.hidden))
        done += chunk
    assert done == len(prompt)
    return torch.cat(logits)


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    rest, chunks = draw(st.integers(1, 100)), []
    while rest:
        chunks.append(draw(st.integers(1, rest)))
        rest -= chunks[-1]
    return chunks


@settings(max_examples=25, deadline=None)
@given(chunks=splits(), quantize=st.booleans(), seed=st.integers(0, 5))
def test_any_split_of_a_prompt_gives_the_same_logits(random_model, chunks, quantize, seed):
    model, _ = random_model(3, BF16 if quantize else EXACT)
    prompt = torch.randint(3, model.config.vocab_size, (sum(chunks),), generator=torch.Generator().manual_seed(seed))
    whole = prompt_logits(model, prompt.tolist(), [sum(chunks)])
    split = prompt_logits(model, prompt.tolist(), chunks)
    # bf16 products are summed exactly, so nothing may move at all; float32 ones may, in their last bits.
    assert torch.equal(whole, split) if quantize else (whole - split).abs().max() < 1e-5


def test_a_request_does_not_notice_its_neighbours(random_model):
    model, draft = random_model(4, BF16)
    prompts = random_prompts(model, 6, 60)
    sampled = SamplingParams(temperature=0.8, top_p=0.9)
    params = [GREEDY, sampled, GREEDY, sampled, SamplingParams(temperature=1.0, presence_penalty=1.5), GREEDY]
    alone = []
    for prompt, p in zip(prompts, params, strict=True):
        step = make_step(model, draft)
        alone += decode(step, [start(step, prompt, p, seed=7)], 24)
    step = make_step(model, draft, requests=6)
    # Arriving one by one: each joins while the others are at other positions.
    requests: list[Request] = []
    for prompt, p in zip(prompts, params, strict=True):
        requests.append(start(step, prompt, p, seed=7))
        step(requests)
    together = decode(step, requests, 24)
    assert together == alone


def test_prompt_chunks_run_beside_decoding_requests(random_model):
    model, draft = random_model(4, BF16)
    short, long = random_prompts(model, 1, 10)[0], list(range(3, 93))
    step = make_step(model, draft, requests=2)
    expected = []
    for prompt in (short, long):
        single = make_step(model, draft, rows=128)
        expected += decode(single, [start(single, prompt)], 20)
    first, second = start(step, short), start(step, long)
    step([first])
    while second.waiting > 1:
        results = step([first, second], [1, 16])
        assert results[0].tokens, "a running request must advance in every step"
    assert second.tokens[len(long) :][:1] == expected[1][:1]
    assert decode(step, [first, second], 20) == expected


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_text_follows_the_model(random_model, rule):
    """Chi-square of the first three tokens of 20,000 seeds against the law that the model itself gives."""
    runs, length, batch = 20_000, 3, 2_000
    params = SamplingParams(temperature=0.9, top_p=0.95)
    model, draft = random_model(5, BF16, vocab_size=8, num_hidden_layers=3, compress_ratios=[0, 2, 2, 0],
                                kv_source_layer_ids=[1], index_source_layer_ids=[1], candidate_source_layer_id=-1,
                                engram_layer_ids=[], num_nextn_predict_layers=1, dspark_target_layer_ids=[2],
                                dspark_noise_token_id=2)  # fmt: skip
    prompt = [0, 3, 4, 5, 6]
    vocab = model.config.vocab_size

    law = {(): 1.0}
    for _ in range(length):
        heads = list(law)
        rows = torch.cat([prompt_logits(model, prompt + list(head), [len(prompt) + len(head)])[-1:] for head in heads])
        p = probabilities(
            rows, params, counts=torch.zeros(len(heads), vocab).long(), prompt_mask=torch.zeros(vocab).bool()
        )
        law = {(*head, v): law[head] * float(p[i, v]) for i, head in enumerate(heads) for v in range(vocab)}

    counts = dict.fromkeys(law, 0)
    accepted = 0
    step = make_step(model, draft, requests=batch, drafts=2, rows=8, rule=rule)
    for first_seed in range(0, runs, batch):
        requests = [start(step, prompt, params, seed) for seed in range(first_seed, first_seed + batch)]
        active = requests
        while active:
            accepted += sum(result.accepted for result in step(active))
            active = [r for r in active if len(r.tokens) - len(prompt) < length]
        for request in requests:
            counts[tuple(request.tokens[len(prompt) :][:length])] += 1
            step.state.release(request.slot)
    assert accepted > runs // 10, "too few drafts stood to test the rule"
    assert all(count == 0 for text, count in counts.items() if law[text] == 0)
    texts = sorted(law, key=law.__getitem__)
    bins, expected, found = [], 0.0, 0
    for text in texts:  # pool the rare texts until a bin expects enough for the chi-square's approximation
        expected, found = expected + runs * law[text], found + counts[text]
        if expected >= 10:
            bins.append((expected, found))
            expected, found = 0.0, 0
    observed = [f for _, f in bins[:-1]] + [bins[-1][1] + found]
    wanted = [e for e, _ in bins[:-1]] + [bins[-1][0] + expected]
    assert len(bins) > 20
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_a_seed_gives_the_same_text(random_model):
    model, draft = random_model(4, BF16)
    step = make_step(model, draft, requests=3)
    params = SamplingParams(temperature=1.0)
    texts = decode(step, [start(step, [3, 4, 5], params, seed) for seed in (1, 1, 2)], 24)
    assert texts[0] == texts[1] != texts[2]


def test_synthetic_acceptance_is_marked_and_counted(random_model):
    model, draft = random_model(4, BF16)
    step = make_step(model, draft, rule="synthetic", synthetic_accepted=2.5)
    request = start(step, [3, 4, 5])
    results = [step([request])[0] for _ in range(40)]
    assert all(result.synthetic for result in results)
    assert 1.8 < sum(result.accepted for result in results[1:]) / 39 < 3.2


# -- limits and faults ------------------------------------------------------------------------------------------------


def test_a_row_that_is_not_finite_is_refused(random_model, monkeypatch):
    model, draft = random_model(4, BF16)
    step = make_step(model, draft)
    request = start(step, [3, 4, 5])
    real = Model.logits

    def poisoned(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(self, hidden)
        logits[-1, 0] = float("nan")
        return logits

    monkeypatch.setattr(Model, "logits", poisoned)
    result = step([request])[0]
    assert isinstance(result.error, SamplingError)
    assert "non-finite" in str(result.error)
    assert result.tokens == []


def test_missing_pages_are_an_error_that_changes_nothing(random_model):
    model, draft = random_model(4, BF16)
    state = State(model.config, num_slots=2, num_pages=3, page_tokens=32, rows_per_request=64)
    step = Step(model, draft, state, num_speculative_tokens=5)
    first, second = start(step, list(range(3, 60))), start(step, list(range(3, 60)))
    step([first])
    with pytest.raises(OutOfPages, match="needs 2 more pages of 32 tokens, 1 are free"):
        step([second])
    assert (second.computed, second.waiting, state.free_pages) == (0, 57, 1)
    state.release(first.slot)
    assert step([second])[0].tokens == first.tokens[57:58]


def test_drafts_stop_at_the_end_of_the_context(random_model):
    model, draft = random_model(6, BF16, max_position_embeddings=64)
    step = make_step(model, draft)
    request = start(step, list(range(3, 60)))
    while len(request.tokens) < 64:
        step([request])
    assert len(request.tokens) <= 64 + 1  # the last position's own prediction may stand behind the end
    plain = make_step(model, draft, drafts=0)
    other = start(plain, list(range(3, 60)))
    while len(other.tokens) < 64:
        plain([other])
    assert request.tokens[:64] == other.tokens[:64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 6}, "expected 0..5"),
        ({"num_speculative_tokens": -1}, "expected 0..5"),
        ({"num_speculative_tokens": 5, "rule": "fast"}, "expected one of standard, block, synthetic"),
        ({"num_speculative_tokens": 5, "rule": "synthetic"}, "synthetic_accepted"),
        ({"num_speculative_tokens": 5, "synthetic_accepted": 2.0}, "synthetic_accepted"),
    ],
)
def test_wrong_options_are_refused(random_model, options, message):
    model, draft = random_model(4, BF16)
    with pytest.raises(ValueError, match=message):
        Step(model, draft, State(model.config, num_pages=1), **options)


def test_rows_beyond_the_ring_and_positions_without_pages_are_refused(random_model):
    model, _ = random_model(4, BF16)
    state = State(model.config, num_pages=2, page_tokens=32, rows_per_request=16)
    slot = state.acquire()
    with pytest.raises(ValueError, match="split the prompt into chunks"):
        model.forward(state, Rows.of([(slot, 0, [3] * 17)]))
    with pytest.raises(ValueError, match="reserve pages"):
        model.forward(state, Rows.of([(slot, 0, [3])]))


def test_slots_and_pages_come_back():
    from flashstep.config import ModelConfig
    from flashstep.tiny import small_config

    state = State(ModelConfig.from_dict(small_config()), num_slots=3, num_pages=9, page_tokens=32, rows_per_request=4)
    slots = [state.acquire() for _ in range(3)]
    for slot, length in zip(slots, (1, 32, 100), strict=True):
        state.reserve(slot, length)
    assert state.free_pages == 9 - 1 - 1 - 4
    owned = list(
        itertools.chain.from_iterable(state.page_table[s, :n].tolist() for s, n in zip(slots, (1, 1, 4), strict=True))
    )
    assert len(set(owned)) == 6, "two requests share a page"
    with pytest.raises(RuntimeError, match="all 3 slots are taken"):
        state.acquire()
    for slot in slots:
        state.release(slot)
    assert (state.free_pages, state.free_slots) == (9, 3)
    with pytest.raises(ValueError, match="not in use"):
        state.release(0)
