import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from flashstep.params import InvalidSamplingParams, SamplingParams
from flashstep.stages.accept import reference
from flashstep.stages.accept.reference import (
    NO_TOKEN,
    Purpose,
    SamplingError,
    accept,
    accept_greedy,
    accept_synthetic,
    draft_tokens,
    philox,
    probabilities,
    row_counts,
    sample,
    synthetic_rates,
    token_logprobs,
    uniform,
)

RULES = ("standard", "block")
VOCAB = 4
RUNS = 40_000
# Seeds are fixed, so a verdict never changes by itself. A correct rule lands below the first bound once in ten
# thousand choices of seeds; the broken rules land below the second by many orders of magnitude.
CORRECT_ABOVE = 1e-4
BROKEN_BELOW = 1e-9


# --- a model of three tokens of memory: nothing, one token, two tokens; the tables hold its logits ---


def contexts(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Table row [runs] for the last two tokens before `lengths`; VOCAB stands for the start of the text."""
    run = torch.arange(tokens.shape[0])
    last = torch.where(lengths >= 1, tokens[run, (lengths - 1).clamp(min=0)], VOCAB)
    before = torch.where(lengths >= 2, tokens[run, (lengths - 2).clamp(min=0)], VOCAB)
    return before * (VOCAB + 1) + last


def random_logits(seed: int, spread: float = 1.5) -> torch.Tensor:
    return spread * torch.randn((VOCAB + 1) ** 2, VOCAB, generator=torch.Generator().manual_seed(seed))


def distributions(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    zeros = torch.zeros(logits.shape, dtype=torch.int64)
    return probabilities(logits, params, counts=zeros, prompt_mask=zeros[0].bool())


def plain_distributions(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The same filters in loops over Python lists, so that the expectation owes nothing to what it judges."""
    rows = []
    for row in logits.double().tolist():
        order = sorted(range(len(row)), key=lambda v: (-row[v], v))
        weights = {v: math.exp((row[v] - row[order[0]]) / params.temperature) for v in order}
        kept = order[: params.top_k or None]
        total, mass, nucleus = sum(weights[v] for v in kept), 0.0, []
        for v in kept:
            if mass < params.top_p or params.top_p == 1:
                nucleus.append(v)
            mass += weights[v] / total
        kept = [v for v in nucleus if weights[v] >= params.min_p]
        total = sum(weights[v] for v in kept)
        rows.append([weights[v] / total if v in kept else 0.0 for v in range(len(row))])
    return np.array(rows)


def decode(p, q, k, rule, *, runs=RUNS, length=3, q_reported=None, num_drafts_of=None):
    """Speculative decoding of `runs` requests at once until each has `length` tokens.

    p, q: [contexts, VOCAB]. q_reported: what acceptance is told instead of q. num_drafts_of: drafts -> rows verified.
    Returns (tokens [runs, length], accepted drafts per step).
    """
    run, seeds = torch.arange(runs), torch.arange(runs)
    # A request that is done (up to length + k tokens) idles along and drafts k more, which nobody reads.
    tokens, lengths = torch.zeros(runs, length + 2 * k, dtype=torch.int64), torch.zeros(runs, dtype=torch.int64)
    accepted = []
    while (active := lengths < length).any():
        ahead = tokens.clone()
        target_rows, draft_rows, drafts = [], [], []
        for i in range(k + 1):
            context = contexts(ahead, lengths + i)
            target_rows.append(p[context])
            if i < k:
                noise = reference.uniform(seeds, lengths, lengths + i, Purpose.DRAFT, VOCAB)
                drafts.append(sample(q[context], noise))
                draft_rows.append((q if q_reported is None else q_reported)[context])
                ahead[run, lengths + i] = drafts[-1]
        draft_ids = torch.stack(drafts, dim=1) if k else torch.zeros(runs, 0, dtype=torch.int64)
        step = accept(
            target_probs=torch.stack(target_rows, dim=1),
            draft_probs=torch.stack(draft_rows, dim=1) if k else torch.zeros(runs, 0, VOCAB, dtype=torch.float64),
            draft_ids=draft_ids,
            seeds=seeds,
            positions=lengths,
            rule=rule,
            num_drafts=num_drafts_of(draft_ids) if num_drafts_of else None,
        )
        accepted.append(step.num_accepted[active].double())
        for i in range(k + 1):
            delivered = active & (step.tokens[:, i] != NO_TOKEN)
            tokens[run[delivered], lengths[delivered] + i] = step.tokens[delivered, i]
        lengths = lengths + torch.where(active, step.num_accepted + 1, 0)
    return tokens[:, :length], torch.cat(accepted)


def fit(tokens: torch.Tensor, table: np.ndarray) -> float:
    """Chi-square p-value of the joint law of three tokens against their exact law; 0 for an impossible text."""
    start = VOCAB * (VOCAB + 1) + VOCAB
    first = table[start]
    second = np.stack([table[VOCAB * (VOCAB + 1) + a] for a in range(VOCAB)])
    third = np.stack([[table[a * (VOCAB + 1) + b] for b in range(VOCAB)] for a in range(VOCAB)])
    expected = (first[:, None, None] * second[:, :, None] * third).ravel() * len(tokens)
    cell = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    observed = np.bincount(cell.numpy(), minlength=VOCAB**3).astype(float)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5  # too few for the approximation: counted as one cell
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert len(expected) > 3, "the law is degenerate, the test would show nothing"
    return float(stats.chisquare(observed, expected).pvalue)


# --- the distribution of delivered tokens ---

PARAMS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=0.8, min_p=0.15),
    "all": SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1),
}


