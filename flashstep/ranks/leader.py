"""The leader's face: model, draft and state that the engine uses as ever, and that tell the other ranks of each call.

A call is announced, then run here as on every other rank. What a call calls in turn is part of it and not announced
again. The state's page tables travel with the calls that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from flashstep.draft import Pick, Proposal
from flashstep.engine import Engine
from flashstep.loading import LoadedModel
from flashstep.model import Output, Trace, untraced
from flashstep.ranks.sharded import ShardedDraft, ShardedModel
from flashstep.settings import EngineConfig
from flashstep.state import Rows, State


class Calls(Protocol):
    """Where calls are announced."""

    state: State | None  # the one of which the other ranks have twins

    def call(self, name: str, *args: Any, step: bool = False) -> AbstractContextManager[None]:
        """Have every other rank run `name` with `args` while this one runs the body; `step` begins a new step.

        Raises `RankFailure` where that has become impossible.
        """


class LeadingModel(ShardedModel):
    """Rank 0's backbone; its states are `LeadingState`s."""

    def __init__(self, calls: Calls, *args: Any, **kwargs: Any) -> None:
        """Behind `calls`, as `ShardedModel`."""
        super().__init__(*args, **kwargs)
        self._calls = calls

    def forward(self, state: State, rows: Rows, trace: Trace = untraced) -> Output:
        """As `Model.forward`; raises `RankFailure` where a rank is lost or differs."""
        if not isinstance(state, LeadingState) or state is not self._calls.state:
            raise ValueError("the other ranks hold no twin of this state, but of the LeadingState that was made last")
        state.check(rows)  # before anything is announced: what is wrong with the rows is the caller's own
        with self._calls.call("forward", state.page_changes(), rows, step=True):
            return super().forward(state, rows, trace)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Model.logits`."""
        with self._calls.call("logits", hidden):
            return super().logits(hidden)


class LeadingDraft(ShardedDraft):
    """Rank 0's draft layers."""

    def __init__(self, calls: Calls, *args: Any, **kwargs: Any) -> None:
        """Behind `calls`, as `ShardedDraft`."""
        super().__init__(*args, **kwargs)
        self._calls = calls

    def observe(self, state: State, rows: Rows, taps: Tensor) -> None:
        """As `Draft.observe`."""
        with self._calls.call("observe", rows, taps):
            super().observe(state, rows, taps)

    def propose(
        self,
        state: State,
        slots: Tensor,
        last: Tensor,
        anchors: Tensor,
        pick: Pick,
        count: int | None = None,
        trace: Trace = untraced,
    ) -> Proposal:
        """As `Draft.propose`; `pick` runs here alone, and the others are told what it chose."""
        with self._calls.call("propose", slots, last, anchors, count):
            return super().propose(state, slots, last, anchors, pick, count, trace)

    def block_hidden(
        self, state: State, slots: Tensor, last: Tensor, anchors: Tensor, trace: Trace = untraced
    ) -> Tensor:
        """As `Draft.block_hidden`."""
        with self._calls.call("block_hidden", slots, last, anchors):
            return super().block_hidden(state, slots, last, anchors, trace)


class LeadingState(State):
    """The leader's state, with a twin on every other rank: same sizes, same caches, same page tables.

    Slots and pages are given out here alone; the twins are told which pages a slot has.
    """

    def __init__(self, state: State, calls: Calls, *, keep_windows: bool) -> None:
        """Takes over everything that `state`, still empty, owns; `keep_windows` as it was made with."""
        if type(state) is not State:
            raise TypeError(f"{type(state).__name__}: ranks of the reference keep their caches in a State")
        vars(self).update(vars(state))
        self._calls = calls
        self._told: list[list[int]] = [[] for _ in range(len(self.page_table))]
        sizes = {
            "num_slots": len(self.page_table),
            "num_pages": self.pool.num_pages,
            "page_tokens": self.page_tokens,
            "rows_per_request": self.rows_per_request,
            "chunk_rows": self.chunk_rows,
            "max_model_len": self.max_model_len,
            "keep_windows": keep_windows,
            "dtype": self.window.dtype,
        }
        with calls.call("state", sizes):
            calls.state = self

    def page_changes(self) -> list[tuple[int, list[int]]]:
        """Slots whose pages are others than the twins know, with their pages; from now on they know."""
        changes = [(slot, self.pages(slot)) for slot, told in enumerate(self._told) if self.pages(slot) != told]
        for slot, pages in changes:
            self._told[slot] = pages
        return changes

    def attach(self, slot: int, pages: Sequence[int], history: Tensor) -> None:
        """As `State.attach`, on all ranks."""
        with self._calls.call("attach", self.page_changes(), slot, list(pages), history):
            super().attach(slot, pages, history)
        self._told[slot] = self.pages(slot)

    def save_windows(self, slot: int, page_number: int) -> None:
        """As `State.save_windows`, on all ranks."""
        with self._calls.call("save_windows", self.page_changes(), slot, page_number):
            super().save_windows(slot, page_number)


class RankedEngine(Engine):
    """The engine over all ranks: nothing differs but whose state it is."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, calls: Calls) -> None:
        """`loaded` holds a `LeadingModel` and a `LeadingDraft`."""
        super().__init__(loaded, config)
        self.state = self.core.state = LeadingState(self.state, calls, keep_windows=config.enable_prefix_caching)
