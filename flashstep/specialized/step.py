"""The step on specialized kernels: steady decoding is one graph that is launched ahead, all else is the eager step.

A request decodes steadily while one token waits to be computed and nothing about it needs the host between two steps:
no penalties, bias or grammar, no logits to hand out. Its position, its last token, its drafts and its random numbers
then live on the device (`SlotState`), and the host learns what a step brought from a ring of records.

The next step is launched before the last one's record is read, so that the device never waits for the host. When the
requests change, the step in flight is awaited first: those who are still there get its result, and the surplus of a
request that has ended is dropped. Whatever it wrote lies behind that request's end, in places that the next owner of
the slot writes before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flashstep.draft import Draft
from flashstep.executor import Request, Step, StepResult
from flashstep.model import Model
from flashstep.pages import OutOfPages
from flashstep.settings import Rule
from flashstep.stages.accept.reference import SamplingError
from flashstep.state import State


@dataclass(frozen=True)
class Record:
    """What one step brought one request, as the device reports it."""

    tokens: list[int]
    drafted: int
    accepted: int
    failed: bool  # logits from which nothing can be drawn


class Decoder(Protocol):
    """Steady decoding of a batch; what `graph.GraphDecoder` does on the device."""

    max_requests: int

    def load(self, request: Request) -> None:
        """Bring a request's state to its slot on the device; it starts without drafts."""

    def set_batch(self, slots: Sequence[int]) -> None:
        """Which slots the coming steps serve."""

    def launch(self) -> None:
        """Enqueue one step of the batch."""

    def collect(self) -> list[Record]:
        """Wait for the oldest step that was not collected; a record per request of its batch."""


class SpecializedStep(Step):
    """`Step` with steady decoding on a `Decoder`."""

    def __init__(
        self,
        model: Model,
        draft: Draft | None,
        state: State,
        *,
        decoder: Decoder,
        num_speculative_tokens: int,
        rule: Rule = "standard",
        synthetic_accepted: float | None = None,
    ) -> None:
        super().__init__(
            model,
            draft,
            state,
            num_speculative_tokens=num_speculative_tokens,
            rule=rule,
            synthetic_accepted=synthetic_accepted,
        )
        self._decoder = decoder
        self._batch: tuple[Request, ...] = ()  # of the step in flight, or of the last one
        self._in_flight = 0  # steps that were launched and not collected

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Request], limits: Sequence[int] | None = None) -> list[StepResult]:
        """Advance each request by one step; a request that joins the steady batch may have to wait for the next."""
        if limits is None:
            limits = [self.state.chunk_rows - self.num_speculative_tokens] * len(requests)
        work = dict(zip(requests, limits, strict=True))
        steady = [request for request, limit in work.items() if limit >= 1 and self._is_steady(request)]
        steady = steady[: self._decoder.max_requests]
        results: dict[Request, StepResult] = {}
        if self._in_flight and tuple(steady) != self._batch:
            results = {request: result for request, result in self._collect().items() if request in work}
        others = [request for request in work if request not in results and request not in steady]
        if others:
            for request in others:
                request.device_drafts = 0  # this path does not know them
            done = super().__call__(others, [work[request] for request in others])
            results |= zip(others, done, strict=True)
        if steady:
            results |= self._decode(steady, results)
        nothing = StepResult([], torch.empty(0, self.model.config.vocab_size))
        return [results.get(request, nothing) for request in requests]

    def _is_steady(self, request: Request) -> bool:
        return (
            request.waiting == 1
            and self._is_plain(request)
            # Two steps may be in flight; both write to pages that the context has room for.
            and request.computed + 2 * self._rows <= self.state.max_model_len
        )

    @staticmethod
    def _is_plain(request: Request) -> bool:
        """Whether the device can decide alone what this request says."""
        return (
            request.constraint is None
            and not request.wants_logits
            and not request.params.penalizes
            and not request.params.logit_bias
        )

    @property
    def _rows(self) -> int:
        return 1 + self.num_speculative_tokens

    def _decode(self, steady: list[Request], known: dict[Request, StepResult]) -> dict[Request, StepResult]:
        """Results of the steady requests that have none yet, where the batch had been launched; else launch it."""
        if self._in_flight:
            self._launch(ahead=True)
            return self._collect()
        for request in steady:
            if request not in self._batch or not request.device_drafts:
                self._decoder.load(request)
                request.drafts, request.draft_probs = [], None
                request.device_drafts = self.num_speculative_tokens  # from its second step on
        self._batch = tuple(steady)
        self._decoder.set_batch([request.slot for request in steady])
        self._launch()
        if any(request in known for request in steady):
            return {}  # they have their result of this call; the others' comes with the next
        self._launch(ahead=True)
        return self._collect()

    def _launch(self, *, ahead: bool = False) -> None:
        """Launch a step of the batch; one that runs ahead of the host only where pages can be had for it."""
        try:
            for request in self._batch:
                self.state.reserve(request.slot, request.computed + self._rows * (2 if ahead else 1))
        except OutOfPages:
            if ahead:
                return
            raise
        self._decoder.launch()
        self._in_flight += 1

    def _collect(self) -> dict[Request, StepResult]:
        """What the oldest step in flight brought; requests are advanced by it."""
        results = {}
        for request, record in zip(self._batch, self._decoder.collect(), strict=True):
            logits = torch.empty(0, self.model.config.vocab_size)
            if request.slot < 0:
                continue  # it has ended, or waits for pages
            if record.failed:
                error = SamplingError("logits from which nothing can be drawn", torch.tensor([True]))
                results[request] = StepResult([], logits, error=error)
                continue
            request.computed += len(record.tokens)
            request.add(record.tokens)
            request.device_drafts = min(
                self.num_speculative_tokens, max(0, self.state.max_model_len - len(request.tokens))
            )
            results[request] = StepResult(
                record.tokens, logits, record.drafted, record.accepted, synthetic=self.rule == "synthetic"
            )
        self._in_flight -= 1
        return results

    def _propose(self, requests: Sequence[Request]) -> None:
        super()._propose([request for request in requests if not self._is_plain(request)])