def disjoint_tables() -> tuple[torch.Tensor, torch.Tensor]:
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    p[:, 2:], q[:, :2] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PARAMS)
def test_joint_law_of_three_tokens(rule, name):
    logits = random_logits(1)
    p, q = distributions(logits, PARAMS[name]), distributions(random_logits(2), PARAMS[name])
    tokens, accepted = decode(p, q, 3, rule)
    assert 0.2 < accepted.mean() < 2.5, "neither only rejections nor only acceptances"
    assert fit(tokens, plain_distributions(logits, PARAMS[name])) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_joint_law_for_every_depth(rule, k):
    p, q = random_logits(3).double().softmax(-1), random_logits(4).double().softmax(-1)
    tokens, _ = decode(p, q, k, rule)
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_when_q_equals_p_everything_stands(rule):
    p = random_logits(1).double().softmax(-1)
    tokens, accepted = decode(p, p, 3, rule)
    assert (accepted == 3).all()
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_when_q_is_far(rule):
    p, q = random_logits(1, 3.0).double().softmax(-1), random_logits(2, 3.0).double().softmax(-1)
    tokens, _ = decode(p, q, 3, rule)
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_when_q_is_disjoint_nothing_stands(rule):
    p, q = disjoint_tables()
    tokens, accepted = decode(p, q, 3, rule)
    assert (accepted == 0).all()
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_when_q_is_nearly_one_token(rule):
    p, q = random_logits(1).double().softmax(-1), torch.full(((VOCAB + 1) ** 2, VOCAB), 1e-3, dtype=torch.float64)
    q[:, 0] = 1 - 3e-3
    tokens, _ = decode(p, q, 3, rule)
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_when_the_draft_is_greedy(rule):
    p = random_logits(1).double().softmax(-1)
    q = torch.nn.functional.one_hot(random_logits(2).argmax(-1), VOCAB).double()
    tokens, accepted = decode(p, q, 3, rule)
    assert accepted.mean() > 0.1
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


@pytest.mark.parametrize("rule", RULES)
def test_verifying_fewer_drafts_by_what_stands_before_them_keeps_the_law(rule):
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, rule, num_drafts_of=lambda ids: torch.where(ids[:, 0] < 2, 1, 3))
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


# --- broken rules must be caught by the same harness ---


@pytest.mark.parametrize("rule", RULES)
def test_caught_residual_not_used(rule, monkeypatch):
    monkeypatch.setattr(reference, "_residual", lambda weight, p, q: p)
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, rule)
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


@pytest.mark.parametrize("rule", RULES)
def test_caught_q_reported_without_its_filters(rule):
    params = SamplingParams(top_k=2)
    p, q = random_logits(1).double().softmax(-1), distributions(random_logits(2), params)
    tokens, _ = decode(p, q, 3, rule, q_reported=distributions(random_logits(2), SamplingParams()))
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


def test_caught_block_residual_without_its_weight(monkeypatch):
    monkeypatch.setattr(reference, "_residual", lambda weight, p, q: (p - q).clamp(min=0) + 1e-300)
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, "block")
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


def test_caught_one_stream_for_every_purpose(monkeypatch):
    monkeypatch.setattr(
        reference, "uniform", lambda seed, start, position, _, lanes: uniform(seed, start, position, 0, lanes)
    )
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, "standard")
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


def test_caught_choosing_the_depth_by_the_draft_that_it_drops():
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 2, "standard", num_drafts_of=lambda ids: torch.where(ids[:, 1] < 2, 1, 2))
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


def position_only(seed, start, position, purpose, lanes):
    return uniform(seed, torch.zeros_like(start), position, purpose, lanes)


def test_caught_block_rule_with_numbers_keyed_by_position_alone(monkeypatch):
    monkeypatch.setattr(reference, "uniform", position_only)
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, "block")
    assert fit(tokens, p.numpy()) < BROKEN_BELOW


