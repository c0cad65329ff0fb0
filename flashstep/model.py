"""DeepSeek-V4.1 in exact PyTorch: the composition of the stages' references. Read it from top to bottom.

The residual stream is `hc` copies of the hidden state. Every layer is attention, then a mixture of experts; each
collapses the copies into one vector, works on it, and expands its output back into the copies. Two layers first add
an Engram. Compressed KV is made by a few source layers and read by the layers above them. See `docs/model.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.formats import Numerics
from flashstep.ops import Gather, Linear, Reader, Rope, rms_norm
from flashstep.stages.attention import reference as attention
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.engram import reference as engram
from flashstep.stages.head import reference as head
from flashstep.stages.indexer import reference as indexer
from flashstep.stages.moe import reference as moe
from flashstep.state import Rows, State

# (name, value): what a forward computes on the way, for those who compare it: `layer.3.attn_in` and the like
Trace = Callable[[str, Tensor], None]


def untraced(name: str, value: Tensor) -> None:
    """The trace that keeps nothing."""


@dataclass
class Block:
    """What backbone layers and draft layers have in common."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: boundary.Weights
    hc_ffn: boundary.Weights
    attn: attention.Weights
    ffn: moe.Weights

    @classmethod
    def read(
        cls, reader: Reader, prefix: str, experts: int, experts_per_token: int, *, keep_decoded: bool = True
    ) -> Block:
        """Read the tensors below `prefix`."""
        return cls(
            reader.tensor(prefix + "attn_norm.weight"),
            reader.tensor(prefix + "ffn_norm.weight"),
            boundary.Weights.read(reader, prefix + "hc_attn_"),
            boundary.Weights.read(reader, prefix + "hc_ffn_"),
            attention.Weights.read(reader, prefix + "attn.", keep_decoded=keep_decoded),
            moe.Weights.read(reader, prefix + "ffn.", experts, experts_per_token, keep_decoded=keep_decoded),
        )


@dataclass
class Layer:
    """One backbone layer; what it does not have is None."""

    block: Block
    compressor: indexer.Compressor | None
    index_key: indexer.IndexKey | None
    index_query: indexer.IndexQuery | None
    engram: engram.Weights | None
    engram_gather: Gather | None

    @classmethod
    def read(cls, reader: Reader, layer: int, config: ModelConfig, *, keep_decoded: bool = True) -> Layer:
        """Read backbone layer `layer`; its Engram table stays where `reader.engram_gather` keeps it."""
        prefix = f"layers.{layer}."
        kv_source = layer in config.kv_source_layer_ids
        index_source = layer in config.index_source_layer_ids
        has_engram = layer in config.engram_layer_ids
        return cls(
            Block.read(reader, prefix, config.n_routed_experts, config.num_experts_per_tok, keep_decoded=keep_decoded),
            indexer.Compressor.read(reader, prefix + "attn.compressor.") if kv_source else None,
            indexer.IndexKey.read(reader, prefix + "attn.indexer.") if kv_source else None,
            indexer.IndexQuery.read(reader, prefix + "attn.indexer.") if index_source else None,
            engram.Weights.read(reader, prefix + "engram.", keep_decoded=keep_decoded) if has_engram else None,
            reader.engram_gather(layer) if has_engram else None,
        )


@dataclass
class Turns:
    """Rotations of the rows of one forward: for window-only layers, and for the layers that read entries."""

    plain: Tensor
    compressed: Tensor


@dataclass
class Choice:
    """What an index source leaves to the layers above it."""

    entries: Tensor  # [rows, index_topk] int64, -1 pads
    candidates: list[Tensor] | None = None  # per request: [rows, entries] bool, from the candidate source


@dataclass
class Output:
    """Result of a forward."""

    hidden: Tensor  # [rows, hidden]: after the final norm
    taps: Tensor  # [rows, taps * hidden]: mean over the copies of the stream entering the draft's target layers


