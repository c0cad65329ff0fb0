"""DSpark in exact PyTorch: the draft layers propose a block of tokens after every step (section 10).

The draft sees the sequence through `main`, a projection of the backbone's taps at committed positions, which fills
its window caches. A block is the last sampled token and noise tokens; its rows see the window and each other, also
the later ones. The heads then choose one token after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.model import Block, Model, Trace, copies, untraced
from flashstep.ops import Linear, Reader, rms_norm
from flashstep.stages.attention import reference as attention
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.head import reference as head
from flashstep.stages.moe import reference as moe
from flashstep.state import Rows, State

# (place in the block, logits [requests, vocab] of that place) -> chosen tokens [requests]
Pick = Callable[[int, Tensor], Tensor]


@dataclass
class Proposal:
    """One drafted block for each of several requests."""

    tokens: Tensor  # [requests, count] int64
    logits: Tensor  # [requests, count, vocab] f32, Markov correction included
    confidence: Tensor  # [requests, count] f32, a logit


class Draft:
    """The draft layers; embedding and head are the backbone's."""

    def __init__(self, model: Model, reader: Reader, *, keep_decoded: bool = True) -> None:
        config = model.config
        self.config, self.num, self.model = config, model.num, model
        last = f"mtp.{config.num_nextn_predict_layers - 1}."
        self.main_proj = Linear.read(reader, "mtp.0.main_proj", keep_decoded=keep_decoded)
        self.main_norm = reader.tensor("mtp.0.main_norm.weight")
        self.blocks = [
            Block.read(
                reader,
                f"mtp.{layer}.",
                config.dspark_n_routed_experts,
                config.dspark_num_experts_per_tok,
                keep_decoded=keep_decoded,
            )
            for layer in range(config.num_nextn_predict_layers)
        ]
        self.norm = reader.tensor(last + "norm.weight")
        self.heads = head.DraftHeads.read(reader, last)

    def main(self, taps: Tensor) -> Tensor:
        """`main` [rows, hidden] of the backbone's taps [rows, taps * hidden]."""
        x = self.main_proj(self.num.fp8(taps)).to(self.num.dtype)
        return rms_norm(x, self.main_norm, self.config.rms_norm_eps, self.num)

    def observe(self, state: State, rows: Rows, taps: Tensor) -> None:
        """Write what committed `rows` leave in the draft's window caches; `taps` as `Output.taps`."""
        config, num = self.config, self.num
        main = num.fp8(self.main(taps))
        turns = self.model.rope.at(rows.positions)
        for layer, block in enumerate(self.blocks):
            latent = attention.project_latent(main, block.attn, config, num)
            state.write_ring(state.draft_window[layer], rows, attention.window_entry(latent, turns, num))

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
        """Draft `count` tokens (default: the block size) behind each request's `anchors` [requests] int64.

        `last` [requests] is the last committed position t; the anchor is the token sampled for t + 1. The block
        stands at t + 1..t + block, the drafted tokens at t + 2... `pick` chooses the token of each place in turn.
        """
        hidden = self.block_hidden(state, slots, last, anchors, trace)
        base = self.model.logits(rms_norm(hidden, self.norm, self.config.rms_norm_eps, self.num))
        previous, tokens, logits, confidence = anchors, [], [], []
        for place in range(self.config.dspark_block_size if count is None else count):
            logits.append(base[:, place] + head.markov(previous, self.heads))
            confidence.append(head.confidence(hidden[:, place], previous, self.heads))
            previous = pick(place, logits[-1])
            tokens.append(previous)
        return Proposal(*(torch.stack(x, dim=1) for x in (tokens, logits, confidence)))

    def block_hidden(
        self, state: State, slots: Tensor, last: Tensor, anchors: Tensor, trace: Trace = untraced
    ) -> Tensor:
        """Collapsed stream [requests, block, hidden] that leaves the draft layers, before the final norm.

        `trace` is shown `draft.M.ffn_in` [requests * block, hidden] of each draft layer M.
        """
        config, num, size = self.config, self.num, self.config.dspark_block_size
        requests = len(slots)
        tokens = torch.full((requests, size), config.dspark_noise_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        turns = self.model.rope.at((last.unsqueeze(-1) + torch.arange(1, size + 1, device=last.device)).flatten())
        window = state.window_positions(last)  # [requests, window]
        visible = torch.nn.functional.pad(window >= 0, (0, size), value=True).repeat_interleave(size, dim=0)
        stream = copies(self.model.embed[tokens.flatten()].to(num.dtype), config)
        pre = boundary.first_pre(requests * size, config, stream.device)
        for layer, block in enumerate(self.blocks):
            next_pre, post, comb = boundary.mixes(stream, block.hc_attn, config)
            x = rms_norm(boundary.collapse(stream, pre, num), block.attn_norm, config.rms_norm_eps, num)
            q_r, latent = attention.project_low(x, block.attn, config, num)
            q = attention.project_q(q_r, turns, block.attn, config, num)
            own = attention.window_entry(latent, turns, num).unflatten(0, (requests, size))
            kv = torch.cat((state.read_ring(state.draft_window[layer], slots, window), own), dim=1)
            o = attention.attend(q, kv.repeat_interleave(size, dim=0), visible, block.attn.attn_sink, num)
            y = attention.project_out(o, turns, block.attn, config, num)
            stream = boundary.expand(y, stream, post, comb, num)

            pre = next_pre
            next_pre, post, comb = boundary.mixes(stream, block.hc_ffn, config)
            x = rms_norm(boundary.collapse(stream, pre, num), block.ffn_norm, config.rms_norm_eps, num)
            trace(f"draft.{layer}.ffn_in", x)
            stream = boundary.expand(moe.moe(x, block.ffn, config, num), stream, post, comb, num)
            pre = next_pre
        return boundary.collapse(stream, pre, num).unflatten(0, (requests, size))
