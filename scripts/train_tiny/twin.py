"""The model of `docs/model.md` over whole sequences, differentiable: the twin that training works on.

Same function as the reference, other shape: [sequences, tokens] at once, masks instead of caches, every expert
computed for every row. Quantizers pass gradients straight through. Weights come as one dictionary by name
(`weights.tensor_specs`), already rounded as they will be stored.

Rows are flat ([rows = sequences * tokens, ...]) except inside attention. `wrap` (torch.compile or nothing) goes around
each region, a function of tensors that all layers share, so that a region is compiled once and not once a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flashstep import formats
from flashstep.config import ModelConfig
from scripts.train_tiny.weights import round_e2m1

Weights = dict[str, Tensor]

# Gradients flow through the last Sinkhorn iterations alone. Scaling rows and columns by constants does not change
# what further normalization converges to, so the earlier iterations hardly contribute, and they cost most of the time.
_SINKHORN_WITH_GRADIENT = 3


@dataclass
class Output:
    """What a forward over [sequences, tokens] leaves: rows are flat."""

    logits: Tensor  # [rows, vocab] float32
    taps: Tensor  # [rows, taps * hidden], concatenated means over the copies
    loads: dict[str, Tensor]  # by layer name: rows that chose each expert, [experts]
    index_loss: Tensor  # how far the index scores are from the attention they should predict


class Twin:
    """The function of one configuration. Holds constants only; weights are arguments.

    `dtype` is that of activations between operations, `quantize` switches every activation and cache quantizer.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: np.ndarray,
        dtype: torch.dtype = torch.bfloat16,
        quantize: bool = True,
        device: str = "cpu",
        wrap: Callable[[Any], Any] = lambda function: function,
        longest: int = 2048,
    ) -> None:
        self.config, self.dtype, self.quantize, self.device = config, dtype, quantize, device
        self.token_map = torch.as_tensor(token_map, dtype=torch.int64, device=device)
        self.rope = {compressed: self._rope_table(compressed, longest) for compressed in (False, True)}
        self.hash_tables = [
            (
                multipliers,
                torch.tensor(primes, dtype=torch.int64, device=device),
                torch.tensor(np.cumsum([0, *np.ravel(primes)])[:-1].reshape(np.shape(primes)), device=device),
            )
            for multipliers, primes in zip(config.engram_multipliers, config.engram_primes, strict=True)
        ]
        self.enter = wrap(self._enter)
        self.leave = wrap(self._leave)
        self.project = wrap(self._project)
        self.attend = wrap(self._attend)
        self.attend_block = wrap(self._attend_block)
        self.output = wrap(self._output)
        self.compress = wrap(self._compress)
        self.score = wrap(self._score)
        self.choose = wrap(self._choose)
        self.candidates = wrap(self._candidates)
        self.index_distance = wrap(self._index_distance)
        self.ffn = wrap(self._ffn)
        self.inject = wrap(self._inject)
        self.head = wrap(self._head)

    # -- the whole ----------------------------------------------------------------------------------------------

    def __call__(self, weights: Weights, ids: Tensor, dense: bool = False) -> Output:
        """Forward over `ids` [sequences, tokens], tokens a multiple of the window.

        `dense` lets every row attend to all visible entries: while the indexer still learns what to choose.
        """
        c = self.config
        sequences, tokens = ids.shape
        assert tokens % math.lcm(c.sliding_window, c.candidate_block_size * max(c.compress_ratios)) == 0, tokens
        position = torch.arange(tokens, device=self.device)
        tables = [self.engram_rows(ids, i) for i in range(len(c.engram_layer_ids))]
        stream, pre = self.begin(weights, ids.reshape(-1))
        entries: dict[int, tuple[Tensor, Tensor]] = {}  # by KV source: compressed KV, index keys
        mask = allowed = None
        taps, loads, index_losses = [], {}, []
        for layer in range(c.num_hidden_layers):
            w = _below(weights, f"layers.{layer}.")
            if layer in c.engram_layer_ids:
                looked_up = F.embedding(tables[c.engram_layer_ids.index(layer)], w["engram.embed.weight"]).flatten(1)
                stream = self.inject(stream, looked_up.to(self.dtype), *_pick(w, "engram.", _ENGRAM))
            if layer in c.dspark_target_layer_ids:
                taps.append(stream.float().mean(1).to(self.dtype))

            ratio = c.compress_ratios[layer]
            x, pre, post, comb = self.enter(stream, pre, *_pick(w, "", _ENTER_ATTN))
            cos, sin = (table[position].repeat(sequences, 1) for table in self.rope[ratio > 0])
            low, q, kv = self.project(x, *_pick(w, "attn.", _PROJECT), cos, sin)
            q = q.unflatten(0, (sequences, tokens))
            kv = kv.unflatten(0, (sequences, tokens))
            if ratio == 0:
                o, _ = self.attend(q, kv, w["attn.attn_sink"], None, None)
            else:
                source = c.kv_source(layer)
                if layer == source:
                    entries[layer] = self.compress(
                        x.unflatten(0, (sequences, tokens)),
                        *_pick(w, "attn.compressor.", ("wkv.weight", "norm.weight")),
                        w.get("attn.compressor.wgate.weight"),
                        *_pick(w, "attn.indexer.", ("wk.weight", "k_norm.weight")),
                        *(table[:tokens:ratio] for table in self.rope[True]),
                    )
                compressed, keys = entries[source]
                if layer == c.index_source(layer):
                    visible = torch.arange(tokens // ratio, device=self.device) < (position[:, None] + 1) // ratio
                    scores = self.score(
                        low.detach(), x.detach(), keys, *_pick(w, "attn.indexer.", _INDEX_QUERY), cos, sin
                    )
                    allowed = visible if not c.uses_candidates(layer) or dense else allowed
                    mask = visible.expand_as(scores) if dense else self.choose(scores.detach(), visible, allowed)
                    if layer == c.candidate_source_layer_id and not dense:
                        allowed = self.candidates(scores.detach(), visible)
                o, share = self.attend(q, kv, w["attn.attn_sink"], compressed, mask)
                if layer == c.index_source(layer) and torch.is_grad_enabled():
                    index_losses.append(self.index_distance(scores, share, mask))
            y = self.output(o.flatten(0, 1), *_pick(w, "attn.", ("wo_a.weight", "wo_b.weight")), cos, sin)
            stream = self.leave(stream, y, post, comb)

            x, pre, post, comb = self.enter(stream, pre, *_pick(w, "", _ENTER_FFN))
            y, loads[f"layers.{layer}"] = self.ffn(x, *_pick(w, "ffn.", _FFN), c.num_experts_per_tok)
            stream = self.leave(stream, y, post, comb)
        hidden = self.collapse(stream, pre)
        logits = self.head(hidden, weights["norm.weight"], weights["head.weight"])
        zero = torch.zeros((), device=self.device)
        return Output(logits, torch.cat(taps, 1), loads, sum(index_losses, zero))

    def draft(self, weights: Weights, ids: Tensor, taps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Weights]:
        """Draft blocks after each of `anchors` [sequences, anchors], the last committed positions.

        `ids` [sequences, tokens] holds the token after each anchor; `taps` are those of the backbone's forward.
        Returns the collapsed stream [sequences, anchors, block, hidden], logits without the Markov part
        [sequences, anchors, block, vocab] float32, and the experts' loads.
        """
        c = self.config
        sequences, tokens = ids.shape
        block, window, width = c.dspark_block_size, c.sliding_window, c.head_dim
        last = f"mtp.{c.num_nextn_predict_layers - 1}."
        main = self.rms(
            self.linear(taps, weights["mtp.0.main_proj.weight"]), weights["mtp.0.main_norm.weight"]
        )  # [rows, hidden]
        position = torch.arange(tokens, device=self.device)
        context_cos, context_sin = (table[position].repeat(sequences, 1) for table in self.rope[False])
        places = anchors[..., None] + torch.arange(1, block + 1, device=self.device)
        cos, sin = (table[places.flatten()] for table in self.rope[False])
        behind = anchors[..., None] - torch.arange(window - 1, -1, -1, device=self.device)  # positions of the window
        valid = (behind >= 0).flatten(0, 1)
        behind = (behind.clamp(min=0) + torch.arange(sequences, device=self.device)[:, None, None] * tokens).flatten(
            0, 1
        )
        first = ids.gather(1, anchors + 1)
        inputs = torch.full((*anchors.shape, block), c.dspark_noise_token_id, device=self.device)
        inputs[..., 0] = first
        stream, pre = self.begin(weights, inputs.flatten())
        loads = {}
        for layer in range(c.num_nextn_predict_layers):
            w = _below(weights, f"mtp.{layer}.")
            context = self.window_entry(main, w["attn.wkv.weight"], w["attn.kv_norm.weight"], context_cos, context_sin)
            x, pre, post, comb = self.enter(stream, pre, *_pick(w, "", _ENTER_ATTN))
            _, q, kv = self.project(x, *_pick(w, "attn.", _PROJECT), cos, sin)
            o = self.attend_block(
                q.unflatten(0, (-1, block)),
                kv.view(-1, block, width),
                context[behind],
                valid,
                w["attn.attn_sink"],
            )
            y = self.output(o.flatten(0, 1), *_pick(w, "attn.", ("wo_a.weight", "wo_b.weight")), cos, sin)
            stream = self.leave(stream, y, post, comb)
            x, pre, post, comb = self.enter(stream, pre, *_pick(w, "", _ENTER_FFN))
            y, loads[f"mtp.{layer}"] = self.ffn(x, *_pick(w, "ffn.", _FFN), c.dspark_num_experts_per_tok)
            stream = self.leave(stream, y, post, comb)
        hidden = self.collapse(stream, pre)
        logits = self.head(hidden, weights[f"{last}norm.weight"], weights["head.weight"])
        shape = (*anchors.shape, block)
        return hidden.unflatten(0, shape), logits.unflatten(0, shape), loads

    def markov(self, weights: Weights, previous: Tensor) -> Tensor:
        """What the token before adds to the draft's logits: [..., vocab] float32 for `previous` [...]."""
        embedded, matrix = _pick(weights, self._last, ("markov_head.embed.weight", "markov_head.head.weight"))
        return F.linear(F.embedding(previous, embedded).to(self.dtype), matrix.to(self.dtype)).float()

    def confidence(self, weights: Weights, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of the probability that a draft is accepted: [...] float32 for `hidden` [..., hidden]."""
        embedded, matrix = _pick(weights, self._last, ("markov_head.embed.weight", "confidence_head.proj.weight"))
        both = torch.cat((hidden.float(), F.embedding(previous, embedded).float()), -1)
        return F.linear(both, matrix.float()).squeeze(-1)

    @property
    def _last(self) -> str:
        return f"mtp.{self.config.num_nextn_predict_layers - 1}."

    def begin(self, weights: Weights, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The stream [rows, copies, hidden] of `ids` [rows], and the first collapse: copy 0 alone."""
        embedded = F.embedding(ids, weights["embed.weight"]).to(self.dtype)
        copies = self.config.hc_mult
        stream = embedded[:, None].expand(-1, copies, -1).contiguous()
        pre = torch.zeros(len(ids), copies, device=self.device)
        pre[:, 0] = 1
        if torch.is_grad_enabled():  # as in every later layer, so that the first one needs no region of its own
            return stream.requires_grad_(), pre.requires_grad_()
        return stream, pre

    def engram_rows(self, ids: Tensor, which: int) -> Tensor:
        """Table rows [rows, columns] int64 of Engram number `which`, n-gram sizes outside, heads inside."""
        multipliers, primes, offsets = self.hash_tables[which]
        compressed = self.token_map[ids]
        pad = self.token_map[self.config.engram_pad_token_id]
        roll = compressed * multipliers[0]
        columns = []
        for back in range(1, self.config.engram_max_ngram_size):
            earlier = torch.cat((pad.expand(len(ids), back), compressed[:, :-back]), 1)
            roll = roll ^ (earlier * multipliers[back])
            columns.append(roll[..., None] % primes[back - 1] + offsets[back - 1])
        return torch.cat(columns, -1).flatten(0, 1)

    # -- small pieces -------------------------------------------------------------------------------------------

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32, rounded once."""
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (weight.float() * x * scale).to(self.dtype)

    def fp8(self, x: Tensor) -> Tensor:
        """Activations and window entries."""
        return _straight_through(formats.fp8_round_trip(x.detach()), x) if self.quantize else x

    def kv_fp4(self, x: Tensor) -> Tensor:
        """Compressed KV."""
        return _straight_through(round_e2m1(x.detach(), *formats.fp4_e4m3_scale(x.detach())), x) if self.quantize else x

    def index_fp4(self, x: Tensor) -> Tensor:
        """Index keys and queries."""
        if not self.quantize:
            return x
        return _straight_through(round_e2m1(x.detach(), *formats.fp4_ue8m0_scale(x.detach())), x)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Product with an fp8 or fp4 weight: the activation is quantized in front of it."""
        return F.linear(self.fp8(x), weight.to(self.dtype))

    def collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        """[rows, hidden] of the stream [rows, copies, hidden]."""
        return (pre[..., None] * stream.float()).sum(-2).to(self.dtype)

    def window_entry(self, x: Tensor, wkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One latent per row [rows, d], rotated and rounded as the window cache holds it."""
        return self.fp8(_rotate(self.rms(self.linear(x, wkv), norm), cos, sin))

    def _rope_table(self, compressed: bool, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, rotary / 2] float32."""
        c = self.config
        base = c.compress_rope_theta if compressed else c.rope_theta
        half = torch.arange(c.qk_rope_head_dim // 2, dtype=torch.float64)
        frequency = base ** (-2 * half / c.qk_rope_head_dim)
        if compressed:
            y = c.rope_scaling

            def corrected(rotations: float) -> float:
                turns = y.original_max_position_embeddings / (2 * math.pi * rotations)
                return c.qk_rope_head_dim * math.log(turns) / (2 * math.log(base))

            low = max(math.floor(corrected(y.beta_fast)), 0)
            high = min(math.ceil(corrected(y.beta_slow)), c.qk_rope_head_dim - 1)
            ramp = ((half - low) / max(high - low, 1e-3)).clamp(0, 1)
            frequency = frequency / y.factor * ramp + frequency * (1 - ramp)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        return angle.cos().float().to(self.device), angle.sin().float().to(self.device)

    # -- regions ------------------------------------------------------------------------------------------------

    def _enter(
        self, stream: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Start of a sublayer: its normed input (collapsed with the `pre` of the one before), and its own mixes."""
        copies, eps = self.config.hc_mult, self.config.hc_eps
        x = self.rms(self.collapse(stream, pre), norm)
        flat = stream.flatten(1).float()
        mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        own, post, comb = mixes.split((copies, copies, copies * copies), -1)
        own = torch.sigmoid(own * scale[0] + base[:copies]) + eps
        post = 2 * torch.sigmoid(post * scale[1] + base[copies : 2 * copies])
        comb = (comb * scale[2] + base[2 * copies :]).unflatten(-1, (copies, copies))
        comb = torch.softmax(comb, -1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        rounds = self.config.hc_sinkhorn_iters - 1
        detached = max(rounds - _SINKHORN_WITH_GRADIENT, 0)
        with torch.no_grad():
            balanced = comb
            for _ in range(detached):
                balanced = balanced / (balanced.sum(-1, keepdim=True) + eps)
                balanced = balanced / (balanced.sum(-2, keepdim=True) + eps)
            factor = balanced / comb
        comb = comb * factor
        for _ in range(rounds - detached):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return x, own, post, comb

    def _leave(self, stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """End of a sublayer: its output goes to every copy, and the copies mix (comb[from, to])."""
        mixed = (comb[..., None] * stream.float()[..., :, None, :]).sum(-3)
        return (post[..., None] * y.float()[..., None, :] + mixed).to(self.dtype)

    def _project(
        self,
        x: Tensor,
        wq_a: Tensor,
        q_norm: Tensor,
        wq_b: Tensor,
        wkv: Tensor,
        kv_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Low-rank query [rows, rank], rotated queries [rows, heads, d], window entries [rows, d]."""
        low = self.rms(self.linear(x, wq_a), q_norm)
        q = self.linear(low, wq_b).unflatten(-1, (-1, self.config.head_dim))
        return low, _rotate(q, cos[:, None], sin[:, None]), self.window_entry(x, wkv, kv_norm, cos, sin)

    def _attend(
        self, q: Tensor, kv: Tensor, sink: Tensor, entries: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Window and chosen compressed entries under one softmax: [sequences, tokens, heads, d].

        q [sequences, tokens, heads, d], kv [sequences, tokens, d], entries [sequences, entries, d], mask [sequences,
        tokens, entries]. Also returns the heads' mean probability of each entry, where there are any. The window is
        computed in bands: a block of queries meets its own block of keys and the one before.
        """
        window, width = self.config.sliding_window, self.config.head_dim
        sequences, tokens, heads, _ = q.shape
        blocks = tokens // window
        own = kv.view(sequences, blocks, window, width)
        keys = torch.cat((F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1], own), 2)  # [sequences, blocks, 2 * window, d]
        banded = q.reshape(sequences, blocks, window * heads, width)
        near = (banded @ keys.transpose(-1, -2)).float() * width**-0.5
        near = near.view(sequences, blocks, window, heads, 2 * window)
        row = torch.arange(window, device=q.device)[:, None]
        column = torch.arange(2 * window, device=q.device)
        inside = (column > row) & (column <= row + window)
        started = torch.arange(blocks, device=q.device)[:, None, None] * window + column >= window
        near = near.masked_fill(~(inside & started)[:, :, None], -torch.inf)
        near = near.view(sequences, tokens, heads, 2 * window)
        top = torch.maximum(near.detach().amax(-1), sink.detach())
        far = None
        if entries is not None:
            far = (q.flatten(1, 2) @ entries.transpose(-1, -2)).float() * width**-0.5
            far = far.view(sequences, tokens, heads, -1).masked_fill(~mask[:, :, None], -torch.inf)
            top = torch.maximum(top, far.detach().amax(-1))
        near = torch.exp(near - top[..., None])
        total = near.sum(-1) + torch.exp(sink - top)
        o = (near.to(self.dtype).view(sequences, blocks, window * heads, -1) @ keys).view(q.shape).float()
        share = None
        if far is not None:
            far = torch.exp(far - top[..., None])
            total = total + far.sum(-1)
            o = o + (far.to(self.dtype).flatten(1, 2) @ entries).view(q.shape).float()
            share = (far.detach() / total.detach()[..., None]).mean(2)
        return (o / total[..., None]).to(self.dtype), share

    def _attend_block(self, q: Tensor, kv: Tensor, context: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
        """Draft blocks [blocks, block, heads, d]: each row meets the window behind and its whole block."""
        shape = q.shape
        keys = torch.cat((context, kv), 1)
        scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).float() * self.config.head_dim**-0.5
        seen = F.pad(valid, (0, kv.shape[1]), value=True)
        scores = scores.masked_fill(~seen[:, None], -torch.inf).view(*shape[:3], -1)
        scores = torch.cat((scores, sink[:, None].expand(*shape[:3], 1)), -1)
        probability = torch.softmax(scores, -1)[..., :-1].to(self.dtype)
        return (probability.flatten(1, 2) @ keys).view(shape)

    def _output(self, o: Tensor, wo_a: Tensor, wo_b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated back, grouped low-rank output: [rows, hidden]."""
        o = _rotate(o, cos[:, None], -sin[:, None])
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        grouped = o.reshape(len(o), groups, -1).transpose(0, 1)
        low = grouped @ wo_a.to(self.dtype).view(groups, rank, -1).transpose(1, 2)
        return self.linear(low.transpose(0, 1).flatten(1), wo_b)

    def _compress(
        self,
        x: Tensor,
        wkv: Tensor,
        norm: Tensor,
        wgate: Tensor | None,
        wk: Tensor,
        k_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compressed KV [sequences, entries, d] and index keys [sequences, entries, index d] of `x`."""
        if wgate is None:
            latent = F.linear(x, wkv.to(self.dtype))
        else:
            ratio = x.shape[1] // len(cos)
            k = F.linear(x.float(), wkv.float()).unflatten(1, (-1, ratio))
            z = F.linear(x.float(), wgate.float()).unflatten(1, (-1, ratio))
            latent = (k * torch.softmax(z, 2)).sum(2).to(self.dtype)
        latent = self.rms(latent, norm)
        key = self.rms(F.linear(latent.detach(), wk.to(self.dtype)), k_norm)
        return self.kv_fp4(_rotate(latent, cos, sin)), self.index_fp4(_rotate(key, cos, sin))

    def _score(
        self, low: Tensor, x: Tensor, keys: Tensor, wq_b: Tensor, weights_proj: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Index scores [sequences, tokens, entries] float32 of every pair, visible or not."""
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        iq = self.linear(low, wq_b).unflatten(-1, (heads, width))
        iq = self.index_fp4(_rotate(iq, cos[:, None], sin[:, None]))
        weight = F.linear(x, weights_proj.to(self.dtype)).float() * width**-0.5 * heads**-0.5
        scores = iq.view(len(keys), -1, width) @ keys.transpose(1, 2)
        scores = scores.float().relu() * weight.reshape(len(keys), -1, 1)
        return scores.unflatten(1, (-1, heads)).sum(2)

    def _choose(self, scores: Tensor, visible: Tensor, allowed: Tensor) -> Tensor:
        """The index_topk best of the visible and allowed entries: [sequences, tokens, entries] bool."""
        scores = scores.masked_fill(~(visible & allowed), -torch.inf)
        return _best(scores, self.config.index_topk) & visible & allowed

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Entries in the candidate blocks: [sequences, tokens, entries] bool."""
        size = self.config.candidate_block_size
        blocks = scores.masked_fill(~visible, -torch.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = (visible.sum(-1, keepdim=True) - 1) // size == torch.arange(blocks.shape[-1], device=scores.device)
        best = _best(blocks.masked_fill(newest, torch.inf), self.config.candidate_topk_blocks)
        return best.repeat_interleave(size, -1)

    def _index_distance(self, scores: Tensor, share: Tensor, mask: Tensor) -> Tensor:
        """Mean KL from the softmax of the scores to the attention, both over the entries attended to."""
        rows = mask.sum(-1) > 1
        target = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
        logs = torch.log_softmax(scores.masked_fill(~mask, -1e9), -1)
        kl = (target * (target.clamp(min=1e-9).log() - logs)).masked_fill(~mask, 0).sum(-1)
        return (kl * rows).sum() / rows.sum().clamp(min=1)

    def _ffn(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        shared_w1: Tensor,
        shared_w3: Tensor,
        shared_w2: Tensor,
        top: int,
    ) -> tuple[Tensor, Tensor]:
        """The mixture [rows, hidden], and how many rows chose each expert [experts].

        Every expert runs on every row, side by side in one product, with weight 0 where it was not chosen; the shared
        expert is one more, with weight 1.
        """
        limit = self.config.swiglu_limit
        affinity = torch.sqrt(F.softplus(F.linear(x.float(), gate.float())))
        choice = affinity.detach() + bias
        ahead = choice[:, None, :] > choice[:, :, None]
        tied = torch.ones(len(bias), len(bias), dtype=torch.bool, device=x.device).tril(-1)
        ahead = ahead | ((choice[:, None, :] == choice[:, :, None]) & tied)
        chosen = (ahead.sum(-1) < top).float()
        weight = affinity * chosen
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        weight = F.pad(weight, (0, 1), value=1.0)

        x = self.fp8(x)
        dtype, experts = self.dtype, len(w1) + 1
        g = F.linear(x, torch.cat((w1.flatten(0, 1), shared_w1)).to(dtype)).float().clamp(max=limit)
        u = F.linear(x, torch.cat((w3.flatten(0, 1), shared_w3)).to(dtype)).float().clamp(-limit, limit)
        h = (F.silu(g) * u).unflatten(-1, (experts, -1)) * weight[..., None]
        h = h.to(dtype).flatten(1)
        down = torch.cat((w2.transpose(0, 1).flatten(1), shared_w2), 1)
        return self.linear(h, down), chosen.sum(0)

    def _inject(self, stream: Tensor, looked_up: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        """The Engram: gated values of `looked_up` [rows, columns * d] added to every copy of the stream."""
        copies, width = stream.shape[1:]
        eps = self.config.rms_norm_eps
        kv = self.linear(looked_up, wkv).float()
        key, value = kv[:, : copies * width].unflatten(-1, (copies, width)), kv[:, None, copies * width :]
        x = stream.float()
        dot = (x * (q_weight.float() * k_weight.float()) * key).sum(-1)
        dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * width**-0.5
        gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
        return (x + gate[..., None] * value).to(self.dtype)

    def _head(self, hidden: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        return F.linear(self.rms(hidden, norm), head.to(self.dtype)).float()


# -- helpers --------------------------------------------------------------------------------------------------------

_ENTER_ATTN = ("hc_attn_fn", "hc_attn_base", "hc_attn_scale", "attn_norm.weight")
_ENTER_FFN = ("hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale", "ffn_norm.weight")
_PROJECT = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
_INDEX_QUERY = ("wq_b.weight", "weights_proj.weight")
_ENGRAM = ("wkv.weight", "q_weight", "k_weight")
_FFN = (
    "gate.weight",
    "gate.bias",
    *(f"{kind}.{part}.weight" for kind in ("experts", "shared_experts") for part in ("w1", "w3", "w2")),
)


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _pick(weights: Weights, prefix: str, names: tuple[str, ...]) -> list[Tensor]:
    return [weights[prefix + name] for name in names]


def _straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """`rounded` forward (exactly: the difference is 0), the identity backward."""
    return rounded + (x - x.detach())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last 2 * cos.shape[-1] columns of `x` turned, adjacent pairs as complex numbers."""
    plain, turned = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    real, imaginary = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest along the last dimension; equal scores at the cut go to the lowest index."""
    if scores.shape[-1] <= count:
        return torch.ones_like(scores, dtype=torch.bool)
    cut = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > cut, scores == cut
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