def test_standard_rule_would_allow_numbers_keyed_by_position_alone(monkeypatch):
    monkeypatch.setattr(reference, "uniform", position_only)
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    tokens, _ = decode(p, q, 3, "standard")
    assert fit(tokens, p.numpy()) > CORRECT_ABOVE


# --- length of accepted runs ---


def first_step(p, q, k, rule, runs=RUNS):
    """Accepted drafts [runs] of one step of a model without memory; p, q: [vocab] f64."""
    seeds, start = torch.arange(runs), torch.zeros(runs, dtype=torch.int64)
    drafts = [sample(q.expand(runs, -1), uniform(seeds, start, start + i, Purpose.DRAFT, len(q))) for i in range(k)]
    return accept(
        target_probs=p.expand(runs, k + 1, -1),
        draft_probs=q.expand(runs, k, -1),
        draft_ids=torch.stack(drafts, dim=1),
        seeds=seeds,
        positions=start,
        rule=rule,
    )


@pytest.mark.parametrize(("rule", "mean"), [("standard", 10 / 9), ("block", 11 / 9)])
def test_mean_run_of_two_coins(rule, mean):
    # The opening example of the block verification paper: two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafts.
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    accepted = first_step(p, p.flip(0), 2, rule).num_accepted.double()
    assert abs(accepted.mean() - mean) < 4 * accepted.std() / math.sqrt(RUNS)


@pytest.mark.parametrize("seed", range(5))
def test_block_accepts_at_least_as_many(seed):
    p, q = random_logits(10 + seed).double().softmax(-1)[0], random_logits(20 + seed).double().softmax(-1)[0]
    standard, block = (first_step(p, q, 5, rule).num_accepted.double() for rule in RULES)
    assert block.mean() > standard.mean()
    # The mean of the standard rule is known: runs of independent acceptances.
    alpha = float(torch.minimum(p, q).sum())
    assert abs(standard.mean() - sum(alpha**i for i in range(1, 6))) < 4 * standard.std() / math.sqrt(RUNS)


def test_rules_agree_on_one_draft():
    p, q = random_logits(5).double().softmax(-1)[0], random_logits(6).double().softmax(-1)[0]
    assert torch.equal(first_step(p, q, 1, "standard").tokens, first_step(p, q, 1, "block").tokens)


# --- greedy ---


def block_of(p, q, ids, rule, *, seeds=None, positions=None, num_drafts=None):
    requests = p.shape[0]
    return accept(
        target_probs=p,
        draft_probs=q,
        draft_ids=ids,
        seeds=torch.arange(requests) if seeds is None else seeds,
        positions=torch.full((requests,), 7) if positions is None else positions,
        rule=rule,
        num_drafts=num_drafts,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_greedy_is_argmax_decoding(rule, draft_temperature):
    logits = random_logits(1)
    p = distributions(logits, SamplingParams(temperature=0))
    q = distributions(logits + random_logits(2, 0.7), SamplingParams(temperature=draft_temperature))
    tokens, accepted = decode(p, q, 4, rule, runs=200, length=12)
    text = torch.zeros(1, 12, dtype=torch.int64)
    for i in range(12):
        text[0, i] = logits[contexts(text, torch.tensor([i]))].argmax()
    assert 0 < accepted.mean() < 4
    assert torch.equal(tokens, text.expand(200, -1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("below_one", [1e-17, 1.2e-16, 3e-16, 1e-9, 0.3])
def test_greedy_accepts_for_certain_whatever_q(rule, below_one):
    requests, k = 2_000, 3
    p = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand(requests, k + 1, 3)
    q = torch.tensor([below_one, 1 - below_one, 0.0], dtype=torch.float64).expand(requests, k, 3)
    ids = torch.ones(requests, k, dtype=torch.int64)
    step = block_of(p, q, ids, rule)
    assert (step.num_accepted == k).all()
    assert (step.tokens == 1).all()
    # A wrong draft at the end must take nothing with it.
    ids[:, -1] = 0
    step = block_of(p, q, ids, rule)
    assert (step.num_accepted == k - 1).all()
    assert step.tokens.unique(dim=0).tolist() == [[1, 1, 1, NO_TOKEN]]


def test_greedy_ties_take_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert distributions(logits, SamplingParams(temperature=0)).argmax(-1).tolist() == [1, 0]


# --- corners of acceptance ---


@pytest.mark.parametrize("rule", RULES)
def test_corners(rule):
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]] * 3, dtype=torch.float64)
    q = torch.tensor([[[0.0, 0.0, 1.0]], [[1e-320, 0.0, 1.0]], [[0.5, 0.5, 0.0]]], dtype=torch.float64)
    step = block_of(p, q, torch.tensor([[2], [0], [1]]), rule)
    # p(d) = 0 falls; a denormal q(d) stands; equal rows stand.
    assert step.num_accepted.tolist() == [0, 1, 1]
    assert step.tokens[0, 0] in (0, 1)
    assert step.tokens[0, 1] == NO_TOKEN
    assert step.tokens[1:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_a_lost_draft_without_residual_falls_back_to_p(rule):
    # q is above p everywhere by rounding: the draft may fall although there is nothing left to draw from.
    requests = 4_000
    p = torch.tensor([0.25, 0.75], dtype=torch.float64).expand(requests, 2, 2)
    q = (p[:, :1] * 1.5).clone()
    step = block_of(p, q, torch.zeros(requests, 1, dtype=torch.int64), rule)
    fell = step.num_accepted == 0
    assert 0.25 < fell.double().mean() < 0.42
    assert abs(step.tokens[fell, 0].double().mean() - 0.75) < 0.05


@pytest.mark.parametrize("rule", RULES)
def test_rejects_a_q_that_cannot_have_drawn_the_draft(rule):
    p = torch.full((2, 2, 2), 0.5, dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q = 0 for a drafted token of requests \[1\]"):
        block_of(p, q, torch.ones(2, 1, dtype=torch.int64), rule)


def test_rejects_bad_shapes_and_rules():
    p, q = torch.full((1, 3, 2), 0.5, dtype=torch.float64), torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"draft_probs: found shape \[1, 1, 2\], wanted \[1, 2, 2\]"):
        block_of(p, q[:, :1], ids, "block")
    with pytest.raises(ValueError, match=r"draft_ids: found shape"):
        block_of(p, q, ids[:, :1], "block")
    with pytest.raises(ValueError, match="found 'typical', wanted 'standard' or 'block'"):
        block_of(p, q, ids, "typical")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -0.1])
