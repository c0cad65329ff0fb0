"""The launches of a step, in order: which kernel runs on which weights and buffers, for a given number of rows.

Owns all buffers between kernels and the order of the chain; the kernels and the shapes of their launches belong to the
stages. A chain is a list of `jit.Launch`; every launch depends on the one before it (programmatic dependent launch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashstep.jit import Launch
from flashstep.packed_state import PackedState
from flashstep.packed_weights import Block, HyperConnection, Weights
from flashstep.stages.attention import cuda as attention
from flashstep.stages.boundary import cuda as boundary
from flashstep.stages.dense import cuda as dense
from flashstep.stages.dense.cuda import Bf16, Fp8, Latent, Peers, Rows, Scores, Segment
from flashstep.stages.dense.pack import PackedWeight
from flashstep.stages.engram import cuda as engram
from flashstep.stages.indexer import cuda as indexer
from flashstep.stages.moe import cuda as moe

MAX_ROWS = 192
# Up to here the mixes ride on spare blocks of another kernel; above, they are work for all multiprocessors.
RIDING_ROWS = 16
# Layers whose early reads are safe: the kernels that wrote the step's inputs are complete once experts have run.
FIRST_EARLY_LAYER = 2


@dataclass(frozen=True)
class RowInputs:
    """The rows of a forward: int32 [rows] each; slot -1 is an inactive row."""

    token: Tensor
    position: Tensor
    slot: Tensor

    @property
    def count(self) -> int:
        """Rows."""
        return self.token.shape[0]


@dataclass(frozen=True)
class BlockInputs:
    """The rows of a draft: `RowInputs` of whole blocks, and each row's last committed position, int32 [rows]."""

    rows: RowInputs
    last: Tensor


class Arena:
    """Buffers by name, each as large as its largest use so far was announced to be; smaller uses share it.

    The largest number of rows must come first: a buffer that has been handed out cannot move.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The buffer `name` as a tensor of `shape`; zero when it is new."""
        nbytes = math.prod(shape) * dtype.itemsize
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=self._device)
        buffer = self._buffers[name]
        if nbytes > buffer.numel():
            raise ValueError(f"buffer {name}: {nbytes:,} bytes wanted, {buffer.numel():,} allocated; take larger first")
        return buffer[:nbytes].view(dtype).view(*shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())


