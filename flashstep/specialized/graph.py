"""Steady decoding on the device: one graph per number of requests, launched ahead, reported through pinned memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashstep.executor import Request
from flashstep.jit import Launch
from flashstep.settings import Rule
from flashstep.specialized.model import Chain, SpecializedModel
from flashstep.specialized.plan import BlockInputs, Plan, RowInputs
from flashstep.specialized.step import Record
from flashstep.stages.accept import cuda as accept
from flashstep.stages.head import cuda as head
from flashstep.state import State, upload

PLACES = (1, 2, 4, 8, 16, 32)  # buckets, in requests
_RING_STEPS = 8  # more than are ever in flight
_STUCK_S = 30.0


@dataclass(frozen=True)
class Bucket:
    """A batch of up to `batch.places` requests and the chain of its step."""

    batch: accept.Batch
    chain: Chain


class GraphDecoder:
    """Steps of steady decoding over one state (`step.Decoder`)."""

    def __init__(
        self,
        model: SpecializedModel,
        state: State,
        *,
        num_speculative_tokens: int,
        rule: Rule = "standard",
        rates: Sequence[float] = (),
        confidence_threshold: float = 0.0,
    ) -> None:
        """rates: of the rule "synthetic". confidence_threshold: see `head.cuda.draft`; 0 verifies every draft."""
        self._model, self._state, self._rule, self._rates = model, state, rule, rates
        self._drafts = num_speculative_tokens
        config, weights = model.config, model.weights
        self._plan: Plan = model.plan(state)
        slots = len(state.page_table)
        self.vocab_size = config.vocab_size
        self.slots = accept.SlotState.allocate(slots, config.dspark_block_size, weights.vocab, model.device)
        per_request = max(1 + self._drafts, config.dspark_block_size if self._drafts else 1)
        if per_request > self._plan.max_rows:
            raise ValueError(f"{per_request} rows for one request: the model was made for {self._plan.max_rows}")
        self.max_requests = min(PLACES[-1], self._plan.max_rows // per_request)
        self._ring = accept.Ring.allocate(_RING_STEPS, self.max_requests, config.dspark_block_size, model.device)
        self._threshold = torch.full((1,), confidence_threshold, device=model.device)
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._levels = [0] * slots  # of each slot's filters (`accept.cuda.levels_of`)
        self.current: Bucket | None = None
        self._count = 0
        self._launched = 0
        self._pending: deque[tuple[int, int]] = deque()  # step, requests

    def load(self, request: Request) -> None:
        """Bring a request's state to its slot on the device; it starts without drafts."""
        self._levels[request.slot] = accept.levels_of(request.params)
        self.slots.load(
            request.slot,
            position=request.computed,
            token=request.tokens[-1],
            seed=request.seed,
            params=request.params,
            rule=self._rule,
            rates=self._rates,
        )

    def set_batch(self, slots: Sequence[int]) -> None:
        """Which slots the coming steps serve."""
        places = next(size for size in PLACES if size >= len(slots))
        self.current = self.bucket(min(places, self.max_requests), levels=max(self._levels[slot] for slot in slots))
        empty = self.current.batch.places - len(slots)
        upload([*slots, *[-1] * empty], self.current.batch.batch_slot)
        self._count = len(slots)

    def launch(self) -> None:
        """Enqueue one step of the batch."""
        assert self.current is not None
        self.current.chain()
        self._launched += 1
        self._pending.append((self._launched, self._count))

    def collect(self) -> list[Record]:
        """Wait for the oldest step that was not collected. RuntimeError where the device does not report it."""
        step, count = self._pending.popleft()
        deadline = time.monotonic() + _STUCK_S
        while (found := self._ring.poll(step, count)) is None:
            if time.monotonic() > deadline:
                torch.cuda.synchronize()  # raises what went wrong on the device, if something did
                raise RuntimeError(f"step {step} was not reported within {_STUCK_S:g} s of being waited for")
        return [Record(record.tokens, record.drafted, record.accepted, failed=record.failed) for record in found]

    def bucket(self, places: int, *, levels: int) -> Bucket:
        """The bucket of `places` requests, made at its first use; levels: as of `accept.cuda.accept`."""
        if (places, levels) not in self._buckets:
            config = self._model.config
            batch = accept.Batch.allocate(places, 1 + self._drafts, config.dspark_block_size, self._model.device)
            chain = Chain(self.launches(batch, levels=levels), self._model.device)
            self._buckets[places, levels] = Bucket(batch, chain)
        return self._buckets[places, levels]

    def launches(self, batch: accept.Batch, *, levels: int) -> list[Launch]:
        """The whole step: rows, backbone, acceptance, and the draft of the next block."""
        config, plan, weights = self._model.config, self._plan, self._model.weights
        length, block = self._state.max_model_len, config.dspark_block_size
        rows = RowInputs(batch.row_token, batch.row_position, batch.row_slot)
        count, places = rows.count, batch.places
        # Vocabulary shards of a looped-back world are alike: acceptance sees its own shard as the whole.
        work = accept.Workspace.allocate(
            places, batch.rows_per_request, block, 1, self._model.device, filters=levels > 0
        )
        launches = accept.begin(self.slots, batch, max_model_len=length)
        launches += plan.forward(rows, with_taps=self._drafts > 0)
        launches += plan.logits(count)
        logits = plan.logit_rows(count)
        launches += accept.accept(self.slots, batch, work, logits, block_rule=self._rule == "block", levels=levels)
        launches += accept.commit(
            self.slots,
            batch,
            work,
            self._ring,
            noise_token=config.dspark_noise_token_id,
            max_model_len=length,
        )
        if self._drafts:
            launches += plan.observe(RowInputs(batch.row_token, batch.row_position, batch.committed_slot))
            drafted = RowInputs(batch.draft_token, batch.draft_position, batch.draft_slot)
            launches += plan.draft(BlockInputs(drafted, batch.draft_last))
            launches += head.draft(
                self.slots,
                head.DraftWorkspace.allocate(self.slots, places, 1),
                weights.draft.heads,
                draft_slot=batch.draft_slot,
                base=plan.logit_rows(drafted.count),
                hidden=plan.draft_hidden(drafted.count),
                threshold=self._threshold,
                drafts=self._drafts,
                max_model_len=length,
            )
        return launches