def test_rejects_what_is_no_distribution(poison):
    p, q = torch.full((3, 2, 2), 0.5, dtype=torch.float64), torch.full((3, 1, 2), 0.5, dtype=torch.float64)
    p[1, 1, 0] = poison
    with pytest.raises(SamplingError, match=r"rows \[1\] of 3") as caught:
        block_of(p, q, torch.zeros(3, 1, dtype=torch.int64), "standard")
    assert caught.value.rows == (1,)
    with pytest.raises(SamplingError):
        sample(torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 4), 0.5, dtype=torch.float64))


# --- seeds ---


def random_block(requests=6, k=3, vocab=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(requests, k + 1, vocab, generator=generator).double().softmax(-1)
    q = torch.randn(requests, k, vocab, generator=generator).double().softmax(-1)
    return p, q, torch.randint(vocab, (requests, k), generator=generator)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_does_not_notice_its_neighbours(rule):
    p, q, ids = random_block()
    seeds, positions = torch.tensor([5, 5, -1, 2**62, 0, 7]), torch.tensor([0, 1, 2, 2**20, 4, 5])
    together = block_of(p, q, ids, rule, seeds=seeds, positions=positions)
    order = [3, 0, 5, 1]
    shuffled = block_of(p[order], q[order], ids[order], rule, seeds=seeds[order], positions=positions[order])
    assert torch.equal(shuffled.tokens, together.tokens[order])
    for i in range(6):
        one = slice(i, i + 1)
        alone = block_of(p[one], q[one], ids[one], rule, seeds=seeds[one], positions=positions[one])
        assert torch.equal(alone.tokens[0], together.tokens[i])


@pytest.mark.parametrize("rule", RULES)
def test_unused_rows_are_never_looked_at(rule):
    p, q, ids = random_block()
    num_drafts = torch.tensor([0, 1, 2, 3, 1, 0])
    poisoned_p, poisoned_q = p.clone(), q.clone()
    for i, n in enumerate(num_drafts.tolist()):
        poisoned_p[i, n + 1 :] = math.nan
        poisoned_q[i, n:] = math.nan
    together = block_of(poisoned_p, poisoned_q, ids, rule, num_drafts=num_drafts)
    for i, n in enumerate(num_drafts.tolist()):
        one = slice(i, i + 1)
        alone = block_of(p[one, : n + 1], q[one, :n], ids[one, :n], rule, seeds=torch.tensor([i]))
        assert together.num_accepted[i] == alone.num_accepted[0]
        assert torch.equal(together.tokens[i, : n + 1], alone.tokens[0])
        assert (together.tokens[i, n + 1 :] == NO_TOKEN).all()


def test_seeds_decide_the_text():
    p, q = random_logits(1).double().softmax(-1), random_logits(2).double().softmax(-1)
    first, again = decode(p, q, 3, "block", runs=50, length=20), decode(p, q, 3, "block", runs=50, length=20)
    assert torch.equal(first[0], again[0])
    assert len(first[0].unique(dim=0)) == 50


def test_which_numbers_a_step_uses():
    # Kernels have to find the same ones: the keys are part of the contract.
    p, q, ids = random_block(requests=40)
    k, vocab, start = 3, p.shape[-1], torch.tensor(7)
    step = block_of(p, q, ids, "standard")
    assert step.num_accepted.unique().tolist() == [0, 1, 2, 3]
    for r in range(40):
        stood = 0
        while stood < k:
            u = uniform(torch.tensor(r), start, start + stood, Purpose.ACCEPT, 1)
            d = ids[r, stood]
            if u * q[r, stood, d] >= p[r, stood, d]:
                break
            stood += 1
        weights = p[r, stood] if stood == k else (p[r, stood] - q[r, stood]).clamp(min=0)
        purpose = Purpose.BONUS if stood == k else Purpose.RESIDUAL
        noise = uniform(torch.tensor(r), start, start + stood, purpose, vocab)
        assert step.num_accepted[r] == stood
        assert step.tokens[r, stood] == sample(weights[None], noise[None])


# --- random numbers ---


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    # The known-answer vectors of the Random123 library.
    words = [tuple(torch.tensor(int(word, 16)) for word in text.split()) for text in (counter, key)]
    assert [f"{int(word):08x}" for word in philox(words[0], words[1])] == wanted.split()


def test_uniform_keys():
    def number(seed=1, start=2, position=3, purpose=Purpose.DRAFT, lanes=6):
        return uniform(torch.tensor(seed), torch.tensor(start), torch.tensor(position), purpose, lanes)

    base = number()
    assert torch.equal(base, number())
    assert torch.equal(base[:1], number(lanes=1)), "a lane does not depend on how many there are"
    others = [{"seed": 2}, {"seed": 1 + 2**32}, {"seed": -1}, {"start": 3}, {"position": 4}]
    others += [{"purpose": purpose} for purpose in Purpose if purpose != Purpose.DRAFT]
    numbers = [base, *(number(**other) for other in others)]
    assert len(torch.cat(numbers).unique()) == 6 * len(numbers)
    # Counter (lane group 1, position, start, purpose), key (low, high): word 1 of the second group is lane 5.
    word = philox(tuple(map(torch.tensor, (1, 3, 2, 0))), (torch.tensor(1), torch.tensor(0)))[1]
    assert base[5] == (int(word) + 0.5) / 2**32


def test_uniform_stays_inside_and_is_flat(monkeypatch):
    seeds = torch.arange(200)
    u = uniform(seeds, seeds, seeds, Purpose.ACCEPT, 500).flatten()
    assert stats.kstest(u.numpy(), "uniform").pvalue > CORRECT_ABOVE
    for word, wanted in ((0, 2.0**-33), (0xFFFFFFFF, 1 - 2.0**-33)):
        monkeypatch.setattr(reference, "philox", lambda counter, key, word=word: (torch.full((1, 1), word),) * 4)
        end = reference.uniform(seeds[:1], seeds[:1], seeds[:1], Purpose.DRAFT, 1)
        assert 0 < end < 1
        assert end == wanted


def test_sample_follows_its_weights_over_many_tokens():
    weights = torch.arange(1.0, 301.0, dtype=torch.float64)
    weights[::7] = 0
    seeds = torch.arange(20_000)
    tokens = sample(weights.expand(20_000, -1), uniform(seeds, seeds, seeds, Purpose.BONUS, 300))
    observed = np.bincount(tokens.numpy(), minlength=300)
    expected = (weights / weights.sum() * 20_000).numpy()
    assert observed[::7].sum() == 0
    seen = expected > 0
    assert stats.chisquare(observed[seen], expected[seen]).pvalue > CORRECT_ABOVE


def test_sample_is_the_best_of_its_shards():
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(50, 12, generator=generator, dtype=torch.float64)
    u = torch.rand(50, 12, generator=generator, dtype=torch.float64)
    token = sample(weights, u)
    score = weights / -torch.log1p(-u)
    shards = torch.stack([6 * shard + sample(weights[:, cut], u[:, cut]) for shard, cut in enumerate(halves(12))], 1)
    winner = shards.gather(1, score.gather(1, shards).argmax(1, keepdim=True))[:, 0]
    assert torch.equal(winner, token)


def halves(n):
    return slice(0, n // 2), slice(n // 2, n)


def test_sample_ties_and_tiny_weights():
    half = torch.full((1, 4), 0.5, dtype=torch.float64)
    assert sample(torch.tensor([[0.0, 1.0, 1.0, 1.0]], dtype=torch.float64), half) == 1
    late = torch.full((1, 4), 1 - 2.0**-33, dtype=torch.float64)
    assert sample(torch.tensor([[0.0, 0.0, 0.0, 5e-324]], dtype=torch.float64), late) == 3


# --- filters ---


def one_row(logits, **fields):
    return distributions(torch.tensor([logits]), SamplingParams(**fields))[0]


def support(row):
    return row.nonzero().flatten().tolist()


def test_filters_against_plain_loops():
    logits = (2 * random_logits(8)).round() / 2  # many ties
    for temperature in (0.3, 1.0, 2.0):
        for top_k in (0, 1, 2, 3, 9):
            for top_p in (0.05, 0.5, 0.9, 1.0):
                for min_p in (0.0, 0.2, 1.0):
                    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
                    wanted = plain_distributions(logits, params)
                    np.testing.assert_allclose(distributions(logits, params), wanted, rtol=1e-12, atol=1e-15)


def test_filter_ties():
    assert support(one_row([2.0, 3.0, 3.0, 3.0], top_k=2)) == [1, 2]
    assert support(one_row([0.0, 0.0, 0.0, 0.0], top_p=0.5)) == [0, 1]
    assert support(one_row([0.0, 0.0, 0.0, 0.0], top_p=0.500001)) == [0, 1, 2]
    assert support(one_row([2.0, 3.0, 3.0, 1.0], min_p=1.0)) == [1, 2]
    assert support(one_row([2.0, 3.0, 3.0, 1.0], top_k=1)) == [1]
    assert support(one_row([0.0] * 5_000, top_k=7)) == list(range(7))


def test_top_p_counts_the_mass_that_top_k_left():
    # Probabilities 0.4 0.3 0.2 0.1; after top_k=2 they are 4/7 and 3/7, so 0.55 is reached by the first alone.
    logits = [math.log(w) for w in (0.4, 0.3, 0.2, 0.1)]
    assert support(one_row(logits, top_p=0.55)) == [0, 1]
    assert support(one_row(logits, top_p=0.55, top_k=2)) == [0]


def test_tiny_temperature_does_not_overflow():
    assert one_row([3e38, -3e38, 3e38, 0.0], temperature=1e-300).tolist() == [0.5, 0.0, 0.5, 0.0]


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0]])
    counts, prompt = torch.tensor([[3, 1, 0, 0, 0]]), torch.tensor([False, False, True, True, False])
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={4: 1.5, 2: -math.inf}
    )
    scores = torch.tensor([[1 - 1.5 - 0.25, -4 - 0.5 - 0.25, -math.inf, -4.0, 2.5]], dtype=torch.float64)
    p = probabilities(logits, params, counts=counts, prompt_mask=prompt)
    torch.testing.assert_close(p, scores.softmax(-1), rtol=1e-14, atol=0)


