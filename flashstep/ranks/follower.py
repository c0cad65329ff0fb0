"""What a worker does with the leader's calls: the same call on its own part of the model, and on the state's twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashstep.ranks.sharded import ShardedDraft, ShardedModel, placed
from flashstep.state import State


class FollowingState(State):
    """The twin of the leader's state. It gives out no pages: the leader says which a slot has."""

    def adopt(self, changes: Sequence[tuple[int, list[int]]]) -> None:
        """Give slots the pages that they have on the leader."""
        for slot, pages in changes:
            self._pages[slot] = []
            self._add_pages(slot, pages)


class Follower:
    """A rank's model and draft, and the state that the leader had it make."""

    def __init__(self, model: ShardedModel, draft: ShardedDraft) -> None:
        self._model, self._draft = model, draft
        self._state: FollowingState | None = None

    def run(self, name: str, args: Sequence[Any]) -> None:
        """Run the call `name` with the leader's `args` (`leader.py`); what it returns is the leader's concern."""
        args = [placed(value, self._model.device) for value in args]
        if name == "logits":
            self._model.logits(*args)
            return
        if name == "state":
            self._state = FollowingState(self._model.config, **args[0], device=self._model.device)
            return
        assert self._state is not None, "the leader announces its state before its first forward"
        state = self._state
        match name:
            case "forward":
                changes, rows = args
                state.adopt(changes)
                self._model.forward(state, rows)
            case "observe":
                self._draft.observe(state, *args)
            case "propose":
                slots, last, anchors, count = args
                self._draft.propose(state, slots, last, anchors, _leader_picks, count)
            case "block_hidden":
                self._draft.block_hidden(state, *args)
            case "attach":
                changes, slot, pages, history = args
                state.adopt(changes)
                state.attach(slot, pages, history)
            case "save_windows":
                changes, slot, page_number = args
                state.adopt(changes)
                state.save_windows(slot, page_number)
            case _:
                raise ValueError(f"call {name!r}: this rank knows none of that name")


def _leader_picks(place: int, logits: Tensor) -> Tensor:
    raise AssertionError("only the leader has whole logits to pick from")
