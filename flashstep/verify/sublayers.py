"""The layers file: every sublayer of one prompt and of a few draft steps, each from its recorded operands.

So an error shows in the sublayer that makes it, and nothing accumulates. Attention takes the recorded choices of the
same prompt's file, since bf16 index scores tie.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.draft import Draft
from flashstep.formats import Numerics
from flashstep.model import Block, Model, copies
from flashstep.stages.attention.reference import Weights as AttentionWeights
from flashstep.verify.backends import Backend
from flashstep.verify.files import MissingTensor, Vectors
from flashstep.verify.tolerances import (
    ATTENTION,
    BF16,
    CACHE,
    DRAFT_LOGITS,
    ENGRAM_GATE,
    EXACT,
    F32,
    FFN,
    GATE,
    INDEX_SCORES,
    TWO_ROUNDINGS,
)

NUM = Numerics()


@dataclass
class Layers:
    """The file, the implementation, and the prompt's file (None where no file has the same prompt)."""

    vectors: Vectors
    prompt: Vectors | None
    backend: Backend
    model: Model
    draft: Draft

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.tokens = self.vectors["prompt"].long()
        self.positions = torch.arange(len(self.tokens))

    # -- the backbone -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare everything that the file holds."""
        v, config = self.vectors, self.config
        first = copies(self.model.embed[self.tokens], config)
        v.check("layer.0.stream_in", lambda: first, EXACT)
        for number, layer in enumerate(self.model.layers):
            name = f"layer.{number}."
            before = "layer.0.stream_in" if number == 0 else f"layer.{number - 1}.stream_out"
            if layer.engram is not None:
                v.check(name + "stream_engram", lambda n=number, b=before: self._engram(n, v[b])[0], BF16)
                v.check(name + "engram_gate", lambda n=number, b=before: self._engram(n, v[b])[1], ENGRAM_GATE)
                before = name + "stream_engram"
            with v.needed_for(name + "attn_in"):
                self._sublayers(number, layer.block, before)
            self._caches(number)
        last = f"layer.{config.num_hidden_layers - 1}."
        v.check("final_hidden", lambda: self._final(v[last + "stream_out"], v[last + "hc_ffn_pre"]), TWO_ROUNDINGS)
        v.check("main_hidden", self._taps, BF16)
        self._drafts()

    def _sublayers(self, number: int, block: Block, before: str) -> None:
        v, boundary, config = self.vectors, self.backend.boundary, self.config
        name = f"layer.{number}."
        if number == 0:
            pre = boundary.first_pre(len(self.tokens), config, self.tokens.device)
        else:
            pre = v[f"layer.{number - 1}.hc_ffn_pre"]
        for kind, stream, out in (("attn", before, "stream_mid"), ("ffn", name + "stream_mid", "stream_out")):
            hc, norm = (block.hc_attn, block.attn_norm) if kind == "attn" else (block.hc_ffn, block.ffn_norm)
            for part, got in zip(("pre", "post", "comb"), boundary.mixes(v[stream], hc, config), strict=True):
                v.check(f"{name}hc_{kind}_{part}", lambda got=got: got, F32)
            v.check(f"{name}{kind}_in", lambda s=stream, p=pre, n=norm: self._collapsed(v[s], p, n), TWO_ROUNDINGS)
            if kind == "attn":
                v.check(name + "attn_out", lambda: self._attention(number, block.attn), ATTENTION)
                self._index_scores(number)
            else:
                v.check(name + "ffn_out", lambda: self.backend.moe.moe(v[name + "ffn_in"], block.ffn, config, NUM), FFN)
                self._router(number, block)
            v.check(
                name + out,
                lambda k=kind, s=stream: boundary.expand(
                    v[f"{name}{k}_out"],
                    v[s],
                    v[f"{name}hc_{k}_post"].double(),
                    v[f"{name}hc_{k}_comb"].double(),
                    NUM,
                ),
                BF16,
            )
            pre = v[f"{name}hc_{kind}_pre"]

    def _collapsed(self, stream: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
        x = self.backend.boundary.collapse(stream, pre.double(), NUM)
        return self.backend.ops.rms_norm(x, norm, self.config.rms_norm_eps, NUM)

    def _final(self, stream: Tensor, pre: Tensor) -> Tensor:
        return self._collapsed(stream, pre, self.model.norm)

    def _taps(self) -> Tensor:
        taps = []
        for number in self.config.dspark_target_layer_ids:
            engram = f"layer.{number}.stream_engram"
            before = f"layer.{number - 1}.stream_out" if number else "layer.0.stream_in"
            stream = self.vectors[engram] if number in self.config.engram_layer_ids else self.vectors[before]
            taps.append(stream.double().mean(1).bfloat16())
        return torch.cat(taps, dim=-1)

    def _engram(self, number: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The stream behind the Engram of layer `number`, and the gate [rows, hc] of each copy."""
        layer, engram, config = self.model.layers[number], self.backend.engram, self.config
        assert layer.engram_gather is not None
        ids = self.model.token_map[self.tokens]
        pad = self.model.token_map[config.engram_pad_token_id]
        size = config.engram_max_ngram_size
        padded = torch.cat((pad.expand(size - 1), ids))
        history = padded.unfold(0, size, 1).flip(-1)
        rows = engram.row_ids(history, config)[:, config.engram_layer_ids.index(number)]
        found = layer.engram_gather(rows)
        key, _ = engram.project(found, layer.engram, config, NUM)
        gate = engram.gate(stream, key, layer.engram, config).squeeze(-1)
        return engram.inject(stream, found, layer.engram, config, NUM), gate

    def _router(self, number: int, block: Block) -> None:
        """The recorded biased scores, through what a router shows of them: its choice and its weights."""
        v, name = self.vectors, f"layer.{number}.router_sel"
        if name not in v:
            v.report.skip(v.name, name, "not in this file")
            return
        biased = v[name].double()
        chosen, weights = self.backend.moe.route(v[f"layer.{number}.ffn_in"], block.ffn, self.config)
        wanted = biased.topk(chosen.shape[-1], dim=-1).indices
        v.compare(name + " (choice)", chosen.sort(-1).values, wanted.sort(-1).values, EXACT)
        scores = (biased - block.ffn.bias).gather(-1, chosen)
        scores = scores / scores.sum(-1, keepdim=True) * self.config.routed_scaling_factor
        v.compare(name + " (weights)", weights, scores, GATE)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _turns(self, number: int) -> Tensor:
        compressed = self.config.kv_source(number) is not None
        return (self.model.rope_compressed if compressed else self.model.rope).at(self.positions)

    def _window(self, number: int, weights: AttentionWeights) -> tuple[Tensor, Tensor]:
        """Low-rank query and window entries of every position, from the recorded input."""
        attention, x = self.backend.attention, self.vectors[f"layer.{number}.attn_in"]
        q_r, latent = attention.project_low(x, weights, self.config, NUM)
        return q_r, attention.window_entry(latent, self._turns(number), NUM)

    def _attention(self, number: int, weights: AttentionWeights) -> Tensor:
        attention, config, turns = self.backend.attention, self.config, self._turns(number)
        q_r, own = self._window(number, weights)
        q = attention.project_q(q_r, turns, weights, config, NUM)
        seen = self.positions.unsqueeze(-1) + torch.arange(1 - config.sliding_window, 1)
        kv, visible = own[seen.clamp(min=0)], seen >= 0
        source, index_source = config.kv_source(number), config.index_source(number)
        if source is not None and index_source is not None:
            place = config.index_source_layer_ids.index(index_source)
            if self.prompt is None:
                raise MissingTensor("index_sel of the same prompt")
            chosen = self.prompt["index_sel"][place, : len(self.tokens)].long()
            entries = self.vectors[f"cache.compressed.{source}"]
            kv = torch.cat((kv, entries[chosen.clamp(min=0)]), dim=1)
            visible = torch.cat((visible, chosen >= 0), dim=1)
        o = attention.attend(q, kv, visible, weights.attn_sink, NUM)
        return attention.project_out(o, turns, weights, config, NUM)

    def _index_scores(self, number: int) -> None:
        v, name, layer = self.vectors, f"layer.{number}.index_score", self.model.layers[number]
        if layer.index_query is None:
            return
        if name not in v:
            v.report.skip(v.name, name, "not in this file")
            return
        with v.needed_for(name):
            x = v[f"layer.{number}.attn_in"]
            q_r, _ = self._window(number, layer.block.attn)
            indexer = self.backend.indexer
            query, weights = indexer.index_query(x, q_r, self._turns(number), layer.index_query, self.config, NUM)
            scores = indexer.score(query, weights, v[f"cache.index_k.{self.config.kv_source(number)}"])
            source = self.config.kv_source(number)
            assert source is not None
            visible = (self.positions + 1) // self.config.compress_ratios[source]
            hidden = torch.arange(scores.shape[-1]) >= visible.unsqueeze(-1)
            recorded = torch.isinf(v[name])
            v.compare(name + " (hidden, shown)", hidden & ~recorded, torch.zeros_like(hidden), EXACT)
            v.compare(name, scores.masked_fill(recorded, 0), v[name].masked_fill(recorded, 0), INDEX_SCORES)

    def _caches(self, number: int) -> None:
        """Caches after the prompt: rings by position modulo the window, entries in their order, the open group."""
        v, layer, config, indexer = self.vectors, self.model.layers[number], self.config, self.backend.indexer
        v.check(f"cache.window.{number}", lambda: self._ring(self._window(number, layer.block.attn)[1]), CACHE)
        if layer.compressor is None or layer.index_key is None:
            return
        ratio = config.compress_ratios[number]
        with v.needed_for(f"cache.compressed.{number}"):
            raw = indexer.project_raw(v[f"layer.{number}.attn_in"], layer.compressor, NUM)
            closed = len(raw) // ratio
            groups = raw[: closed * ratio].unflatten(0, (closed, ratio))
            latent = indexer.pool(groups, layer.compressor, config, NUM)
            turns = self.model.rope_compressed.at(torch.arange(closed) * ratio)
            v.check(f"cache.compressed.{number}", lambda: indexer.kv_entry(latent, turns, NUM), CACHE)
            key = layer.index_key
            v.check(f"cache.index_k.{number}", lambda: indexer.index_key(latent, turns, key, config, NUM), CACHE)
            for part, kind in enumerate(("kv", "score")):
                if closed * ratio < len(raw):
                    v.check(f"cache.open_{kind}.{number}", lambda p=part: raw[closed * ratio :, p], F32)

    def _ring(self, entries: Tensor) -> Tensor:
        """The last window of `entries` by slot; slots that no position has reached are zero."""
        ring = torch.zeros(self.config.sliding_window, entries.shape[-1], dtype=entries.dtype)
        last = self.positions[-self.config.sliding_window :]
        ring[last % self.config.sliding_window] = entries[last]
        return ring

    # -- draft steps --------------------------------------------------------------------------------------------------

    def _drafts(self) -> None:
        v = self.vectors
        v.check("draft.prefill.main_x", lambda: self.draft.main(v["main_hidden"]), TWO_ROUNDINGS)
        context = "draft.prefill.main_x" in v
        if context:
            for layer, block in enumerate(self.draft.blocks):
                entries = self._main_entries(v["draft.prefill.main_x"], self.positions, block)
                v.check(f"cache.draft_window.{layer}", lambda e=entries: self._ring(e), CACHE)
        calls = sorted({int(match[1]) for name in v.tensors if (match := re.match(r"draft\.(\d+)\.", name))})
        for call in calls:
            name = f"draft.{call}."
            v.check(name + "main_x", lambda n=name: self.draft.main(v[n + "main_hidden"]), TWO_ROUNDINGS)
            with v.needed_for(name + "0.attn_in"):
                self._draft_call(call)

    def _main_entries(self, main: Tensor, positions: Tensor, block: Block) -> Tensor:
        attention = self.backend.attention
        latent = attention.project_latent(NUM.fp8(main), block.attn, self.config, NUM)
        return attention.window_entry(latent, self.model.rope.at(positions), NUM)

    def _draft_call(self, call: int) -> None:
        v, boundary, config = self.vectors, self.backend.boundary, self.config
        size, last = config.dspark_block_size, len(self.tokens) + call
        stream = None
        if self.prompt is not None:
            block_tokens = torch.full((size,), config.dspark_noise_token_id)
            block_tokens[0] = self.prompt["decode_tokens"][call + 1]
            stream = copies(self.model.embed[block_tokens], config)
        pre = boundary.first_pre(size, config, self.tokens.device)
        mains = [v["draft.prefill.main_x"], *(v[f"draft.{earlier}.main_x"] for earlier in range(call + 1))]
        for layer, block in enumerate(self.draft.blocks):
            name = f"draft.{call}.{layer}."
            if layer:
                stream = v[f"draft.{call}.{layer - 1}.stream_out"]
            if stream is None:
                v.report.skip(v.name, name + "attn_in", "no file has the same prompt, so the block's token is unknown")
            else:
                v.check(
                    name + "attn_in", lambda s=stream, p=pre, b=block: self._collapsed(s, p, b.attn_norm), TWO_ROUNDINGS
                )
            entries = self._main_entries(torch.cat(mains), torch.arange(last + 1), block)
            context = entries[-config.sliding_window :]
            v.check(
                name + "attn_out", lambda n=name, b=block, c=context: self._draft_attention(n, b, c, last), ATTENTION
            )
            if stream is not None:
                mid_pre, post, comb = boundary.mixes(stream, block.hc_attn, config)
                v.check(
                    name + "stream_mid",
                    lambda n=name, s=stream, p=post, c=comb: boundary.expand(v[n + "attn_out"], s, p, c, NUM),
                    BF16,
                )
                v.check(
                    name + "ffn_in",
                    lambda n=name, p=mid_pre, b=block: self._collapsed(v[n + "stream_mid"], p, b.ffn_norm),
                    TWO_ROUNDINGS,
                )
            v.check(
                name + "ffn_out",
                lambda n=name, b=block: self.backend.moe.moe(v[n + "ffn_in"], b.ffn, config, NUM),
                FFN,
            )
            middle = v[name + "stream_mid"]
            pre, post, comb = boundary.mixes(middle, block.hc_ffn, config)
            v.check(name + "hc_ffn_pre", lambda p=pre: p, F32)
            v.check(
                name + "stream_out",
                lambda n=name, s=middle, p=post, c=comb: boundary.expand(v[n + "ffn_out"], s, p, c, NUM),
                BF16,
            )
        name = f"draft.{call}."
        out = f"{name}{config.num_nextn_predict_layers - 1}.stream_out"
        v.check(name + "hidden", lambda: boundary.collapse(v[out], pre, NUM), BF16)
        v.check(name + "base_logits", lambda: self._draft_logits(v[name + "hidden"]), DRAFT_LOGITS)

    def _draft_logits(self, hidden: Tensor) -> Tensor:
        x = self.backend.ops.rms_norm(hidden, self.draft.norm, self.config.rms_norm_eps, NUM)
        return self.backend.head.logits(x, self.model.head)

    def _draft_attention(self, name: str, block: Block, context: Tensor, last: int) -> Tensor:
        attention, config = self.backend.attention, self.config
        size = config.dspark_block_size
        turns = self.model.rope.at(torch.arange(last + 1, last + 1 + size))
        q_r, latent = attention.project_low(self.vectors[name + "attn_in"], block.attn, config, NUM)
        q = attention.project_q(q_r, turns, block.attn, config, NUM)
        kv = torch.cat((context, attention.window_entry(latent, turns, NUM))).expand(size, -1, -1)
        o = attention.attend(q, kv, torch.ones(kv.shape[:2], dtype=torch.bool), block.attn.attn_sink, NUM)
        return attention.project_out(o, turns, block.attn, config, NUM)