def test_allowed_tokens():
    allowed = torch.tensor([[True, False, True], [False, True, False]])
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    p = probabilities(torch.zeros(2, 3), SamplingParams(), counts=zeros, prompt_mask=zeros[0].bool(), allowed=allowed)
    assert p.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_reported_by_row(poison, temperature):
    logits = torch.zeros(4, 3)
    logits[1, 2] = logits[3, 0] = poison
    with pytest.raises(SamplingError, match=r"non-finite logits in rows \[1, 3\] of 4") as caught:
        distributions(logits, SamplingParams(temperature=temperature))
    assert caught.value.rows == (1, 3)
    with pytest.raises(SamplingError, match=r"non-finite logits in rows \[1, 3\]"):
        token_logprobs(logits, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_draw_is_reported(temperature):
    params = SamplingParams(temperature=temperature, logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(SamplingError, match="every token is banned"):
        distributions(torch.zeros(1, 2), params)
    with pytest.raises(ValueError, match=r"found tokens \[7\], wanted ids below the vocabulary size 2"):
        distributions(torch.zeros(1, 2), SamplingParams(logit_bias={1: 1.0, 7: 1.0}))


# --- filters inside a block: one step of k + 1 rows equals k + 1 steps of one row ---


FILTERS = {
    "ban": SamplingParams(logit_bias={2: -math.inf}),
    "min_p": SamplingParams(min_p=1.0),
    "presence": SamplingParams(presence_penalty=2.0),
    "frequency": SamplingParams(frequency_penalty=1.5),
    "repetition": SamplingParams(repetition_penalty=3.0),
    "greedy": SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=0.5),
}


@pytest.mark.parametrize("name", FILTERS)
def test_every_row_of_a_block_equals_a_step_of_its_own(name):
    params, k = FILTERS[name], 5
    logits = torch.randn(k + 1, 6, generator=torch.Generator().manual_seed(4))
    logits[:, 2] += 3  # the likeliest token: a forced repetition, and the one that is banned
    delivered, prompt = [2, 5], torch.tensor([True, False, False, False, False, False])
    drafts = [2, 2, 1, 2, 0]
    counts = row_counts(torch.bincount(torch.tensor(delivered), minlength=6), torch.tensor(drafts))
    block = probabilities(logits, params, counts=counts, prompt_mask=prompt)
    for i in range(k + 1):
        text = torch.tensor(delivered + drafts[:i])
        own_counts = torch.bincount(text, minlength=6)[None]
        step = probabilities(logits[i : i + 1], params, counts=own_counts, prompt_mask=prompt)
        assert torch.equal(block[i], step[0])
    unfiltered = distributions(logits, SamplingParams(temperature=params.temperature))
    assert all(not torch.equal(block[i], unfiltered[i]) for i in range(k + 1)) or name == "greedy"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["ban", "min_p", "greedy", "presence_greedy"])
