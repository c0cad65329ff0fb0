"""The step: run the rows of every request, accept, commit, draft again. One call serves any mix of requests.

A request is a list of tokens of which a prefix is computed. A step runs some tokens behind that prefix; when it
reaches the last one it also runs the drafts, decides which of them stand, adds the tokens that this brings and drafts
a new block behind them. So a prompt's chunk, a plain decoding step and a verification are the same thing with other
row counts. Stop conditions are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flashstep.draft import Draft
from flashstep.model import Model
from flashstep.stages.accept import reference as sampling
from flashstep.stages.accept.reference import SamplingParams
from flashstep.state import Rows, State

Rule = Literal["standard", "block", "synthetic"]
RULES: tuple[Rule, ...] = ("standard", "block", "synthetic")


@dataclass
class Request:
    """One request as the step sees it."""

    slot: int
    tokens: list[int]  # the prompt, then what was generated; the last one is not computed yet
    params: SamplingParams
    seed: int  # of the random numbers; the engine chooses one where the user gave none
    vocab_size: int
    prompt_length: int = field(init=False)
    computed: int = 0  # positions whose caches are written and committed
    drafts: list[int] = field(default_factory=list)  # proposed behind the last token
    draft_probs: list[Tensor] = field(default_factory=list)  # [vocab] f64 each: what the drafts were drawn from
    counts: Tensor = field(init=False)  # [vocab] int64: occurrences in the generated tokens
    prompt_mask: Tensor = field(init=False)  # [vocab] bool: tokens of the prompt

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        self.prompt_mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        self.prompt_mask[self.tokens] = True

    @property
    def waiting(self) -> int:
        """Tokens that are not computed yet; 1 in steady decoding."""
        return len(self.tokens) - self.computed

    def add(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        self.tokens.extend(tokens)
        for token in tokens:
            self.counts[token] += 1


@dataclass(frozen=True)
class StepResult:
    """What one step brought one request."""

    tokens: list[int]  # new tokens: the accepted drafts, then one that the verifier drew; empty inside a prompt
    logits: Tensor  # [len(tokens), vocab] f32: the rows that decided them
    drafted: int
    accepted: int
    synthetic: bool = False


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

    def rows_needed(self, request: Request, limit: int) -> int:
        """Rows that a step with at most `limit` prompt tokens of `request` runs, drafts included."""
        return min(request.waiting, limit) + (len(request.drafts) if request.waiting <= limit else 0)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Request], limits: Sequence[int] | None = None) -> list[StepResult]:
        """Advance each request by one step; `limits` bounds the waiting tokens that each may run.

        Raises `OutOfPages` before anything is changed where pages are missing, `SamplingError` where logits are not
        finite.
        """
        if limits is None:
            limits = [self.state.rows_per_request - self.num_speculative_tokens] * len(requests)
        parts = []
        for request, limit in zip(requests, limits, strict=True):
            tokens = request.tokens[request.computed : request.computed + limit]
            if len(tokens) == request.waiting:
                tokens += request.drafts
            self.state.reserve(request.slot, request.computed + len(tokens))
            parts.append((request.slot, request.computed, tokens))
        rows = Rows.of(parts, self.model.device)
        output = self.model.forward(self.state, rows)

        results: list[StepResult] = []
        committed: list[int] = []  # rows of this forward
        drafting: list[Request] = []
        for request, span in zip(requests, rows.spans, strict=True):
            count = span.end - span.first
            if count < request.waiting:  # inside a prompt: everything that ran is committed
                committed += range(span.first, span.end)
                request.computed += count
                results.append(StepResult([], output.hidden.new_empty(0, request.vocab_size), 0, 0))
                continue
            result = self._accept(request, output.hidden[span.end - len(request.drafts) - 1 : span.end])
            committed += range(span.first, span.end - len(request.drafts) + result.accepted)
            request.computed = request.computed + count - len(request.drafts) + result.accepted
            request.add(result.tokens)
            request.drafts, request.draft_probs = [], []
            results.append(result)
            drafting.append(request)
        if self.draft is not None and self.num_speculative_tokens:
            index = torch.tensor(committed, device=self.model.device)
            kept = Rows(rows.tokens[index], rows.positions[index], rows.slots[index], ())
            self.draft.observe(self.state, kept, output.taps[index])
            self._propose([r for r in drafting if self._room(r)])
        return results

    def _room(self, request: Request) -> int:
        """Drafts that still fit in front of the end of the model's context."""
        return self.model.config.max_position_embeddings - len(request.tokens)

    def _accept(self, request: Request, hidden: Tensor) -> StepResult:
        """Decide over the drafts of `request`; `hidden` [drafts + 1, hidden] are the rows from its last token on."""
        logits = self.model.logits(hidden).cpu()
        drafts = torch.tensor(request.drafts, dtype=torch.int64)
        p = sampling.probabilities(
            logits,
            request.params,
            counts=sampling.row_counts(request.counts, drafts),
            prompt_mask=request.prompt_mask,
        )
        q = torch.stack(request.draft_probs) if request.drafts else p.new_empty(0, request.vocab_size)
        seeds, positions = torch.tensor([request.seed]), torch.tensor([len(request.tokens)])
        if self.rule == "synthetic":
            assert self.rates is not None
            accepted = sampling.accept_synthetic(
                target_probs=p[None],
                draft_ids=drafts[None],
                seeds=seeds,
                positions=positions,
                rates=self.rates[: len(request.drafts)],
            )
        elif request.params.temperature == 0:
            accepted = sampling.accept_greedy(target_probs=p[None], draft_ids=drafts[None])
        else:
            accepted = sampling.accept(
                target_probs=p[None],
                draft_probs=q[None],
                draft_ids=drafts[None],
                seeds=seeds,
                positions=positions,
                rule=self.rule,
            )
        count = int(accepted.num_accepted[0])
        tokens = accepted.tokens[0, : count + 1].tolist()
        return StepResult(tokens, logits[: count + 1], len(request.drafts), count, accepted.synthetic)

    def _propose(self, requests: Sequence[Request]) -> None:
        """Draft a block behind the last token of each request."""
        if not requests:
            return
        assert self.draft is not None
        device = self.model.device
        slots = torch.tensor([r.slot for r in requests], device=device)
        last = torch.tensor([len(r.tokens) - 2 for r in requests], device=device)
        anchors = torch.tensor([r.tokens[-1] for r in requests], device=device)
        counts = [r.counts.clone() for r in requests]

        def pick(place: int, logits: Tensor) -> Tensor:
            chosen = []
            for i, request in enumerate(requests):
                start = len(request.tokens)  # the position that the coming step decides first
                q, token = sampling.draft_token(
                    logits[i].cpu(),
                    request.params,
                    counts=counts[i],
                    prompt_mask=request.prompt_mask,
                    seed=request.seed,
                    start=start,
                    position=start + place,
                )
                counts[i][token] += 1
                if place < self._room(request):
                    request.drafts.append(token)
                    request.draft_probs.append(q)
                chosen.append(token)
            return torch.tensor(chosen, device=device)

        self.draft.propose(self.state, slots, last, anchors, pick, self.num_speculative_tokens)
