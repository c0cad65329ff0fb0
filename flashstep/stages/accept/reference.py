"""How verified rows turn into tokens, in plain PyTorch.

Owns the random numbers, the distribution of a row, the acceptance rules and the log-probabilities. Leaves
to its callers: stop conditions, EOS and token limits (a delivered block may run past them and is cut token by token),
the committed caches, and choosing a seed where the user gave none. What a request may ask for is in `params.py`.

Everything is computed in float64 from float32 logits. A kernel that works in float32 agrees with it except where two
candidates are closer than its rounding; the random bits themselves are integers and agree exactly.

**Randomness.** A number is a pure function of (seed, block start, position, purpose, lane): Philox-4x32-10 (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so it depends neither on the batch nor on earlier calls.
`position` is the absolute position of the token being decided, `block start` that of the first token the step decides,
and the lane is the token id where one number per token is needed. The block start is part of the key because block
verification looks at the whole block before it decides how much to keep: a position that was drafted and dropped has
influenced what was delivered before it, so its numbers may not serve again when the next step drafts it anew.
(Under the standard rule dropped positions influence nothing, and position alone would do.) Every step delivers at
least one token, so no key occurs twice in a request.

**Drawing.** A token is drawn by a race of exponentials: the largest weight_v / e_v wins, e_v ~ Exp(1). This is the
Gumbel maximum, argmax(log weight_v + g_v), with g_v = -log e_v. It is chosen over the inverse of the cumulative sum
because it needs no order over the vocabulary: each shard finds its own best (score, id), and the best of those is the
answer for any number of shards. One rank needs of the others only, per row: maximum and sum of exponentials (hence p
everywhere), p of the drafted token, and the best of the race; block verification adds one sum over the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from flashstep.params import SamplingParams

NO_TOKEN = -1
"""Fills the tail of a delivered block behind its last token."""

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


# --- random numbers ---


class Purpose(IntEnum):
    """What a random number decides; each purpose is a stream of its own."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four output words for four counter words and two key words.

    All tensors are int64 holding values in [0, 2**32) and broadcast against each other; no errors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        high0, low0 = _multiply_words(_PHILOX_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_words(_PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD
        k1 = (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply_words(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # The 64-bit product does not fit a signed integer, so it is put together from two products of 32 by 16 bits.
    upper, lower = constant * (word >> 16), constant * (word & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _WORD
    return high, low


def uniform(seed: Tensor, start: Tensor, position: Tensor, purpose: Tensor | Purpose, num_lanes: int) -> Tensor:
    """Uniform numbers for the token at `position` of a block that starts at `start`; see the module's text.

    seed, start, position, purpose: [...] int64, broadcast against each other. Positions are in [0, 2**32).
    Returns [..., num_lanes] f64: (word + 1/2) / 2**32, all 32 bits of the word of that lane, in the open interval
    (0, 1). So probability 1 always passes a test `u < probability` and probability 0 never does. Rounding u to float32
    can give 1: a float32 kernel has to make this comparison in float64, or in integers.

    Counter words: lane // 4, position, start, purpose; lane % 4 picks the output word. Key words: low and high half of
    the seed.
    """
    kind = torch.as_tensor(purpose, dtype=torch.int64, device=seed.device)
    seed, start, position, kind = torch.broadcast_tensors(seed, start, position, kind)
    lane_groups = torch.arange((num_lanes + 3) // 4, device=seed.device)
    counter = (lane_groups, position[..., None], start[..., None], kind[..., None])
    key = (seed[..., None] & _WORD, (seed[..., None] >> 32) & _WORD)
    words = torch.stack(philox(counter, key), dim=-1).flatten(-2)[..., :num_lanes]
    return (words.double() + 0.5) / 2.0**32


# --- the distribution of a row ---


class SamplingError(ValueError):
    """Rows from which no token can be drawn honestly; `rows` are their indices. Ends the request they belong to."""

    def __init__(self, problem: str, bad_rows: Tensor) -> None:
        self.rows: tuple[int, ...] = tuple(bad_rows.nonzero().flatten().tolist())
        super().__init__(f"{problem} in rows {list(self.rows)} of {bad_rows.numel()}")


def row_counts(output_counts: Tensor, draft_ids: Tensor) -> Tensor:
    """How often each token will have been put out when each row of a block is decided.

    output_counts: [vocab] int64, over the tokens delivered so far. draft_ids: [k] int64.
    Returns [k + 1, vocab] int64: row i counts the delivered tokens and the first i drafts, which are the tokens that
    stand before it if it is decided at all.
    """
    drafted = torch.nn.functional.one_hot(draft_ids, output_counts.shape[0])
    return output_counts + torch.nn.functional.pad(drafted.cumsum(dim=0), (0, 0, 1, 0))


def probabilities(
    logits: Tensor,
    params: SamplingParams,
    *,
    counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """The distributions from which a request's tokens are drawn: p of verified rows, and likewise q of draft rows.

    logits: [rows, vocab] f32. counts: [rows, vocab] int64, see `row_counts`. prompt_mask: [vocab] or [rows, vocab]
    bool, tokens that the prompt contains. Both are needed where `params.penalizes` and ignored elsewhere.
    allowed: [rows, vocab] bool, what the caller's own rules leave (an EOS held back by a minimum length, a grammar);
    None allows all. Returns [rows, vocab] f64 with rows that sum to 1.

    Order: repetition penalty, frequency and presence penalty, logit bias, `allowed`; for temperature 0 then the
    one-hot of the maximum, otherwise temperature, top-k, top-p (of the mass that top-k left), min-p.
    vLLM adds the bias before the penalties and cuts by min-p before top-k and top-p. That differs only where a bias
    meets a repetition penalty, or min-p meets top-p.
    Ties: tokens are ranked by falling logit, equal ones by rising id. Top-k keeps exactly the first k of that ranking,
    top-p those with less than top_p of the mass before them (so always the first). Min-p keeps all that are level with
    its bound. Greedy takes the first.

    Raises SamplingError naming the rows if a logit or a score is not finite or if no token is allowed, ValueError for
    shapes, for missing counts or for a bias outside the vocabulary.
    """
    rows, vocab = logits.shape
    non_finite = ~torch.isfinite(logits).all(dim=-1)
    if non_finite.any():
        raise SamplingError("non-finite logits", non_finite)

    scores = logits.double()
    if params.penalizes:
        if counts is None or prompt_mask is None:
            raise ValueError("counts and prompt_mask: found none, wanted both for parameters with penalties")
        _require_shape("counts", counts, (rows, vocab))
        _require_shape("prompt_mask", prompt_mask, (vocab,) if prompt_mask.dim() == 1 else (rows, vocab))
        scores = _penalize(scores, params, counts, prompt_mask)
    if params.logit_bias:
        scores = scores + _bias(params, vocab, logits.device)
    if allowed is not None:
        _require_shape("allowed", allowed, (rows, vocab))
        scores = scores.masked_fill(~allowed, -math.inf)
    best = scores.amax(dim=-1, keepdim=True)
    nothing_left = best[:, 0] == -math.inf
    if nothing_left.any():
        raise SamplingError("every token is banned", nothing_left)
    overflowing = ~torch.isfinite(best[:, 0])  # by an extreme penalty; also NaN, which is the largest to amax
    if overflowing.any():
        raise SamplingError("scores beyond the range of numbers", overflowing)

    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(dim=-1), vocab).double()
    ranked, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    # Relative to the maximum before the division, so that no temperature can overflow the most likely token.
    kept = _filter_ranked((ranked - best) / params.temperature, params)
    return torch.zeros_like(kept).scatter(-1, token_ids, kept)


def _penalize(scores: Tensor, params: SamplingParams, counts: Tensor, prompt_mask: Tensor) -> Tensor:
    in_output = counts > 0
    scaled = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    scores = torch.where(in_output | prompt_mask, scaled, scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * in_output


def _bias(params: SamplingParams, vocab: int, device: torch.device) -> Tensor:
    outside = sorted(token for token in params.logit_bias if token >= vocab)
    if outside:
        raise ValueError(f"logit_bias: found tokens {outside}, wanted ids below the vocabulary size {vocab}")
    bias = torch.zeros(vocab, dtype=torch.float64, device=device)
    for token, value in params.logit_bias.items():
        bias[token] = value
    return bias


def _filter_ranked(ranked: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [rows, vocab] of scores that fall along each row from a first one of 0; zero where filtered."""
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if params.top_k > 0:
        keep[:, params.top_k :] = False
    if params.top_p < 1:
        mass = ranked.masked_fill(~keep, -math.inf).softmax(dim=-1).cumsum(dim=-1)
        mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        keep &= mass_before < params.top_p
    keep &= ranked.exp() >= params.min_p
    return ranked.masked_fill(~keep, -math.inf).softmax(dim=-1)


def _require_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{name}: found shape {list(tensor.shape)}, wanted {list(wanted)}")


# --- drawing ---


def sample(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row with probability weight / sum of weights.

    weights: [rows, vocab] f64 >= 0, need not sum to 1. u: [rows, vocab] f64 in (0, 1), from `uniform` with a lane per
    token. Returns [rows] int64. Equal scores go to the lowest id; a token of weight 0 is never drawn.
    The race is won by a small -log(1 - u), that is a small u, where the grid of 2**-32 is fine against u itself.
    What the grid costs: each token's probability is off by at most about 2**-32.
    Raises SamplingError for rows with a weight that is negative or not finite, or without a positive one.
    """
    best = weights.amax(dim=-1, keepdim=True)
    unusable = ~(torch.isfinite(weights) & (weights >= 0)).all(dim=-1) | (best[:, 0] <= 0)
    if unusable.any():
        raise SamplingError("weights that are no distribution", unusable)
    # Scaled to a maximum of 1: a residual made of denormal numbers still has a score above 0.
    return (weights / best / -torch.log1p(-u)).argmax(dim=-1)


def draft_tokens(
    logits: Tensor,
    params: SamplingParams,
    *,
    seeds: Tensor,
    starts: Tensor,
    positions: Tensor,
    counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of the draft chain for requests with equal parameters: q of their draft rows and the tokens drawn.

    seeds, starts, positions: [requests] int64; starts: position of the first token that the coming verification
    decides; positions: of this draft. The others as for `probabilities`, with a row per request.
    Returns (q [requests, vocab] f64, tokens [requests]). q is what `accept` must be given: it is exact for any q,
    provided that the draft was drawn from it. Raises as `probabilities`.
    """
    q = probabilities(logits, params, counts=counts, prompt_mask=prompt_mask, allowed=allowed)
    if params.temperature == 0:  # the one-hot's own token, without the random numbers that could not change it
        return q, q.argmax(dim=-1)
    return q, sample(q, uniform(seeds, starts, positions, Purpose.DRAFT, q.shape[-1]))


# --- acceptance ---


@dataclass(frozen=True)
class Accepted:
    """What a step delivers. A request's tokens are its accepted drafts and one token drawn by the verifier.

    num_accepted: [requests] int64, drafts accepted. tokens: [requests, k + 1] int64, of which the first
    num_accepted + 1 are delivered and the rest are NO_TOKEN.
    synthetic: the drafts were accepted regardless of p. Such tokens serve timing only; whatever shows them says so.
    """

    num_accepted: Tensor
    tokens: Tensor
    synthetic: bool = False


def accept(
    *,
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_ids: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rule: Literal["standard", "block"],
    num_drafts: Tensor | None = None,
) -> Accepted:
    """Decide which drafts stand and draw the token behind them; the delivered tokens follow the target exactly.

    target_probs: [requests, k + 1, vocab] f64, p of each row; row i decides draft i, the last one the bonus token.
    draft_probs: [requests, k, vocab] f64, q from which draft i was drawn. draft_ids: [requests, k] int64; k may be 0.
    seeds: [requests] int64. positions: [requests] int64, absolute position of the token that row 0 decides.
    num_drafts: [requests] int64 in 0..k where requests bring fewer drafts; rows behind that are never looked at (their
    ids must lie in the vocabulary). None means k for all. Requests do not influence each other.
    Whether draft i is among them may depend on the drafts before it, as the confidence head does, but not on draft i
    itself or on later ones: cutting a block after seeing what it costs to keep it bends the distribution.

    "standard" (Leviathan et al. 2023): a draft d stands with probability min(1, p(d)/q(d)), else it and all behind it
    fall, and the token comes from max(p - q, 0) normalized. "block": see `_block_rule`. In both, all drafts standing
    brings a bonus token from the last row's p. With one-hot p both accept exactly while the draft is the argmax, for
    any q, and then deliver the argmax.

    Corners: p(d) = 0 never stands. q disjoint from p delivers one token, from p. A tiny q(d) makes the ratio large,
    which counts as 1 even where it overflows. If rounding leaves no positive residual although a draft fell, p and q
    were equal up to rounding, and the token comes from p.

    Raises ValueError for shapes, for an unknown rule, and for q(d) = 0 (then d was not drawn from this q, and the
    result would not follow p); SamplingError (rows are requests) for a p or q that is no distribution.
    """
    requests, rows, vocab = target_probs.shape
    k = rows - 1
    _require_shape("draft_probs", draft_probs, (requests, k, vocab))
    _require_shape("draft_ids", draft_ids, (requests, k))
    num_drafts = draft_ids.new_full((requests,), k) if num_drafts is None else num_drafts
    rank = torch.arange(rows, device=draft_ids.device)
    drafted = rank[:k] < num_drafts[:, None]
    p = torch.where((rank <= num_drafts[:, None])[..., None], target_probs, 0.0)
    # One row more than there are drafts: nothing competes with p for the bonus token.
    q = torch.nn.functional.pad(torch.where(drafted[..., None], draft_probs, 0.0), (0, 0, 0, 1))
    bad = ~(torch.isfinite(p) & torch.isfinite(q) & (p >= 0) & (q >= 0)).all(dim=-1).all(dim=-1)
    if bad.any():
        raise SamplingError("p or q that is no distribution", bad)

    p_draft = p[:, :k].gather(-1, draft_ids[..., None])[..., 0]
    q_draft = q[:, :k].gather(-1, draft_ids[..., None])[..., 0]
    undrawable = (drafted & (q_draft == 0)).any(dim=-1).nonzero().flatten().tolist()
    if undrawable:
        raise ValueError(
            f"draft_probs: found q = 0 for a drafted token of requests {undrawable}, wanted the q it is of"
        )

    u = uniform(seeds[:, None], positions[:, None], positions[:, None] + rank[:k], Purpose.ACCEPT, 1)[..., 0]
    if rule == "standard":
        stands = drafted & (u * q_draft < p_draft)
        num_accepted = stands.cumprod(dim=-1).sum(dim=-1)
        weight = torch.ones_like(p[:, 0, 0])
    elif rule == "block":
        num_accepted, weight = _block_rule(p, q, p_draft, q_draft, u, num_drafts)
    else:
        raise ValueError(f"rule: found {rule!r}, wanted 'standard' or 'block'")

    request = torch.arange(requests, device=draft_ids.device)
    p_next, q_next = p[request, num_accepted], q[request, num_accepted]
    purpose = torch.where(num_accepted == num_drafts, int(Purpose.BONUS), int(Purpose.RESIDUAL))
    noise = uniform(seeds, positions, positions + num_accepted, purpose, vocab)
    token = sample(_residual(weight[:, None], p_next, q_next), noise)
    return Accepted(num_accepted, _deliver(draft_ids, num_accepted, token))


def accept_greedy(*, target_probs: Tensor, draft_ids: Tensor, num_drafts: Tensor | None = None) -> Accepted:
    """What `accept` delivers by either rule where p is one-hot, without the random numbers that could not change it.

    target_probs: [requests, k + 1, vocab], one-hot rows. draft_ids: [requests, k] int64. num_drafts as for `accept`.
    Raises ValueError for shapes.
    """
    requests, rows, _ = target_probs.shape
    _require_shape("draft_ids", draft_ids, (requests, rows - 1))
    best = target_probs.argmax(dim=-1)
    stands = (best[:, :-1] == draft_ids) & _is_drafted(draft_ids, num_drafts)
    num_accepted = stands.cumprod(dim=-1).sum(dim=-1)
    token = best.gather(-1, num_accepted[:, None])[:, 0]
    return Accepted(num_accepted, _deliver(draft_ids, num_accepted, token))


def _is_drafted(draft_ids: Tensor, num_drafts: Tensor | None) -> Tensor:
    """[requests, k] bool (or a row that broadcasts to it): which of the drafts there are."""
    rank = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    return rank >= 0 if num_drafts is None else rank < num_drafts[:, None]


def _block_rule(
    p: Tensor, q: Tensor, p_draft: Tensor, q_draft: Tensor, u: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444).

    p, q: [requests, k + 1, vocab], q being 0 from row n = num_drafts [requests] on; p_draft, q_draft, u: [requests, k].
    Returns (num_accepted [requests], weight [requests]); the next token is drawn from max(weight p - q, 0).

    With d_i the drafts, p_i and q_i the distributions after i drafts:
        w_0 = 1,  w_i = min(1, w_{i-1} p_{i-1}(d_i) / q_{i-1}(d_i))
        S_i = sum over tokens of max(w_i p_i - q_i, 0)
        h_i = S_i / (S_i + (1 - w_i))
    No draft follows the last one, so q_n = 0; there S_n = w_n and h_n = w_n, and the residual is p_n itself.
    Each i passes with probability h_i, independently; the last i that passes is the number accepted, even if an
    earlier one failed. A draft that the target likes more than the draft model makes up for one that it likes less,
    which is why runs are longer than under the standard rule and never shorter on average.

    Why the result follows p: the claim is P(at least i accepted | d_1..d_i) = w_i. It holds for i = n. From i + 1 to
    i: the expectation of w_{i+1} over d_{i+1} is A = sum min(w_i p_i, q_i) = w_i - S_i, so at least i are accepted
    with probability A + (1 - A) h_i = A + S_i = w_i. Hence after d_1..d_i the token x follows either as an accepted
    draft, min(w_i p_i(x), q_i(x)), or from the residual, S_i max(w_i p_i(x) - q_i(x), 0) / S_i; together w_i p_i(x).
    So whenever at least i are accepted, the next token is distributed as p_i.
    """
    weight = torch.ones_like(p[:, 0, 0])
    num_accepted, weight_at_accepted = torch.zeros_like(num_drafts), weight
    for i in range(1, p.shape[1]):
        # A quotient that overflows counts as 1. It is 0/0 only behind the last draft, where nothing passes.
        weight = (weight * p_draft[:, i - 1] / q_draft[:, i - 1]).clamp(max=1)
        excess = (weight[:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(dim=-1)
        # 1 - weight first: with a weight of exactly 1 the quotient is then exactly 1, which greedy relies on.
        total = excess + (1 - weight)
        # total = 0 is p_i = q_i with w_i = 1: a later i passes for certain, up to rounding, so this one may as well.
        h = torch.where(total > 0, excess / torch.where(total > 0, total, 1.0), 1.0)
        passes = (u[:, i - 1] < h) & (i <= num_drafts)
        num_accepted = torch.where(passes, i, num_accepted)
        weight_at_accepted = torch.where(passes, weight, weight_at_accepted)
    return num_accepted, weight_at_accepted


def _residual(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Unnormalized distribution [requests, vocab] of the token behind the accepted drafts; weight: [requests, 1]."""
    rest = (weight * p - q).clamp(min=0)
    return torch.where((rest > 0).any(dim=-1, keepdim=True), rest, p)


def _deliver(draft_ids: Tensor, num_accepted: Tensor, token: Tensor) -> Tensor:
    tokens = torch.nn.functional.pad(draft_ids, (0, 1), value=NO_TOKEN)
    rank, last = torch.arange(tokens.shape[1], device=tokens.device), num_accepted[:, None]
    return torch.where(rank < last, tokens, torch.where(rank == last, token[:, None], NO_TOKEN))


def synthetic_rates(mean_accepted_drafts: float, k: int) -> tuple[float, ...]:
    """The schedule of k equal rates whose mean number of accepted drafts is as given, for `accept_synthetic`.

    With rate r the mean is r + r**2 + ... + r**k. It counts drafts: a mean of tokens per step is one more.
    Raises ValueError unless 0 <= mean <= k.
    """
    if not 0 <= mean_accepted_drafts <= k:
        raise ValueError(f"mean_accepted_drafts: found {mean_accepted_drafts}, wanted a number in [0, {k}]")
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**i for i in range(1, k + 1)) < mean_accepted_drafts:
            low = middle
        else:
            high = middle
    return (high,) * k


def accept_synthetic(
    *,
    target_probs: Tensor,
    draft_ids: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rates: tuple[float, ...],
    num_drafts: Tensor | None = None,
) -> Accepted:
    """Accept drafts by a schedule, regardless of p. For timing alone; the result is marked synthetic.

    Arguments as for `accept`; rates: k numbers, rates[i] the probability that draft i stands if those before it do.
    The last token comes from p of its row. Raises ValueError for shapes or rates outside [0, 1].
    """
    requests, rows, vocab = target_probs.shape
    k = rows - 1
    _require_shape("draft_ids", draft_ids, (requests, k))
    if len(rates) != k or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"rates: found {rates}, wanted {k} numbers in [0, 1]")
    rank = torch.arange(k, device=draft_ids.device)
    u = uniform(seeds[:, None], positions[:, None], positions[:, None] + rank, Purpose.ACCEPT, 1)[..., 0]
    stands = (u < torch.tensor(rates, dtype=torch.float64, device=u.device)) & _is_drafted(draft_ids, num_drafts)
    num_accepted = stands.cumprod(dim=-1).sum(dim=-1)
    p_next = target_probs[torch.arange(requests, device=draft_ids.device), num_accepted]
    token = sample(p_next, uniform(seeds, positions, positions + num_accepted, Purpose.BONUS, vocab))
    return Accepted(num_accepted, _deliver(draft_ids, num_accepted, token), synthetic=True)


# --- log-probabilities ---


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of delivered tokens and of the likeliest ones, by falling value then rising id.

    token: [rows] f64. top_ids: [rows, top] int64. top: [rows, top] f64.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, *, top: int = 0) -> TokenLogprobs:
    """Raw log-softmax of the verifier's rows: before penalties, bias, temperature and filters.

    logits: [rows, vocab] f32, the rows that decided the tokens. tokens: [rows] int64, those delivered, one per row.
    So a block of n accepted drafts uses its first n + 1 rows. Raises SamplingError for rows with a non-finite logit.
    """
    _require_shape("tokens", tokens, (logits.shape[0],))
    non_finite = ~torch.isfinite(logits).all(dim=-1)
    if non_finite.any():
        raise SamplingError("non-finite logits", non_finite)
    logprobs = logits.double().log_softmax(dim=-1)
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return TokenLogprobs(logprobs.gather(-1, tokens[:, None])[:, 0], ids[:, :top], ranked[:, :top])