def test_whole_blocks_equal_one_token_per_step(rule, name):
    # All of these leave one token per row, so the text must be the same however it is cut into steps.
    params = {
        "ban": SamplingParams(temperature=0, logit_bias={2: -math.inf}),
        "presence_greedy": SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=1.2),
    }.get(name, FILTERS.get(name))
    logits = torch.randn(60, 6, generator=torch.Generator().manual_seed(5))
    logits[:, 2] += 1.5
    texts = [speculate(logits, params, k, rule, length=30) for k in (0, 1, 3, 5)]
    assert texts[1:] == texts[:1] * 3
    assert (2 in texts[0]) == (name != "ban")


def speculate(target_logits, params, k, rule, length):
    """One request whose target logits depend on the position; drafts come from a disturbed copy of them."""
    vocab, prompt = target_logits.shape[1], torch.zeros(target_logits.shape[1], dtype=torch.bool)
    draft_logits = target_logits + 0.5 * torch.randn(target_logits.shape, generator=torch.Generator().manual_seed(6))
    text, seed = [], 11
    while len(text) < length:
        start, counts = len(text), torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab)
        q_rows, drafts = [], []
        for i in range(k):
            own_counts = row_counts(counts, torch.tensor(drafts, dtype=torch.int64))[-1]
            q, token = draft_tokens(
                draft_logits[start + i : start + i + 1],
                params,
                counts=own_counts[None],
                prompt_mask=prompt,
                seeds=torch.tensor([seed]),
                starts=torch.tensor([start]),
                positions=torch.tensor([start + i]),
            )
            q_rows.append(q[0])
            drafts.append(int(token))
        draft_ids = torch.tensor(drafts, dtype=torch.int64)
        rows = target_logits[start : start + k + 1]
        p = probabilities(rows, params, counts=row_counts(counts, draft_ids), prompt_mask=prompt)
        step = accept(
            target_probs=p[None],
            draft_probs=torch.stack(q_rows)[None] if k else p.new_zeros(1, 0, vocab),
            draft_ids=draft_ids[None],
            seeds=torch.tensor([seed]),
            positions=torch.tensor([start]),
            rule=rule,
        )
        text += step.tokens[0, : int(step.num_accepted) + 1].tolist()
    return text[:length]