class Plan:
    """Chains of launches over one rank's weights and one state.

    Boundaries read early (`mixes_early`): experts, gate_up and attend start their followers only behind their own
    wait, so what the kernels in front of them wrote is complete when a boundary starts.

    With `world` above 1 and no peers, the rank's partial sums are looped back into every slab of its own mailboxes:
    the traffic of a rank, not its values.
    """

    def __init__(
        self,
        weights: Weights,
        state: PackedState,
        token_map: Tensor,
        *,
        wgmma: bool = True,
        max_rows: int = MAX_ROWS,
    ) -> None:
        """token_map: int32 [vocab], compressed Engram ids. wgmma: the product of SM90 where there is one."""
        self.weights, self.state, self.wgmma, self.max_rows = weights, state, wgmma, max_rows
        self.config, self.device = weights.config, weights.device
        self._token_map = token_map.to(self.device, torch.int32)
        self._arena = Arena(self.device)
        config = self.config
        self._plain = attention.rope_frequencies(config, compressed=False, device=self.device)
        self._compressed = attention.rope_frequencies(config, compressed=True, device=self.device)
        self._index_scratch = (
            indexer.Scratch.allocate(config, max_rows, state.max_model_len, self.device)
            if config.index_source_layer_ids
            else None
        )
        carried = [layer.engram for layer in weights.layers if layer.engram is not None]
        whole = any(carrier.whole_table for carrier in carried)
        self._hash = engram.Hash.of(config, weights.rank, weights.world, self.device, whole=whole) if carried else None
        self._blocks = moe.num_blocks(self.device)
        # So that no buffer has to grow: the largest chains first.
        widest = self.dummy_rows(max_rows)
        blocks = self.dummy_rows(max_rows // config.dspark_block_size * config.dspark_block_size)
        self.forward(widest)
        self.logits(max_rows)
        self.observe(widest)
        self.draft(BlockInputs(blocks, blocks.position))

    # -- buffers --------------------------------------------------------------------------------------------------

    def dummy_rows(self, count: int) -> RowInputs:
        """Inactive rows."""
        rows = torch.full((3, count), -1, dtype=torch.int32, device=self.device)
        return RowInputs(*rows)

    def _take(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self._arena.take(name, shape, dtype)

    def _fp8(self, name: str, rows: int, columns: int) -> Fp8:
        tiles = -(-rows // 8)
        return Fp8(
            self._take(f"{name} codes", tiles, columns // 16, 8, 16, dtype=torch.uint8),
            self._take(f"{name} scales", tiles, columns // 32, 8, dtype=torch.uint8),
        )

    def _bf16(self, name: str, rows: int, columns: int) -> Bf16:
        return Bf16(self._take(name, -(-rows // 8), columns // 8, 8, 8))

    def _mailbox(self, name: str, rows: int, columns: int) -> Tensor:
        return self._take(name, self.weights.world, rows, columns, dtype=torch.float32)

    @staticmethod
    def _peers(mailbox: Tensor) -> Peers:
        return Peers(list(mailbox))

    # -- chains ---------------------------------------------------------------------------------------------------

    def forward(self, rows: RowInputs, *, with_taps: bool = True) -> list[Launch]:
        """The backbone over `rows`, up to the normed hidden rows (`hidden`) and the draft's taps (`taps`)."""
        config, weights, count = self.config, self.weights, rows.count
        stream = self._stream(count)
        launches = self._engram_rows(rows)
        launches += boundary.embed(
            self.device,
            config,
            row_token=rows.token,
            row_slot=rows.slot,
            embedding=weights.embedding,
            stream_out=stream,
            inject=self._inject(0, count),
            taps=self._taps(0, count) if with_taps else None,
            collapsed=self._collapsed(weights.layers[0].block.attn_norm, count, needs_bf16=self._reads_bf16(0)),
        )
        chosen: tuple[Tensor, int] | None = None
        for number, layer in enumerate(weights.layers):
            launches += self._low(number, rows)
            launches += self._queries(number, rows)
            launches += self._compress(number, rows)  # behind them, so that its weight comes while they run
            if layer.index_query is not None:
                chosen = (self._take("chosen", count, config.index_topk, dtype=torch.int32), number)
                launches += self._choose(number, rows, chosen[0])
            launches += self._attend(number, rows, chosen)
            launches += self._project_out(layer.block, count)
            launches += self._between(layer.block, stream, rows, count)
            launches += self._experts(layer.block, stream, rows, count)
            last = number == len(weights.layers) - 1
            following = weights.norm if last else weights.layers[number + 1].block.attn_norm
            collapsed = self._collapsed(following, count, needs_bf16=not last and self._reads_bf16(number + 1))
            if last:
                collapsed = boundary.Collapsed(following, bf16=self.hidden(count).values)
            launches += boundary.boundary(
                self.device,
                config,
                mailbox=self._mailbox("ffn mailbox", count, config.hidden_size),
                mixing=self._mixing(layer.block.hc_ffn, "ffn", count),
                mixes_early=True,
                stream_in=stream,
                stream_out=None if last else stream,
                row_slot=rows.slot,
                inject=None if last else self._inject(number + 1, count),
                taps=None if last or not with_taps else self._taps(number + 1, count),
                collapsed=collapsed,
            )
        return launches

    def hidden(self, rows: int) -> Bf16:
        """Where `forward` leaves the normed hidden rows: bf16 fragments."""
        return self._bf16("hidden", rows, self.config.hidden_size)

    def taps(self, rows: int) -> Tensor:
        """Where `forward` leaves the draft's taps: bf16 [rows, taps * hidden]."""
        return self._take("taps", rows, self.config.hidden_size * len(self.config.dspark_target_layer_ids))

    def logits(self, rows: int) -> list[Launch]:
        """The rank's logits (`logit_rows`) of the hidden rows."""
        out = Rows(self.logit_rows(rows))
        return dense.stream_product(self.device, self.weights.head, self.hidden(rows), out, rows, stage="head")

    def logit_rows(self, rows: int) -> Tensor:
        """Where `logits` leaves its results: float32 [rows, vocab of the rank]."""
        return self._take("logits", rows, self.weights.vocab, dtype=torch.float32)

    def observe(self, rows: RowInputs) -> list[Launch]:
        """What `rows` leave in the draft's windows, from their quantized taps (`tap_fragments`)."""
        config, draft, count = self.config, self.weights.draft, rows.count
        mailbox = self._mailbox("main mailbox", count, config.hidden_size)
        launches = dense.stream_product(
            self.device, draft.main_proj, self.tap_fragments(count), self._peers(mailbox), count, stage="main"
        )
        main = self._fp8("main", count, config.hidden_size)
        launches += boundary.main(
            self.device,
            config,
            mailbox=mailbox,
            row_slot=rows.slot,
            collapsed=boundary.Collapsed(draft.main_norm, codes=main.codes, scales=main.scales),
        )
        layers, dim = len(draft.blocks), config.head_dim
        latents = self._take("draft latents", count, layers * dim)
        launches += dense.product(
            self.device,
            [Segment(block.wkv, main, Rows(latents, i * dim)) for i, block in enumerate(draft.blocks)],
            count,
            stage="main",
        )
        windows = [self.state.draft_window[i] for i in range(layers)]
        launches += attention.write_window(
            latents,
            [i * dim for i in range(layers)],
            [block.kv_norm for block in draft.blocks],
            [window.codes for window in windows],
            [window.scales for window in windows],
            frequencies=self._plain,
            row_position=rows.position,
            row_slot=rows.slot,
            eps=config.rms_norm_eps,
        )
        return launches

    def tap_fragments(self, rows: int) -> Fp8:
        """Where `forward` leaves the rank's columns of the taps, quantized."""
        return self._fp8("taps", rows, self.weights.draft.main_proj.columns)

    def draft(self, block: BlockInputs) -> list[Launch]:
        """The draft layers over whole blocks, up to `draft_hidden` and its base logits (`logit_rows`)."""
        config, draft, rows = self.config, self.weights.draft, block.rows
        count = rows.count
        stream = self._stream(count)
        launches = boundary.embed(
            self.device,
            config,
            row_token=rows.token,
            row_slot=rows.slot,
            embedding=self.weights.embedding,
            stream_out=stream,
            collapsed=self._collapsed(draft.blocks[0].attn_norm, count, needs_bf16=False),
        )
        dim = config.head_dim
        own = (
            self._take("own codes", count, dim, dtype=torch.uint8),
            self._take("own scales", count, dim // 32, dtype=torch.uint8),
        )
        for number, layer in enumerate(draft.blocks):
            last = number == len(draft.blocks) - 1
            launches += self._product_low(layer, rows, stream, [])
            window = self.state.draft_window[number]
            launches += self._product_q(layer, rows, [], *own, ring=0, compressed=False)
            launches += attention.attend(
                self._take("q", count, self.weights.heads * dim),
                window.codes,
                window.scales,
                self._take("o", self.weights.groups, -(-count // 8), self._group_columns // 8, 8, 8),
                row_position=rows.position,
                row_slot=rows.slot,
                frequencies=self._plain,
                sink=layer.attn_sink,
                window=config.sliding_window,
                block=attention.Block(
                    block.last, *own, size=config.dspark_block_size, fresh=config.dspark_block_size + 1
                ),
                early=attention.Early.STATE if number else attention.Early.NOTHING,
            )
            launches += self._project_out(layer, count)
            launches += self._between(layer, stream, rows, count)
            launches += self._experts(layer, stream, rows, count)
            if last:
                collapsed = boundary.Collapsed(
                    draft.norm, bf16=self.hidden(count).values, hidden=self.draft_hidden(count)
                )
            else:
                collapsed = self._collapsed(draft.blocks[number + 1].attn_norm, count, needs_bf16=False)
            launches += boundary.boundary(
                self.device,
                config,
                mailbox=self._mailbox("ffn mailbox", count, config.hidden_size),
                mixing=self._mixing(layer.hc_ffn, "ffn", count),
                mixes_early=True,
                stream_in=stream,
                stream_out=None if last else stream,
                row_slot=rows.slot,
                collapsed=collapsed,
            )
        launches += self.logits(count)
        for launch in launches:
            launch.stage = f"draft {launch.stage}"
        return launches

    def draft_hidden(self, rows: int) -> Tensor:
        """Where `draft` leaves the collapsed stream before the final norm: bf16 [rows, hidden]."""
        return self._take("draft hidden", rows, self.config.hidden_size)

    # -- parts of a layer -----------------------------------------------------------------------------------------

    def _stream(self, rows: int) -> Tensor:
        return self._take("stream", rows, self.config.hc_mult, self.config.hidden_size)

    def _collapsed(self, norm: Tensor, rows: int, *, needs_bf16: bool) -> boundary.Collapsed:
        x = self._fp8("x", rows, self.config.hidden_size)
        bf16 = self._bf16("x bf16", rows, self.config.hidden_size).values if needs_bf16 else None
        return boundary.Collapsed(norm, codes=x.codes, scales=x.scales, bf16=bf16)

    def _reads_bf16(self, number: int) -> bool:
        """Whether a layer's attention has bf16 weights at its input."""
        layer = self.weights.layers[number]
        return layer.compressor is not None or layer.index_query is not None

    def _partials(self, sublayer: str, rows: int) -> Tensor:
        return self._take(
            f"{sublayer} mixes", rows, boundary.mix_slices(self.config), boundary.MIX_RECORD, dtype=torch.float32
        )

    def _mixing(self, weights: HyperConnection, sublayer: str, rows: int) -> boundary.Mixing:
        return boundary.Mixing(self._partials(sublayer, rows), weights.base, weights.scale)

    def _mixes(
        self, weights: HyperConnection, sublayer: str, stream: Tensor
    ) -> tuple[list[Launch], dense.Mixes | None]:
        """The mixes of a sublayer: launches of their own, or what rides on another kernel."""
        partials = self._partials(sublayer, stream.shape[0])
        if stream.shape[0] > RIDING_ROWS:
            return boundary.mixes(self.device, self.config, stream=stream, fn=weights.fn, partials=partials), None
        return [], dense.Mixes(stream, weights.fn, partials, boundary.mix_slices(self.config))

    def _engram_rows(self, rows: RowInputs) -> list[Launch]:
        config, layers = self.config, self.weights.layers
        if self._hash is None:
            return []
        carried = [(number, layers[number].engram) for number in config.engram_layer_ids if number < len(layers)]
        found = [(number, carrier) for number, carrier in carried if carrier is not None]
        fragments = [self._fp8(f"engram {number}", rows.count, carrier.wkv.columns) for number, carrier in found]
        launches = engram.engram_rows(
            self.device,
            config,
            row_token=rows.token,
            row_position=rows.position,
            row_slot=rows.slot,
            token_map=self._token_map,
            history=self.state.history,
            hash=self._hash,
            tables=[carrier.table for _, carrier in found],
            table_scales=[carrier.table_scale for _, carrier in found],
            codes=[x.codes for x in fragments],
            scales=[x.scales for x in fragments],
        )
        for (number, carrier), x in zip(found, fragments, strict=True):
            mailbox = self._mailbox(f"engram mailbox {number}", rows.count, carrier.wkv.outputs)
            launches += dense.stream_product(
                self.device, carrier.wkv, x, self._peers(mailbox), rows.count, stage="engram"
            )
        return launches

    def _inject(self, number: int, rows: int) -> boundary.Inject | None:
        carrier = self.weights.layers[number].engram
        if carrier is None:
            return None
        mailbox = self._mailbox(f"engram mailbox {number}", rows, carrier.wkv.outputs)
        return boundary.Inject(mailbox, carrier.q_weight, carrier.k_weight)

    def _taps(self, number: int, rows: int) -> boundary.Taps | None:
        config, weights = self.config, self.weights
        if number not in config.dspark_target_layer_ids:
            return None
        width = weights.draft.main_proj.columns
        begin = weights.rank * width
        fragments = self.tap_fragments(rows)
        return boundary.Taps(
            self.taps(rows),
            config.dspark_target_layer_ids.index(number) * config.hidden_size,
            fragments.codes,
            fragments.scales,
            begin,
            begin + width,
        )

    def _low_squares(self, rows: int) -> Tensor:
        """Of the query latents in `_low_rows`: sums of squares of every 32, for their norm."""
        return self._take("low squares", rows, -(-self.config.q_lora_rank // 128) * 4, dtype=torch.float32)

    def _low_rows(self, rows: int) -> Tensor:
        return self._take("low", rows, self.config.q_lora_rank + self.config.head_dim)

    def _raw(self, rows: int) -> Tensor:
        """Float32 products of source layers: k, z and the index heads' weights."""
        width = 2 * self.config.head_dim + self.config.index_n_heads
        return self._take("raw", rows, -(-width // 4) * 4, dtype=torch.float32)

    def _low(self, number: int, rows: RowInputs) -> list[Launch]:
        layer, dim = self.weights.layers[number], self.config.head_dim
        further: list[Segment] = []
        x, raw = self._bf16("x bf16", rows.count, self.config.hidden_size), self._raw(rows.count)
        if layer.compressor is not None:
            further.append(Segment(layer.compressor.wkv, x, Rows(raw, 0)))
            if layer.compressor.wgate is not None:
                further.append(Segment(layer.compressor.wgate, x, Rows(raw, dim)))
        if layer.index_query is not None:
            further.append(Segment(layer.index_query.weights_proj, x, Rows(raw, 2 * dim)))
        return self._product_low(layer.block, rows, self._stream(rows.count), further)

    def _product_low(self, block: Block, rows: RowInputs, stream: Tensor, further: list[Segment]) -> list[Launch]:
        config, count = self.config, rows.count
        x, low = self._fp8("x", count, config.hidden_size), self._low_rows(count)
        segments = [
            Segment(block.wq_a, x, Rows(low, 0, self._low_squares(count))),
            Segment(block.wkv, x, Rows(low, config.q_lora_rank)),
            *further,
        ]
        launches, riding = self._mixes(block.hc_attn, "attn", stream)
        return launches + dense.product(self.device, segments, count, stage="low", extra=riding)

    def _compress(self, number: int, rows: RowInputs) -> list[Launch]:
        compressor = self.weights.layers[number].compressor
        if compressor is None:
            return []
        return indexer.compress(
            self.config,
            number,
            row_position=rows.position,
            row_slot=rows.slot,
            raw=indexer.Product(self._raw(rows.count)),
            ring=self.state.raw[number],
            norm=compressor.norm,
            wk=compressor.wk,
            k_norm=compressor.k_norm,
            frequencies=self._compressed,
            cache=self._cache(number),
            early=number >= FIRST_EARLY_LAYER,
        )

    def _cache(self, source: int) -> indexer.Cache:
        kv, keys = self.state.kv[source], self.state.index_keys[source]
        return indexer.Cache(kv.codes, kv.scales, keys.codes, keys.scales, self.state.page_table)

    def _queries(self, number: int, rows: RowInputs) -> list[Launch]:
        layer, config = self.weights.layers[number], self.config
        further = []
        if layer.index_query is not None:
            further.append((layer.index_query.wq_b, self._index_queries(rows.count)))
        window = self.state.window[number]
        return self._product_q(
            layer.block,
            rows,
            further,
            window.codes,
            window.scales,
            ring=self.state.ring,
            compressed=config.kv_source(number) is not None,
        )

    def _index_queries(self, rows: int) -> Tensor:
        return self._take("index queries", rows, self.config.index_n_heads * self.config.index_head_dim)

    def _product_q(
        self,
        block: Block,
        rows: RowInputs,
        further: Sequence[tuple[PackedWeight, Tensor]],
        codes: Tensor,
        scales: Tensor,
        *,
        ring: int,
        compressed: bool,
    ) -> list[Launch]:
        config, count = self.config, rows.count
        low = self._low_rows(count)
        scratch = self._fp8("q_r", count, config.q_lora_rank)
        x = Latent(low, block.q_norm, config.rms_norm_eps, self._low_squares(count), scratch)
        q = self._take("q", count, self.weights.heads * config.head_dim)
        segments = [Segment(block.wq_b, x, Rows(q))]
        segments += [Segment(weight, x, Rows(out)) for weight, out in further]
        extra = dense.Window(
            low,
            config.q_lora_rank,
            block.kv_norm,
            config.rms_norm_eps,
            self._compressed if compressed else self._plain,
            rows.position,
            rows.slot,
            codes,
            scales,
            ring,
        )
        return dense.product(self.device, segments, count, stage="wq_b", extra=extra)

    def _choose(self, number: int, rows: RowInputs, chosen: Tensor) -> list[Launch]:
        config, scratch = self.config, self._index_scratch
        source = config.kv_source(number)
        assert source is not None
        assert scratch is not None
        return indexer.choose(
            config,
            number,
            row_position=rows.position,
            row_slot=rows.slot,
            query=indexer.Product(self._index_queries(rows.count)),
            weights=indexer.Product(self._raw(rows.count), 2 * config.head_dim),
            frequencies=self._compressed,
            cache=self._cache(source),
            scratch=scratch,
            chosen=chosen,
            candidates=self._take("candidates", rows.count, config.candidate_topk_blocks, dtype=torch.int32),
            early=number >= FIRST_EARLY_LAYER,
        )

    @property
    def _group_columns(self) -> int:
        return self.weights.heads * self.config.head_dim // self.weights.groups

    def _attend(self, number: int, rows: RowInputs, chosen: tuple[Tensor, int] | None) -> list[Launch]:
        config, layer, count = self.config, self.weights.layers[number], rows.count
        source, window = config.kv_source(number), self.state.window[number]
        early = attention.Early.STATE if number >= FIRST_EARLY_LAYER else attention.Early.NOTHING
        entries = None
        if source is not None:
            assert chosen is not None
            kv = self.state.kv[source]
            entries = attention.Chosen(
                chosen[0], kv.codes, kv.scales, self.state.page_table, config.compress_ratios[source]
            )
            if number >= FIRST_EARLY_LAYER and chosen[1] < number:
                early = attention.Early.CHOICE
        return attention.attend(
            self._take("q", count, self.weights.heads * config.head_dim),
            window.codes,
            window.scales,
            self._take("o", self.weights.groups, -(-count // 8), self._group_columns // 8, 8, 8),
            row_position=rows.position,
            row_slot=rows.slot,
            frequencies=self._plain if source is None else self._compressed,
            sink=layer.block.attn_sink,
            window=config.sliding_window,
            chosen=entries,
            early=early,
        )

    def _project_out(self, block: Block, rows: int) -> list[Launch]:
        config, groups = self.config, self.weights.groups
        o = self._take("o", groups, -(-rows // 8), self._group_columns // 8, 8, 8)
        u = self._fp8("u", rows, groups * config.o_lora_rank)
        launches = []
        segments = [
            Segment(block.wo_a[g], Bf16(o[g]), replace(u, column=g * config.o_lora_rank)) for g in range(groups)
        ]
        for first in range(0, groups, dense.MAX_SEGMENTS - 1):
            part = segments[first : first + dense.MAX_SEGMENTS - 1]
            launches += dense.product(self.device, part, rows, stage="wo_a")
        mailbox = self._mailbox("attn mailbox", rows, config.hidden_size)
        launches += dense.product(self.device, [Segment(block.wo_b, u, self._peers(mailbox))], rows, stage="wo_b")
        return launches

    def _between(self, block: Block, stream: Tensor, rows: RowInputs, count: int) -> list[Launch]:
        """The boundary between a layer's two sublayers."""
        return boundary.boundary(
            self.device,
            self.config,
            mailbox=self._mailbox("attn mailbox", count, self.config.hidden_size),
            mixing=self._mixing(block.hc_attn, "attn", count),
            mixes_early=True,
            stream_in=stream,
            stream_out=stream,
            row_slot=rows.slot,
            collapsed=self._collapsed(block.ffn_norm, count, needs_bf16=True),
        )

    def _experts(self, block: Block, stream: Tensor, rows: RowInputs, count: int) -> list[Launch]:
        config, shape = self.config, block.moe_shape
        scores = self._take(f"{shape.experts} scores", count, shape.experts, dtype=torch.float32)
        launches, riding = self._mixes(block.hc_ffn, "ffn", stream)
        x = self._bf16("x bf16", count, config.hidden_size)
        launches += dense.product(
            self.device, [Segment(block.gate, x, Scores(scores))], count, stage="router", extra=riding
        )
        sizes = moe.scratch_sizes(shape, count, self._blocks)
        # Draft experts are fewer, but their scratch has a layout of its own: it does not share the backbone's.
        # Few rows leave zeros in some of theirs, and find zeros: many rows' use of the same buffer would not.
        kind = f"{shape.experts} experts"
        few = {name: "of few " if name in moe.ZEROS and count <= moe.TILE_ROWS else "" for name in sizes}
        scratch = {
            name: self._take(f"{kind} {few[name]}{name}", *size, dtype=dtype) for name, (size, dtype) in sizes.items()
        }
        xq = self._fp8("x", count, config.hidden_size)
        launches += moe.experts(
            self.device,
            shape,
            count,
            weights=block.experts,
            bias=block.bias,
            scores=scores,
            row_slot=rows.slot,
            x_codes=xq.codes,
            x_scales=xq.scales,
            scratch=scratch,
            out=list(self._mailbox("ffn mailbox", count, config.hidden_size)),
            wgmma=self.wgmma,
        )
        return launches
