"""The Triton kernels behind the interface of `Model` and `Draft`: any number of rows in one forward.

Reads the packed weights and caches of the specialized decode, so that both may serve the same requests. A forward may
be longer than the rings of its state: rows find the entries of their own forward beside the rings, which are written
behind the attention that still reads what was there. Nothing waits for the device; the choice of row counts and cuts
follows from the spans, which the host knows.

Read `flashstep/model.py` first: this is the same order of things, with what stands between two sublayers in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flashstep.draft import Pick, Proposal
from flashstep.formats import Numerics
from flashstep.model import Output, Trace, untraced
from flashstep.packed_state import PackedState, PackedValues
from flashstep.packed_weights import Block, HyperConnection, Weights
from flashstep.stages.attention import portable as attention
from flashstep.stages.attention.cuda import Block as DraftRows
from flashstep.stages.attention.cuda import Chosen, rope_frequencies
from flashstep.stages.attention.portable import Batch, Entries
from flashstep.stages.boundary import portable as boundary
from flashstep.stages.boundary.portable import Collapse, Input, Sublayer, Taps
from flashstep.stages.dense import portable as dense
from flashstep.stages.dense.pack import PackedWeight
from flashstep.stages.dense.portable import Fp8Rows
from flashstep.stages.engram import portable as engram
from flashstep.stages.engram.cuda import Hash
from flashstep.stages.head import portable as head
from flashstep.stages.indexer import portable as indexer
from flashstep.stages.indexer.cuda import Cache, unpack_wk
from flashstep.stages.moe import portable as moe
from flashstep.state import Rows, State

_ENGRAM_ROWS = 1024  # whose keys and values exist at a time: 100 KB a row at the released sizes


class Peers(Protocol):
    """The other ranks; `ranks.collectives.Group` is one."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, the same bits on all of them."""

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' parts side by side in the last dimension, on rank 0 at least."""


# Told the name of each stage in front of its first launch
Mark = Callable[[str], None]


def unmarked(stage: str) -> None:
    """The mark that notes nothing."""


class Alone:
    """The peers of a single rank."""

    def sum(self, partial: Tensor) -> Tensor:
        """`partial` itself."""
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """`part` itself."""
        return part


@dataclass
class Forward:
    """What the layers of one forward share."""

    state: PackedState
    batch: Batch
    plain: Tensor  # turns of the rows
    compressed: Tensor
    longest: int  # context, in tokens
    saved: tuple[Tensor, Tensor] | None  # pages of the rows and places in them, where rings cannot keep them all
    chosen: Tensor | None = field(default=None)  # [rows, index_topk]
    candidates: Tensor | None = field(default=None)