def test_draft_tokens_are_drawn_from_the_q_that_is_reported():
    logits, runs = random_logits(1)[:1].expand(2_000, -1), 2_000
    params = SamplingParams(top_k=3, temperature=1.5)
    start, position = torch.full((runs,), 4), torch.full((runs,), 6)
    q, drawn = draft_tokens(logits, params, seeds=torch.arange(runs), starts=start, positions=position)
    assert torch.equal(q, distributions(logits, params))
    observed = np.bincount(drawn.numpy(), minlength=VOCAB)
    seen = (q[0] > 0).numpy()
    assert observed[~seen].sum() == 0
    assert stats.chisquare(observed[seen], (q[0] * runs).numpy()[seen]).pvalue > CORRECT_ABOVE


def test_draft_tokens_keep_to_what_is_allowed():
    allowed, zero = torch.tensor([[False, False, True, False]]), torch.zeros(1, dtype=torch.int64)
    q, token = draft_tokens(
        random_logits(1)[:1], SamplingParams(), seeds=zero, starts=zero, positions=zero, allowed=allowed
    )
    assert token.tolist() == [2]
    assert q.tolist() == [[0, 0, 1, 0]]


@pytest.mark.parametrize("rule", RULES)
def test_greedy_acceptance_is_the_limit_of_both_rules(rule):
    p = torch.nn.functional.one_hot(torch.randint(VOCAB, (500, 4)), VOCAB).double()
    q = torch.rand(500, 3, VOCAB, dtype=torch.float64).softmax(-1)
    drafts = torch.where(torch.rand(500, 3) < 0.7, p[:, :3].argmax(-1), torch.randint(VOCAB, (500, 3)))
    seeds = torch.arange(500)
    full = accept(target_probs=p, draft_probs=q, draft_ids=drafts, seeds=seeds, positions=seeds, rule=rule)
    short = accept_greedy(target_probs=p, draft_ids=drafts)
    assert torch.equal(full.num_accepted, short.num_accepted)
    assert torch.equal(full.tokens, short.tokens)
    assert 0 < int((full.num_accepted == 3).sum()) < 500


