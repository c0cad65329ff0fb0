"""The step: run the rows of every request, accept, commit, draft again. One call serves any mix of requests.

A request is a list of tokens of which a prefix is computed. A step runs some tokens behind that prefix; when it
reaches the last one it also runs the drafts, decides which of them stand, adds the tokens that this brings and drafts
a new block behind them. So a prompt's chunk, a plain decoding step and a verification are the same thing with other
row counts. Stop conditions are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from flashstep.draft import Draft
from flashstep.model import Model
from flashstep.params import SamplingParams
from flashstep.settings import RULES, Rule
from flashstep.stages.accept import reference as sampling
from flashstep.stages.accept.reference import Accepted, SamplingError
from flashstep.state import Rows, Span, State

_LOGIT_ROWS = 512  # of a prompt, whose logits exist on the device at a time


class Constraint(Protocol):
    """What a request may write beyond its sampling parameters: a grammar, a minimum length."""

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """[len(drafts) + 1, vocab] bool: the tokens allowed behind the request's text and each prefix of `drafts`.

        Rows behind a draft that is itself not allowed are never reached and may hold anything but an empty row.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` have become part of the request's text."""


@dataclass(eq=False)
class Request:
    """One request as the step sees it."""

    slot: int  # -1 while the request waits for one
    tokens: list[int]  # the prompt, then what was generated; the last one is not computed yet
    params: SamplingParams
    seed: int  # of the random numbers; the engine chooses one where the user gave none
    vocab_size: int
    constraint: Constraint | None = None
    wants_prompt_logits: bool = False
    wants_logits: bool = False  # of the rows that decide tokens
    prompt_length: int = field(init=False)
    computed: int = 0  # positions whose caches are written and committed
    drafts: list[int] = field(default_factory=list)  # proposed behind the last token
    device_drafts: int = 0  # drafts that only the device knows
    draft_probs: Tensor | None = None  # [drafts, vocab] f64: what the drafts were drawn from
    counts: Tensor | None = field(init=False, default=None)  # [vocab] int64: occurrences in the generated tokens
    prompt_mask: Tensor | None = field(init=False, default=None)  # [vocab] bool: tokens of the prompt

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        if self.params.penalizes:
            self.counts = torch.zeros(self.vocab_size, dtype=torch.int64)
            self.prompt_mask = torch.zeros(self.vocab_size, dtype=torch.bool)
            self.prompt_mask[self.tokens] = True

    @property
    def waiting(self) -> int:
        """Tokens that are not computed yet; 1 in steady decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_drafts(self) -> int:
        """Rows that the next step spends on drafts, if it reaches the last token."""
        return len(self.drafts) + self.device_drafts

    def add(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        self.tokens.extend(tokens)
        if self.counts is not None:
            self.counts += torch.bincount(torch.tensor(tokens), minlength=self.vocab_size)
        if self.constraint is not None:
            self.constraint.advance(tokens)


@dataclass(frozen=True)
class StepResult:
    """What one step brought one request."""

    tokens: list[int]  # new tokens: the accepted drafts, then one that the verifier drew; empty inside a prompt
    logits: Tensor  # [len(tokens), vocab] f32: the rows that decided them, where the request wants them
    drafted: int = 0
    accepted: int = 0
    synthetic: bool = False
    error: SamplingError | None = None  # nothing can be drawn for this request; its state is as before the step
    prompt_logits: Tensor | None = None  # [waiting tokens that ran, vocab] f32 where the request wants them


class Step:
    """The eager step on the reference model.

    `num_speculative_tokens` 0 runs the backbone alone. Rule `synthetic` accepts drafts by chance, about
    `synthetic_accepted` a step, whatever the model says; it is for timing and marked in every result.
    """

    def __init__(
        self,
        model: Model,
        draft: Draft | None,
        state: State,
        *,
        num_speculative_tokens: int,
        rule: Rule = "standard",
        synthetic_accepted: float | None = None,
    ) -> None:
        block = model.config.dspark_block_size
        if not 0 <= num_speculative_tokens <= block:
            raise ValueError(
                f"num_speculative_tokens = {num_speculative_tokens}: expected 0..{block}, the block that the draft "
                "layers were trained for"
            )
        if rule not in RULES:
            raise ValueError(f"rule = {rule!r}: expected one of {', '.join(RULES)}")
        if (rule == "synthetic") != (synthetic_accepted is not None):
            raise ValueError("synthetic_accepted is the mean number of accepted drafts of the rule 'synthetic' alone")
        if num_speculative_tokens and draft is None:
            raise ValueError("num_speculative_tokens > 0 needs the draft layers")
        self.model, self.draft, self.state = model, draft, state
        self.num_speculative_tokens, self.rule = num_speculative_tokens, rule
        self.rates = (
            None if synthetic_accepted is None else sampling.synthetic_rates(synthetic_accepted, num_speculative_tokens)
        )

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Request], limits: Sequence[int] | None = None) -> list[StepResult]:
        """Advance each request by one step; `limits` bounds the waiting tokens that each may run.

        Raises `OutOfPages` before anything but page tables is changed where pages are missing.
        """
        if limits is None:
            limits = [self.state.chunk_rows - self.num_speculative_tokens] * len(requests)
        parts = []
        for request, limit in zip(requests, limits, strict=True):
            tokens = request.tokens[request.computed : request.computed + limit]
            if len(tokens) == request.waiting:
                tokens += request.drafts
            self.state.reserve(request.slot, request.computed + len(tokens))
            parts.append((request.slot, request.computed, tokens))
        rows = Rows.of(parts, self.model.device)
        output = self.model.forward(self.state, rows)

        complete = [
            (request, span)
            for request, span in zip(requests, rows.spans, strict=True)
            if span.end - span.first >= request.waiting
        ]
        decided = self._decide(complete, output.hidden)
        nothing = StepResult([], output.hidden.new_empty(0, self.model.config.vocab_size, dtype=torch.float32))
        committed: list[int] = []  # rows of this forward
        for request, span in zip(requests, rows.spans, strict=True):
            result = decided.get(request)
            if result is not None and result.error is not None:
                continue
            # Inside a prompt everything that ran is committed; else all but the drafts that fell.
            end = span.end if result is None else span.end - result.drafted + result.accepted
            committed += range(span.first, end)
            request.computed += end - span.first
            if result is not None:
                request.add(result.tokens)
                request.drafts, request.draft_probs = [], None
        if self.draft is not None and self.num_speculative_tokens:
            index = torch.tensor(committed, dtype=torch.int64, device=self.model.device)
            kept = Rows(rows.tokens[index], rows.positions[index], rows.slots[index], ())
            self.draft.observe(self.state, kept, output.taps[index])
            self._propose([request for request, _ in complete if decided[request].error is None])
        results = [decided.get(request, nothing) for request in requests]
        for i, (request, span) in enumerate(zip(requests, rows.spans, strict=True)):
            if request.wants_prompt_logits and span.start < request.prompt_length:
                end = min(span.end, span.first + request.prompt_length - span.start)
                # In pieces: all at once are gigabytes of device memory.
                pieces = output.hidden[span.first : end].split(_LOGIT_ROWS)
                prompt_logits = torch.cat([self.model.logits(piece).cpu() for piece in pieces])
                results[i] = replace(results[i], prompt_logits=prompt_logits)
        return results

    # -- deciding -------------------------------------------------------------------------------------------------

    def _decide(self, complete: Sequence[tuple[Request, Span]], hidden: Tensor) -> dict[Request, StepResult]:
        """Accept drafts and draw tokens for requests whose last token has run; `hidden` [rows, hidden] of all rows."""
        if not complete:
            return {}
        counts = [len(request.drafts) + 1 for request, _ in complete]
        index = torch.cat([torch.arange(span.end - n, span.end) for (_, span), n in zip(complete, counts, strict=True)])
        logits = dict(
            zip(
                (request for request, _ in complete),
                self.model.logits(hidden[index.to(hidden.device)]).cpu().split(counts),
                strict=True,
            )
        )
        probs: dict[Request, Tensor] = {}
        results: dict[Request, StepResult] = {}
        for group in _alike(logits):
            try:
                found = self._probabilities(group, torch.cat([logits[r] for r in group]))
                probs |= zip(group, found.split([len(logits[r]) for r in group]), strict=True)
            except SamplingError:  # one request's fault is not its neighbours': find out whose it is
                for request in group:
                    try:
                        probs[request] = self._probabilities([request], logits[request])
                    except SamplingError as error:
                        results[request] = StepResult([], logits[request][:0], error=error)
        for greedy in (True, False):
            group = [request for request in probs if (request.params.temperature == 0) == greedy]
            if group:
                accepted = self._accept(group, [probs[request] for request in group], greedy=greedy)
                for i, request in enumerate(group):
                    count = int(accepted.num_accepted[i])
                    results[request] = StepResult(
                        accepted.tokens[i, : count + 1].tolist(),
                        logits[request][: count + 1],
                        len(request.drafts),
                        count,
                        accepted.synthetic,
                    )
        return results

    def _probabilities(self, group: Sequence[Request], logits: Tensor) -> Tensor:
        """p of the rows [rows, vocab] of requests with equal parameters, request after request."""
        counts = prompt_mask = allowed = None
        if group[0].params.penalizes:
            counts = torch.cat([sampling.row_counts(_tensor(r.counts), torch.tensor(r.drafts).long()) for r in group])
            prompt_mask = torch.cat([_tensor(r.prompt_mask).expand(len(r.drafts) + 1, -1) for r in group])
        if group[0].constraint is not None:
            allowed = torch.cat([r.constraint.allowed(r.drafts) for r in group if r.constraint is not None])
        return sampling.probabilities(logits, group[0].params, counts=counts, prompt_mask=prompt_mask, allowed=allowed)

    def _accept(self, group: Sequence[Request], probs: Sequence[Tensor], *, greedy: bool) -> Accepted:
        """Decide over the drafts of `group`, of which each has its own number; `probs` [drafts + 1, vocab] each."""
        numbers = torch.tensor([len(request.drafts) for request in group])
        longest, vocab = int(numbers.max()), probs[0].shape[-1]
        p = torch.zeros(len(group), longest + 1, vocab, dtype=torch.float64)
        q = torch.zeros(len(group), longest, vocab, dtype=torch.float64)
        drafts = torch.zeros(len(group), longest, dtype=torch.int64)
        for i, request in enumerate(group):
            p[i, : len(probs[i])] = probs[i]
            if request.drafts:
                q[i, : len(request.drafts)] = _tensor(request.draft_probs)
                drafts[i, : len(request.drafts)] = torch.tensor(request.drafts)
        seeds = torch.tensor([request.seed for request in group])
        positions = torch.tensor([len(request.tokens) for request in group])
        if self.rates is not None:
            return sampling.accept_synthetic(
                target_probs=p,
                draft_ids=drafts,
                seeds=seeds,
                positions=positions,
                rates=self.rates[:longest],
                num_drafts=numbers,
            )
        if greedy:
            return sampling.accept_greedy(target_probs=p, draft_ids=drafts, num_drafts=numbers)
        assert self.rule != "synthetic"
        return sampling.accept(
            target_probs=p,
            draft_probs=q,
            draft_ids=drafts,
            seeds=seeds,
            positions=positions,
            rule=self.rule,
            num_drafts=numbers,
        )

    # -- drafting -------------------------------------------------------------------------------------------------

    def _propose(self, requests: Sequence[Request]) -> None:
        """Draft a block behind the last token of each request that has room for one."""
        limit = self.state.max_model_len
        requests = [request for request in requests if len(request.tokens) < limit]
        if not requests:
            return
        assert self.draft is not None
        device, vocab = self.model.device, self.model.config.vocab_size
        slots = torch.tensor([r.slot for r in requests], device=device)
        starts = torch.tensor([len(r.tokens) for r in requests])  # the position that the coming step decides first
        anchors = torch.tensor([r.tokens[-1] for r in requests], device=device)
        seeds = torch.tensor([r.seed for r in requests])
        place_of = {request: i for i, request in enumerate(requests)}
        groups = [(group, torch.tensor([place_of[r] for r in group])) for group in _alike(requests)]
        drafted: list[Tensor] = []
        distributions: list[Tensor] = []
        usable = torch.full((len(requests),), self.num_speculative_tokens)  # drafts before the first that is not

        def pick(place: int, logits: Tensor) -> Tensor:
            logits = logits.cpu()
            # A draft may be wrong without harm; where there is none to be had, the block just ends earlier.
            broken = ~torch.isfinite(logits).all(dim=-1)
            usable[broken] = usable[broken].clamp(max=place)
            logits = logits.masked_fill(broken[:, None], 0.0)
            q = torch.empty(len(requests), vocab, dtype=torch.float64)
            tokens = torch.empty(len(requests), dtype=torch.int64)
            for group, at in groups:
                before = torch.stack(drafted, dim=1)[at] if drafted else torch.empty(len(group), 0, dtype=torch.int64)
                counts = prompt_mask = allowed = None
                if group[0].params.penalizes:
                    rows = zip(group, before, strict=True)
                    counts = torch.stack([sampling.row_counts(_tensor(r.counts), row)[-1] for r, row in rows])
                    prompt_mask = torch.stack([_tensor(r.prompt_mask) for r in group])
                if group[0].constraint is not None:
                    allowed = torch.stack(
                        [
                            r.constraint.allowed(row)[-1]
                            for r, row in zip(group, before.tolist(), strict=True)
                            if r.constraint is not None
                        ]
                    )
                try:
                    q[at], tokens[at] = sampling.draft_tokens(
                        logits[at],
                        group[0].params,
                        seeds=seeds[at],
                        starts=starts[at],
                        positions=starts[at] + place,
                        counts=counts,
                        prompt_mask=prompt_mask,
                        allowed=allowed,
                    )
                except SamplingError:  # nothing may be written there; verification will say so if it comes to that
                    q[at], tokens[at] = 0.0, 0
                    usable[at] = usable[at].clamp(max=place)
            drafted.append(tokens)
            distributions.append(q)
            return tokens.to(device)

        self.draft.propose(self.state, slots, starts.to(device) - 2, anchors, pick, self.num_speculative_tokens)
        tokens, q = torch.stack(drafted, dim=1), torch.stack(distributions, dim=1)
        for i, request in enumerate(requests):
            count = min(int(usable[i]), limit - len(request.tokens))  # the context may end first
            request.drafts = tokens[i, :count].tolist()
            request.draft_probs = q[i, :count]


def _alike(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests that can share one call: equal parameters, and all or none of them constrained."""
    groups: dict[tuple[SamplingParams, bool], list[Request]] = {}
    for request in requests:
        groups.setdefault((request.params, request.constraint is not None), []).append(request)
    return list(groups.values())


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None, "set for every request that needs it"
    return value