class PortableModel:
    """The backbone of one rank. All ranks of a world make the same calls."""

    def __init__(self, weights: Weights, token_map: Tensor, peers: Peers | None = None) -> None:
        """token_map: [vocab] compressed Engram ids."""
        self.weights, self.config, self.device = weights, weights.config, weights.device
        self.num = Numerics()
        self.peers = Alone() if peers is None else peers
        self.mark: Mark = unmarked
        self.token_map = token_map.to(self.device)
        config = self.config
        self._ids = self.token_map.int()
        self._pad = int(token_map[config.engram_pad_token_id])
        self._plain = rope_frequencies(config, compressed=False, device=self.device)
        self._compressed = rope_frequencies(config, compressed=True, device=self.device)
        carried = [layer.engram for layer in weights.layers if layer.engram is not None]
        whole = any(carrier.whole_table for carrier in carried)
        self._hash = Hash.of(config, weights.rank, weights.world, self.device, whole=whole) if carried else None
        self._wk = {
            number: unpack_wk(layer.compressor.wk)
            for number, layer in enumerate(weights.layers)
            if layer.compressor is not None
        }

    @torch.inference_mode()
    def forward(self, state: State, rows: Rows, trace: Trace = untraced) -> Output:
        """Run `rows`, which may be of several requests, and write the caches. Pages must be reserved.

        `trace` is shown nothing: what the kernels compute on the way is not kept.
        """
        config, layers = self.config, self.weights.layers
        state.check(rows)
        self.mark("start")
        run = self._begin(state, rows)
        self.mark("engram")
        codes = self._engram_rows(run, rows.tokens)
        taps = torch.empty(
            len(rows.tokens),
            len(config.dspark_target_layer_ids) * config.hidden_size,
            dtype=torch.bfloat16,
            device=self.device,
        )
        self.mark("boundary")
        stream = boundary.embed(rows.tokens, self.weights.embedding, config)
        sublayer: Sublayer | None = None  # what the stream still lacks
        for number, layer in enumerate(layers):
            stream, x = self._enter(number, stream, sublayer, codes, taps)
            sublayer = self._attend(number, stream, x, run)
            stream, x = self.cross(stream, sublayer, layer.block.ffn_norm)
            sublayer = self.experts(layer.block, stream, x)
        assert sublayer is not None, "a model has layers"
        _, x = self.cross(stream, sublayer, self.weights.norm)
        return Output(x.values, taps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 of `Output.hidden` [rows, hidden]: [rows, vocab] on rank 0, elsewhere the rank's columns."""
        self.mark("head")
        return self.peers.gather(head.logits(hidden, self.weights.head))

    # -- parts of the forward -------------------------------------------------------------------------------------

    def begin(self, state: State, positions: Tensor, slots: Tensor, longest: int, *, saves: bool) -> Forward:
        """What the layers share; `saves`: window entries go to the pages too, as far as these have room for them."""
        if not isinstance(state, PackedState):
            raise TypeError(f"portable kernels read a PackedState, found {type(state).__name__}")
        return Forward(
            state,
            Batch.of(positions.int(), slots.int()),
            attention.turns(positions, self._plain),
            attention.turns(positions, self._compressed),
            longest,
            state.page_places(positions, slots) if saves and state.keeps_windows else None,
        )

    def _begin(self, state: State, rows: Rows) -> Forward:
        counts = [span.end - span.first for span in rows.spans]
        longest = max((span.start + count for span, count in zip(rows.spans, counts, strict=True)), default=0)
        state.begin_chunk(rows)
        saves = max(counts, default=0) > state.rows_per_request
        return self.begin(state, rows.positions, rows.slots, longest, saves=saves)

    def _engram_rows(self, run: Forward, tokens: Tensor) -> dict[int, Fp8Rows]:
        """The table rows of every layer that carries an Engram; and the history is written."""
        found = {}
        ids = self._ids[tokens]
        for number, layer in enumerate(self.weights.layers):
            if layer.engram is not None:
                assert self._hash is not None
                place = self.config.engram_layer_ids.index(number)
                tables = layer.engram.table, layer.engram.table_scale
                codes, scales, _ = engram.rows(
                    ids, run.batch, run.state.history, self.config, self._hash, place, *tables, self._pad
                )
                found[number] = Fp8Rows(codes, scales)
        if found:
            engram.write_history(ids, run.batch, run.state.history)
        return found

    def _enter(
        self,
        number: int,
        stream: Tensor,
        sublayer: Sublayer | None,
        codes: dict[int, Fp8Rows],
        taps: Tensor,
    ) -> tuple[Tensor, Input]:
        """The stream that enters layer `number`, behind its Engram, and the input of its attention."""
        config, layer = self.config, self.weights.layers[number]
        self.mark("boundary")
        tap = None
        if number in config.dspark_target_layer_ids:
            tap = Taps(taps, config.dspark_target_layer_ids.index(number) * config.hidden_size)
        into = Collapse(None if sublayer is None else sublayer.mixes, layer.block.attn_norm)
        if sublayer is not None and layer.engram is None:
            return boundary.boundary(stream, sublayer, into, config, tap)
        if sublayer is not None:
            stream = boundary.expand(stream, sublayer, config)
        if layer.engram is not None:
            self.mark("engram")
            rows = codes.pop(number)
            for first in range(0, len(stream), _ENGRAM_ROWS):
                part = slice(first, first + _ENGRAM_ROWS)
                projected = self.sum(Fp8Rows(rows.codes[part], rows.scales[part]), layer.engram.wkv)
                some = stream[part]
                engram.inject(some, projected, layer.engram.q_weight, layer.engram.k_weight, some, config)
            self.mark("boundary")
        return stream, boundary.collapse(stream, into, config, tap)

    def cross(self, stream: Tensor, sublayer: Sublayer, norm: Tensor) -> tuple[Tensor, Input]:
        """The stream behind a sublayer, and the input of the next one."""
        self.mark("boundary")
        return boundary.boundary(stream, sublayer, Collapse(sublayer.mixes, norm), self.config)

    def mixes(self, stream: Tensor, weights: HyperConnection) -> Tensor:
        """The coefficients of the sublayer behind `stream`."""
        self.mark("mixes")
        return boundary.mixes(stream, weights.fn, weights.base, weights.scale, self.config)

    def sum(self, x: Fp8Rows, weight: PackedWeight) -> Tensor:
        """The product of a weight whose columns the ranks share, float32."""
        return self.peers.sum(dense.product(x, weight, dtype=torch.float32))

    def _attend(self, number: int, stream: Tensor, x: Input, run: Forward) -> Sublayer:
        """The attention of backbone layer `number`."""
        config, layer, state = self.config, self.weights.layers[number], run.state
        block, source = layer.block, config.kv_source(number)
        turn = run.plain if source is None else run.compressed
        mixes = self.mixes(stream, block.hc_attn)
        codes = Fp8Rows(x.codes, x.scales)
        q_r = self.low_query(codes, block)
        own = self.entries(codes, block, turn)
        if layer.compressor is not None:
            self.mark("compress")
            self._compress(number, x.values, run)
        chosen = None
        if source is not None:
            if layer.index_query is not None:
                self.mark("index")
                self._choose(number, x.values, q_r, run)
            assert run.chosen is not None, "the configuration promises an index source at or below every reader"
            kv = state.kv[source]
            chosen = Chosen(run.chosen, kv.codes, kv.scales, state.page_table, config.compress_ratios[source])
        window = state.window[number]
        q = self.query(q_r, block)
        self.mark("attend")
        o = attention.attend(
            q,
            window.codes,
            window.scales,
            own,
            run.batch,
            turn=turn,
            sink=block.attn_sink,
            window=config.sliding_window,
            chosen=chosen,
        )
        self.store(own, number, window, run)
        return Sublayer(self.project_out(o, block), mixes)

    def low_query(self, x: Fp8Rows, block: Block) -> Fp8Rows:
        """The low-rank query, normed and quantized."""
        self.mark("wq_a, wkv")
        return dense.quantize(dense.product(x, block.wq_a), block.q_norm, self.config.rms_norm_eps)

    def query(self, q_r: Fp8Rows, block: Block) -> Tensor:
        """Queries of the rank [rows, heads, head_dim], not rotated."""
        self.mark("wq_b")
        return dense.product(q_r, block.wq_b).unflatten(1, (-1, self.config.head_dim))

    def entries(self, x: Fp8Rows, block: Block, turn: Tensor) -> Entries:
        """Window entries of the rows."""
        latents = dense.product(x, block.wkv)
        return attention.entries(latents, block.kv_norm, turn, eps=self.config.rms_norm_eps)

    def store(self, own: Entries, layer: int, window: PackedValues, run: Forward) -> None:
        """Put entries into the ring `window`, and into the pages; draft layers follow those of the backbone."""
        attention.write_window(own, run.batch, window.codes, window.scales)
        if run.saved is not None:
            run.state.save_rows(layer, own.codes, own.scales, *run.saved)

    def project_out(self, o: Tensor, block: Block) -> Tensor:
        """From attention's output [rows, heads, head_dim] to the sublayer's: [rows, hidden] float32."""
        self.mark("wo_a")
        groups = len(block.wo_a)
        grouped = o.unflatten(1, (groups, -1)).flatten(2)
        rank = self.config.o_lora_rank
        u = torch.empty(len(o), groups * rank, dtype=torch.bfloat16, device=o.device)
        for group, weight in enumerate(block.wo_a):
            part = u[:, group * rank : (group + 1) * rank]
            dense.product(dense.interleave(grouped[:, group]), weight, out=part)
        self.mark("wo_b")
        return self.sum(dense.quantize(u), block.wo_b)

    def _compress(self, source: int, x: Tensor, run: Forward) -> None:
        """Write the entries and index keys of every group that the rows complete."""
        config, compressor = self.config, self.weights.layers[source].compressor
        assert compressor is not None
        parts = [weight for weight in (compressor.wkv, compressor.wgate) if weight is not None]
        raw = torch.empty(len(x), len(parts) * config.head_dim, device=x.device)
        for weight, part in zip(parts, raw.split(config.head_dim, dim=1), strict=True):
            dense.product(x, weight, out=part)
        indexer.compress(
            config,
            source,
            batch=run.batch,
            raw=raw,
            ring=run.state.raw[source],
            norm=compressor.norm,
            wk=self._wk[source],
            k_norm=compressor.k_norm,
            frequencies=self._compressed,
            cache=self._cache(source, run.state),
        )

    def _choose(self, number: int, x: Tensor, q_r: Fp8Rows, run: Forward) -> None:
        """Choose the entries for this layer and those above it."""
        config, weights, source = self.config, self.weights.layers[number].index_query, self.config.kv_source(number)
        assert weights is not None
        assert source is not None
        run.chosen, run.candidates = indexer.choose(
            config,
            number,
            batch=run.batch,
            query=indexer.queries(
                config,
                dense.product(q_r, weights.wq_b),
                dense.product(x, weights.weights_proj, dtype=torch.float32),
                run.compressed,
            ),
            cache=self._cache(source, run.state),
            longest=run.longest,
            candidates=run.candidates,
        )

    @staticmethod
    def _cache(source: int, state: PackedState) -> Cache:
        kv, keys = state.kv[source], state.index_keys[source]
        return Cache(kv.codes, kv.scales, keys.codes, keys.scales, state.page_table)

    def experts(self, block: Block, stream: Tensor, x: Input) -> Sublayer:
        """The mixture of experts."""
        mixes = self.mixes(stream, block.hc_ffn)
        self.mark("router")
        logits = dense.product(x.values, block.gate, dtype=torch.float32)
        self.mark("experts")
        y = moe.experts(Fp8Rows(x.codes, x.scales), logits, block.bias, block.experts, block.moe_shape)
        return Sublayer(self.peers.sum(y), mixes)


class PortableDraft:
    """The draft layers of one rank."""

    def __init__(self, model: PortableModel) -> None:
        self.model, self.config = model, model.config
        self.weights = model.weights.draft

    @torch.inference_mode()
    def observe(self, state: State, rows: Rows, taps: Tensor) -> None:
        """Write what committed `rows` leave in the draft's windows; `taps` as `Output.taps`."""
        model, config, weights = self.model, self.config, self.weights
        model.mark("observe")
        run = model.begin(state, rows.positions, rows.slots, 0, saves=True)
        width = weights.main_proj.columns
        mine = taps[:, model.weights.rank * width : (model.weights.rank + 1) * width]
        main = model.sum(dense.quantize(mine), weights.main_proj).bfloat16()
        x = dense.quantize(main, weights.main_norm, config.rms_norm_eps)
        for layer, block in enumerate(weights.blocks):
            own = model.entries(x, block, run.plain)
            model.store(own, config.num_hidden_layers + layer, run.state.draft_window[layer], run)

    @torch.inference_mode()
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
        """As `Draft.propose`; `trace` is shown nothing."""
        hidden, x = self._block(state, slots, last, anchors)
        size = self.config.dspark_block_size
        base = self.model.logits(x).unflatten(0, (-1, size))
        hidden = hidden.unflatten(0, (-1, size))
        previous, tokens, logits, confidence = anchors, [], [], []
        for place in range(size if count is None else count):
            found = head.markov(previous, self.weights.heads.embed, self.weights.markov_head)
            logits.append(base[:, place] + self.model.peers.gather(found))
            confidence.append(head.confidence(hidden[:, place], previous, self.weights.heads))
            previous = pick(place, logits[-1])
            tokens.append(previous)
        return Proposal(*(torch.stack(part, dim=1) for part in (tokens, logits, confidence)))

    def _block(self, state: State, slots: Tensor, last: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The collapsed stream [requests * block, hidden] that leaves the draft layers, and the same normed."""
        model, config, size = self.model, self.config, self.config.dspark_block_size
        tokens = torch.full((len(slots), size), config.dspark_noise_token_id, device=model.device)
        tokens[:, 0] = anchors
        positions = (last.unsqueeze(-1) + torch.arange(1, size + 1, device=model.device)).flatten()
        run = model.begin(state, positions, slots.repeat_interleave(size), 0, saves=False)
        ends = last.int().repeat_interleave(size)
        stream = boundary.embed(tokens.flatten(), model.weights.embedding, config)
        sublayer: Sublayer | None = None
        for number, block in enumerate(self.weights.blocks):
            if sublayer is None:
                x = boundary.collapse(stream, Collapse(None, block.attn_norm), config)
            else:
                stream, x = model.cross(stream, sublayer, block.attn_norm)
            mixes = model.mixes(stream, block.hc_attn)
            codes = Fp8Rows(x.codes, x.scales)
            own = model.entries(codes, block, run.plain)
            window = run.state.draft_window[number]
            o = attention.attend(
                model.query(model.low_query(codes, block), block),
                window.codes,
                window.scales,
                own,
                run.batch,
                turn=run.plain,
                sink=block.attn_sink,
                window=config.sliding_window,
                block=DraftRows(ends, own.codes, own.scales, size=size, fresh=0),
            )
            stream, x = model.cross(stream, Sublayer(model.project_out(o, block), mixes), block.ffn_norm)
            sublayer = model.experts(block, stream, x)
        assert sublayer is not None, "a draft has layers"
        _, x = model.cross(stream, sublayer, self.weights.norm)
        return x.collapsed, x.values