def test_penalties_without_counts_are_refused():
    with pytest.raises(ValueError, match="counts and prompt_mask"):
        probabilities(random_logits(1), SamplingParams(presence_penalty=1.0))


# --- synthetic acceptance ---


@pytest.mark.parametrize(("mean", "k"), [(0.0, 5), (1.3, 5), (2.51, 5), (3.7, 5), (5.0, 5), (0.4, 1)])
def test_synthetic_acceptance_has_the_given_mean_and_is_marked(mean, k):
    p, _, ids = random_block(requests=20_000, k=k)
    step = accept_synthetic(
        target_probs=p,
        draft_ids=ids,
        seeds=torch.arange(20_000),
        positions=torch.zeros(20_000, dtype=torch.int64),
        rates=synthetic_rates(mean, k),
    )
    accepted = step.num_accepted.double()
    assert step.synthetic
    assert abs(accepted.mean() - mean) <= 4 * accepted.std() / math.sqrt(20_000)
    row = torch.arange(20_000)
    for i in range(k):
        stood = step.num_accepted > i
        assert torch.equal(step.tokens[stood, i], ids[stood, i])
    assert (step.tokens[row, step.num_accepted] >= 0).all()
    assert ((step.tokens != NO_TOKEN).sum(1) == step.num_accepted + 1).all()


def test_synthetic_schedule():
    p, _, ids = random_block(requests=4, k=3)
    arguments = {"target_probs": p, "draft_ids": ids, "seeds": torch.arange(4), "positions": torch.arange(4)}
    assert accept_synthetic(**arguments, rates=(1.0, 1.0, 0.0)).num_accepted.tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="wanted 3 numbers"):
        accept_synthetic(**arguments, rates=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"wanted a number in \[0, 3\]"):
        synthetic_rates(3.5, 3)
    assert synthetic_rates(0.0, 0) == ()
    assert not block_of(*random_block(), "standard").synthetic


# --- log-probabilities ---


def test_logprobs_of_delivered_tokens():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    result = token_logprobs(logits, torch.tensor([2, 0]), top=3)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.token, torch.stack([wanted[0, 2], wanted[1, 0]]))
    assert result.top_ids.tolist() == [[1, 2, 0], [3, 0, 1]]
    torch.testing.assert_close(result.top, wanted.gather(1, result.top_ids))
    assert token_logprobs(logits, torch.tensor([0, 0])).top_ids.shape == (2, 0)


# --- parameters ---


def test_params_report_every_problem_at_once():
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams.from_fields(
            {
                "temprature": 1.0,
                "best_of": 2,
                "temperature": -1,
                "top_k": 2.5,
                "top_p": 0,
                "min_p": 1.5,
                "seed": "7",
                "repetition_penalty": 0.0,
                "presence_penalty": 2.1,
                "frequency_penalty": math.nan,
                "logit_bias": {1: 1.0, 2: math.inf, -3: 0.0, "4": 1.0},
            }
        )
    problems = caught.value.problems
    assert len(problems) == 11
    assert problems[0].startswith("best_of: found an unknown field, wanted one of temperature, top_k")
    assert problems[2] == "temperature: found -1, wanted a finite number >= 0"
    assert problems[-1].startswith("logit_bias: found {2: inf, -3: 0.0, '4': 1.0}, wanted a mapping")
    assert all(problem in str(caught.value) for problem in problems)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": True},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": True},
        {"top_p": 1.01},
        {"seed": 2**63},
        {"seed": 1.0},
        {"logit_bias": [1]},
        {"logit_bias": {1: math.nan}},
    ],
)
def test_params_reject(fields):
    with pytest.raises(InvalidSamplingParams, match=f"{next(iter(fields))}: found"):
        SamplingParams(**fields)


def test_params_are_frozen_copies_that_travel():
    bias = {3: 1, 4: -math.inf}
    params = SamplingParams.from_fields({"logit_bias": bias, "seed": -(2**63), "temperature": 1})
    bias[3] = 9
    assert params.logit_bias == {3: 1.0, 4: -math.inf}
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(logit_bias={}, seed=-(2**63), temperature=1))
    with pytest.raises(AttributeError):
        params.seed = 1
