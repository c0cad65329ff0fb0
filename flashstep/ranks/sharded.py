"""The reference model of one rank: its part of the weights, and collectives where parts of a product meet.

Nothing of the forward pass is repeated here: `Model` and `Draft` run as they are, over fewer heads, groups, columns
and vocabulary rows (`layout.py`), and the products that need every rank are told how to become whole. What is
replicated is computed by every rank from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashstep.checkpoint import Checkpoint, Progress
from flashstep.config import ModelConfig
from flashstep.draft import Draft, Pick, Proposal
from flashstep.loading import DECODED_BYTES, CheckpointReader, weight_bytes
from flashstep.model import Block, Model, Output, Trace, untraced
from flashstep.ops import Reader
from flashstep.ranks.collectives import Group
from flashstep.shards import CheckpointError
from flashstep.state import Rows, State

ModelType = TypeVar("ModelType", bound="ShardedModel")
DraftType = TypeVar("DraftType", bound="ShardedDraft")


class ShardedModel(Model):
    """One rank's backbone. `logits` are whole on rank 0; elsewhere they are those of the rank's vocabulary rows."""

    def __init__(
        self, config: ModelConfig, reader: Reader, token_map: Tensor, group: Group, *, keep_decoded: bool
    ) -> None:
        """`reader` gives this rank's parts."""
        super().__init__(config, reader, token_map, keep_decoded=keep_decoded)
        self.group = group
        self.head.combine = group.gather
        for number, layer in enumerate(self.layers):
            _join(layer.block, group, f"layer {number}")
            if layer.engram is not None:
                layer.engram.wkv.combine = group.sum

    def forward(self, state: State, rows: Rows, trace: Trace = untraced) -> Output:
        """As `Model.forward`, on all ranks together; on rank 0 raises `RankFailure` where they come to differ."""
        self.group.note("tokens", rows.tokens)
        output = super().forward(state, rows, self.group.traced(trace))
        self.group.note("hidden state", output.hidden, always=True)
        self.group.note("taps of the draft", output.taps, always=True)
        self.group.agree()
        return output


class ShardedDraft(Draft):
    """One rank's draft layers. `Proposal.logits` are as those of `ShardedModel`."""

    def __init__(self, model: ShardedModel, reader: Reader, group: Group, *, keep_decoded: bool) -> None:
        """`reader` gives this rank's parts."""
        super().__init__(model, reader, keep_decoded=keep_decoded)
        self.group = group
        width = self.config.hidden_size * len(self.config.dspark_target_layer_ids) // group.world
        self._columns = slice(width * group.rank, width * (group.rank + 1))
        self.main_proj.combine = group.sum
        self.heads.markov_head.combine = group.gather
        for number, block in enumerate(self.blocks):
            _join(block, group, f"draft layer {number}")

    def main(self, taps: Tensor) -> Tensor:
        """As `Draft.main`, from all columns of `taps`; a rank takes whole groups of the quantizer."""
        return super().main(taps[:, self._columns])

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
        """As `Draft.propose`, on all ranks together. Rank 0's `pick` chooses for all."""

        def chosen(place: int, logits: Tensor) -> Tensor:
            tokens = pick(place, logits) if self.group.rank == 0 else anchors.new_empty(len(anchors))
            tokens = self.group.broadcast(tokens)
            self.group.note(f"drafted token {place}", tokens)
            return tokens

        proposal = super().propose(state, slots, last, anchors, chosen, count, trace)
        self.group.agree()
        return proposal

    def block_hidden(
        self, state: State, slots: Tensor, last: Tensor, anchors: Tensor, trace: Trace = untraced
    ) -> Tensor:
        """As `Draft.block_hidden`, on all ranks together; compared by the `propose` around it."""
        hidden = super().block_hidden(state, slots, last, anchors, trace)
        self.group.note("hidden state of the draft", hidden, always=True)
        return hidden


def read_shard(
    path: Path,
    token_map: Tensor,
    group: Group,
    device: str,
    make_model: Callable[..., ModelType],
    make_draft: Callable[..., DraftType],
    progress: Progress | None = None,
) -> tuple[ModelType, DraftType]:
    """Read this rank's part of the model directory `path` onto `device`. Raises as `loading.load`.

    `make_model` and `make_draft` are the constructors of `ShardedModel` and `ShardedDraft`, or take what those take.
    """
    checkpoint = Checkpoint.open(path)
    reader = CheckpointReader(checkpoint, device, progress=progress, rank=group.rank, world=group.world)
    keep = weight_bytes(checkpoint, group.rank, group.world) <= DECODED_BYTES
    try:
        model = make_model(checkpoint.config, reader, token_map, group, keep_decoded=keep)
        return model, make_draft(model, reader, group, keep_decoded=keep)
    except CheckpointError:
        checkpoint.check_values()  # one tensor holds bad values: name all that do
        raise


def placed(value: Any, device: torch.device | str) -> Any:
    """`value` on `device`, where it is a tensor or rows; for what travels between ranks."""
    if isinstance(value, Rows):
        return Rows(value.tokens.to(device), value.positions.to(device), value.slots.to(device), value.spans)
    return value.to(device) if isinstance(value, Tensor) else value


def _join(block: Block, group: Group, name: str) -> None:
    """Complete the products of a layer's two sublayers; both end in a sum over ranks."""
    block.attn.wo_b.combine = group.sum
    block.ffn.combine = group.sum
    block.ffn.on_choice = partial(group.note, f"router choice of {name}")