class Model:
    """The 40-layer backbone with embedding and head.

    `token_map` [vocab] int64 sends token ids to the Engram's compressed vocabulary. `forward` changes `state` and
    nothing else.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: Reader,
        token_map: Tensor,
        num: Numerics | None = None,
        *,
        keep_decoded: bool = True,
    ) -> None:
        self.config = config
        self.num = num or Numerics()
        self.embed = reader.tensor("embed.weight")
        self.norm = reader.tensor("norm.weight")
        self.head = Linear.read(reader, "head")
        self.layers = [
            Layer.read(reader, layer, config, keep_decoded=keep_decoded) for layer in range(config.num_hidden_layers)
        ]
        self.device = self.embed.device
        self.token_map = token_map.to(self.device)
        self.rope = Rope(config, compressed=False, device=self.device)
        self.rope_compressed = Rope(config, compressed=True, device=self.device)

    def forward(self, state: State, rows: Rows, trace: Trace = untraced) -> Output:
        """Run `rows` at their positions, whose predecessors `state` holds, and write their caches.

        A row sees earlier rows of its own request in the same forward. Pages must be reserved (`State.reserve`).
        `trace` is shown the Engram rows, each sublayer's input and output, the streams and the choices.
        """
        config, num = self.config, self.num
        state.check(rows)
        turns = Turns(self.rope.at(rows.positions), self.rope_compressed.at(rows.positions))
        engram_rows = engram.row_ids(self._history(state, rows), config) if config.engram_layer_ids else None
        if engram_rows is not None:
            trace("engram_hash", engram_rows)
        stream = copies(self.embed[rows.tokens].to(num.dtype), config)
        pre = boundary.first_pre(len(rows.tokens), config, self.device)
        choice: Choice | None = None
        taps = []
        for number, layer in enumerate(self.layers):
            name = f"layer.{number}."
            trace(name + "stream_in", stream)
            if layer.engram is not None and layer.engram_gather is not None and engram_rows is not None:
                table_rows = layer.engram_gather(engram_rows[:, config.engram_layer_ids.index(number)])
                stream = engram.inject(stream, table_rows.to(num.dtype), layer.engram, config, num)
                trace(name + "stream_engram", stream)
            if number in config.dspark_target_layer_ids:
                taps.append(stream.double().mean(1).to(num.dtype))

            block = layer.block
            next_pre, post, comb = boundary.mixes(stream, block.hc_attn, config)
            x = boundary.collapse(stream, pre, num)
            x = rms_norm(x, block.attn_norm, config.rms_norm_eps, num)
            y, choice = self._attention(number, x, turns, choice, state, rows)
            stream = boundary.expand(y, stream, post, comb, num)
            trace(name + "attn_in", x)
            trace(name + "attn_out", y)
            trace(name + "stream_mid", stream)
            if layer.index_query is not None and choice is not None:
                trace(name + "index_sel", choice.entries)
            if number == config.candidate_source_layer_id and choice is not None and choice.candidates is not None:
                for candidates in choice.candidates:  # one call per request
                    trace(name + "candidates", candidates)

            pre = next_pre
            next_pre, post, comb = boundary.mixes(stream, block.hc_ffn, config)
            x = rms_norm(boundary.collapse(stream, pre, num), block.ffn_norm, config.rms_norm_eps, num)
            y = moe.moe(x, block.ffn, config, num)
            stream = boundary.expand(y, stream, post, comb, num)
            trace(name + "ffn_in", x)
            trace(name + "ffn_out", y)
            trace(name + "stream_out", stream)
            pre = next_pre
        hidden = rms_norm(boundary.collapse(stream, pre, num), self.norm, config.rms_norm_eps, num)
        return Output(hidden, torch.cat(taps, dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] float32 of `Output.hidden` [rows, hidden]."""
        return head.logits(hidden, self.head)

    # -- parts of the forward -------------------------------------------------------------------------------------

    def _history(self, state: State, rows: Rows) -> Tensor:
        """Compressed ids [rows, max_ngram_size] of each row's token and those before it; see `engram.row_ids`."""
        state.write_ring(state.history, rows, self.token_map[rows.tokens].int())
        back = torch.arange(self.config.engram_max_ngram_size, device=self.device)
        positions = rows.positions.unsqueeze(-1) - back
        pad = self.token_map[self.config.engram_pad_token_id]
        return torch.where(positions >= 0, state.read_ring(state.history, rows.slots, positions).long(), pad)

    def _attention(
        self, number: int, x: Tensor, turns: Turns, choice: Choice | None, state: State, rows: Rows
    ) -> tuple[Tensor, Choice | None]:
        config, num, layer = self.config, self.num, self.layers[number]
        source = config.kv_source(number)
        turn = turns.plain if source is None else turns.compressed
        w = layer.block.attn
        q_r, latent = attention.project_low(x, w, config, num)
        q = attention.project_q(q_r, turn, w, config, num)
        window = state.window[number]
        state.write_ring(window, rows, attention.window_entry(latent, turn, num))
        positions = state.window_positions(rows.positions)
        kv, visible = state.read_ring(window, rows.slots, positions), positions >= 0
        if source is not None:
            if layer.compressor is not None:
                self._compress(number, x, state, rows)
            if layer.index_query is not None:
                choice = self._choose(number, x, q_r, turn, choice, state, rows)
            assert choice is not None, "the configuration promises an index source at or below every reader"
            kv = torch.cat((kv, state.read_entries(source, rows.slots, choice.entries)), dim=1)
            visible = torch.cat((visible, choice.entries >= 0), dim=1)
        o = attention.attend(q, kv, visible, w.attn_sink, num)
        return attention.project_out(o, turn, w, config, num), choice

    def _compress(self, source: int, x: Tensor, state: State, rows: Rows) -> None:
        """Write the entries and index keys of every group that `rows` complete.

        What each token gives is kept raw and by position first, so that a group may open in one forward, be rolled
        back and close in another.
        """
        config, num, layer = self.config, self.num, self.layers[source]
        assert layer.compressor is not None
        assert layer.index_key is not None
        ratio = config.compress_ratios[source]
        state.write_ring(state.raw[source], rows, indexer.project_raw(x, layer.compressor, num))
        closing = (rows.positions + 1) % ratio == 0
        slots, entries = rows.slots[closing], rows.positions[closing] // ratio
        group = entries.unsqueeze(-1) * ratio + torch.arange(ratio, device=self.device)
        raw = state.read_ring(state.raw[source], slots, group)
        latent = indexer.pool(raw, layer.compressor, config, num)
        turn = self.rope_compressed.at(entries * ratio)
        keys = indexer.index_key(latent, turn, layer.index_key, config, num)
        state.write_entries(source, slots, entries, indexer.kv_entry(latent, turn, num), keys)

    def _choose(
        self, number: int, x: Tensor, q_r: Tensor, turn: Tensor, before: Choice | None, state: State, rows: Rows
    ) -> Choice:
        """Score the visible entries of the layer's KV source, request by request, and keep the best."""
        config, layer = self.config, self.layers[number]
        assert layer.index_query is not None
        source = config.kv_source(number)
        assert source is not None
        query, weights = indexer.index_query(x, q_r, turn, layer.index_query, config, self.num)
        visible = (rows.positions + 1) // config.compress_ratios[source]
        chosen, candidates = [], []
        for i, span in enumerate(rows.spans):
            part = slice(span.first, span.end)
            count = (span.start + span.end - span.first) // config.compress_ratios[source]
            scores = indexer.score(query[part], weights[part], state.read_index_keys(source, span.slot, count))
            hidden = torch.arange(count, device=self.device) >= visible[part, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            if number == config.candidate_source_layer_id:
                candidates.append(indexer.candidates(scores, visible[part], config))
            elif config.uses_candidates(number):
                assert before is not None
                assert before.candidates is not None
                scores = scores.masked_fill(~before.candidates[i], float("-inf"))
            chosen.append(indexer.choose(scores, config.index_topk))
        if number == config.candidate_source_layer_id:
            kept: list[Tensor] | None = candidates
        else:
            kept = before.candidates if before is not None else None
        return Choice(torch.cat(chosen), kept)


def copies(embedded: Tensor, config: ModelConfig) -> Tensor:
    """The residual stream [rows, hc, hidden] that starts from `embedded` [rows, hidden]."""
    return embedded.unsqueeze(1).expand(-1, config.hc_mult, -1)
