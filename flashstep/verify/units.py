"""The unit files: one primitive each, called with recorded inputs.

Sizes come from the tensors, constants from the index. Every check is a function named after its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from flashstep.checkpoint import Checkpoint
from flashstep.config import FP8_BLOCK, KV_GROUP, ModelConfig, RopeScaling
from flashstep.formats import Numerics
from flashstep.state import State
from flashstep.tiny import small_config
from flashstep.verify.backends import Backend
from flashstep.verify.files import Vectors
from flashstep.verify.tolerances import BF16, ENGRAM_GATE, EXACT, F32, GATE, MOE, MOE_F32, SCORES_BF16

BF16_NUM = Numerics()
F32_NUM = Numerics(torch.float32)
MODES = (("", BF16_NUM, BF16, "bf16"), ("_f32", F32_NUM, F32, "f32"))

# What the files of compressors and rotations do not say: constants of the released model.
_THETA, _COMPRESS_THETA = 10000.0, 160000.0
_SCALING = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
# The released Engram, for the hash constants that the engram file records under `release.`
_RELEASE: dict[str, Any] = {
    "engram_layer_ids": (1, 14),
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_compressed_vocab_size": 99092,
}


@dataclass(frozen=True)
class Beside:
    """The configuration directory that a unit file takes weights from."""

    checkpoint: Checkpoint
    token_map: Tensor


@dataclass(frozen=True)
class Unit:
    """One unit file with what its check needs."""

    vectors: Vectors
    meta: Mapping[str, Any]
    backend: Backend
    beside: Callable[[str], Beside | None]  # name of a configuration -> its directory's content


def _config(**values: Any) -> ModelConfig:
    """A configuration of just these values: a function that reads another one fails instead of using a default."""
    return cast(ModelConfig, SimpleNamespace(**values))


def act_quant(u: Unit) -> None:
    """fp8 activations: codes, scales, round trip."""
    v, formats = u.vectors, u.backend.formats
    if u.meta.get("block", FP8_BLOCK) != FP8_BLOCK:
        v.leave("x", f"block {u.meta['block']}: this model's activations have blocks of {FP8_BLOCK}")
        return
    for end, _, _, mode in MODES:
        v.check(f"q{end}", lambda x=f"x{end}": formats.fp8_quantize(v[x])[0], EXACT, mode)
        scale = f"s{end}"
        if scale in v:
            recorded = formats.ue8m0_decode(v[scale])
            with v.needed_for(scale):
                v.compare(scale, formats.fp8_quantize(v[f"x{end}"])[1], recorded, EXACT, mode)
        v.check(f"deq{end}", lambda x=f"x{end}": formats.fp8_round_trip(v[x]), EXACT, mode)


def fp4_act_quant(u: Unit) -> None:
    """fp4 cache entries under both kinds of scale."""
    v, formats = u.vectors, u.backend.formats
    for block, scale_of in ((FP8_BLOCK, formats.fp4_ue8m0_scale), (KV_GROUP, formats.fp4_e4m3_scale)):
        name = f"b{block}."
        v.check(name + "scale", lambda f=scale_of: f(v["x"])[0], EXACT)
        v.check(name + "codes", lambda f=scale_of: formats.fp4_quantize(v["x"], *f(v["x"])), EXACT)
        v.check(name + "deq", lambda f=scale_of: formats.fp4_round_trip(v["x"], *f(v["x"])), EXACT)


def rms_norm(u: Unit) -> None:
    """RMS norm, also of rows so small that eps matters."""
    v = u.vectors
    for end, num, tolerance, mode in MODES:
        v.check(
            f"y{end}",
            lambda x=f"x{end}", num=num: u.backend.ops.rms_norm(v[x], v["weight"], u.meta["eps"], num),
            tolerance,
            mode,
        )


def _rope_config(meta: Mapping[str, Any], theta: float = _THETA, compress: float = _COMPRESS_THETA) -> ModelConfig:
    scaling = RopeScaling(
        **{key: float(meta.get(key, default)) for key, default in _SCALING.items()},
        original_max_position_embeddings=meta["original_max_position_embeddings"],
    )
    return _config(
        rope_theta=theta, compress_rope_theta=compress, qk_rope_head_dim=meta["rope_dim"], rope_scaling=scaling
    )


def rope(u: Unit) -> None:
    """Frequencies with and without YaRN, rotation forward and back."""
    v, ops = u.vectors, u.backend.ops
    tables = sorted({match[0] for name in v.tensors if (match := re.match(r"(plain|yarn)(\d+)k(?=\.)", name))})
    for table in tables:
        kind, thousands = re.fullmatch(r"([a-z]+)(\d+)k", table).groups()  # type: ignore[union-attr]
        theta = float(thousands) * 1000
        rotation = ops.Rope(_rope_config(u.meta, theta, theta), compressed=kind == "yarn")
        turns = rotation.at(v["positions"].long())
        v.check(f"{table}.cos", lambda t=turns: t.real, F32)
        v.check(f"{table}.sin", lambda t=turns: t.imag, F32)
        for end, num, tolerance, mode in MODES:
            x = v["x"].to(num.dtype)
            forward = ops.rotate(x, turns, num)
            v.check(f"{table}.y{end}", lambda y=forward: y, tolerance, mode)
            back = {"inv": x, "roundtrip": forward}
            for name, value in back.items():
                v.check(
                    f"{table}.{name}{end}",
                    lambda x=value, t=turns, num=num: ops.rotate(x, t, num, back=True),
                    tolerance,
                    mode,
                )


def hyper_connections(u: Unit) -> None:
    """Coefficients of the residual copies, collapse and expansion."""
    v, boundary = u.vectors, u.backend.boundary
    meta = u.meta

    def config(iterations: int) -> ModelConfig:
        return _config(
            hc_mult=meta["hc"], hc_sinkhorn_iters=iterations, hc_eps=meta["eps"], rms_norm_eps=meta["norm_eps"]
        )

    stream, fn, recorded = v["stream"], v["fn"].double(), v["mixes"].double()
    flat = stream.flatten(1).double()
    projected = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + meta["norm_eps"])
    # Some rows were multiplied after the projection, to reach the ends of the sigmoids; the projection is linear.
    factors = ((recorded * projected).sum(-1) / projected.square().sum(-1)).round()
    v.compare("mixes", projected * factors.unsqueeze(-1), recorded, F32)

    def mixes(iterations: int) -> list[Tensor]:
        rows = []
        for row, factor in enumerate(factors):
            weights = boundary.Weights(fn * factor, v["base"].double(), v["scale"].double())
            rows.append(boundary.mixes(stream[row : row + 1], weights, config(iterations)))
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    for name, got in zip(("pre", "post", "comb"), mixes(meta["iters"]), strict=True):
        v.check(name, lambda got=got: got, F32)
    for name, iterations in v.numbered("comb_iters"):
        v.check(name, lambda n=iterations: mixes(n)[2], F32)
    v.check("collapsed", lambda: boundary.collapse(stream, v["pre"], BF16_NUM), BF16, "bf16")
    for end, num, tolerance, mode in MODES:
        v.check(
            f"expanded{end}",
            lambda num=num: boundary.expand(v["branch"], stream, v["post"].double(), v["comb"].double(), num),
            tolerance,
            mode,
        )


def sparse_attn(u: Unit) -> None:
    """Attention over chosen entries with holes and sinks."""
    v = u.vectors
    q, kv, chosen = v["q"], v["kv"], v["topk_idxs"].long()
    if abs(u.meta["scale"] * q.shape[-1] ** 0.5 - 1) > 1e-6:
        v.leave("o", f"scale {u.meta['scale']}: this model scales by head_dim ** -0.5")
        return

    def attend(sink: Tensor, num: Numerics) -> Tensor:
        outputs = []
        for queries, entries, rows in zip(q, kv, chosen, strict=True):
            outputs.append(
                u.backend.attention.attend(queries.to(num.dtype), entries[rows.clamp(min=0)], rows >= 0, sink, num)
            )
        return torch.stack(outputs)

    for end, num, tolerance, mode in MODES:
        v.check(f"o{end}", lambda num=num: attend(v["sink"], num), tolerance, mode)
    for name, value in v.numbered("o_sink"):
        v.check(name, lambda value=value: attend(torch.full_like(v["sink"], value), BF16_NUM), BF16, "bf16")


def window_indices(u: Unit) -> None:
    """Which positions a window holds, for chunks, single steps and draft blocks."""
    v, window = u.vectors, u.meta["window"]
    state = cast(State, SimpleNamespace(config=_config(sliding_window=window), device=torch.device("cpu")))

    def seen(last: Tensor) -> Tensor:
        return State.window_positions(state, last)

    for name, length in v.numbered("prefill_"):
        rows = seen(torch.arange(length))
        pads_last = torch.where(rows < 0, length, rows).sort(-1).values[:, : min(length, window)]
        v.check(name, lambda rows=pads_last, n=length: rows.masked_fill(rows == n, -1), EXACT)
    for name, position in v.numbered("decode_"):
        rows = seen(torch.tensor([position]))
        v.check(name, lambda rows=rows: torch.where(rows < 0, -1, rows % window), EXACT)
    for name, position in v.numbered("draft_"):
        rows = seen(torch.tensor([position]))
        slots = (rows[rows >= 0] % window).sort().values
        block = u.meta["draft_block"]
        row = torch.cat((slots, torch.arange(window, window + block)))
        v.check(name, lambda row=row, n=block: row.expand(n, -1), EXACT)


def compressor(u: Unit) -> None:
    """Pooling, latent norm, index keys and KV entries, before and after their quantizers."""
    v, indexer, meta = u.vectors, u.backend.indexer, u.meta
    ratio, linear = meta["ratio"], u.backend.ops.Linear
    config = _config(rms_norm_eps=meta["eps"])
    weights = indexer.Compressor(linear(v["wkv"]), linear(v["wgate"]) if "wgate" in v else None, v["norm_weight"])
    raw = indexer.project_raw(v["x"], weights, BF16_NUM)
    entries = len(raw) // ratio
    latent = indexer.pool(raw[: entries * ratio].unflatten(0, (entries, ratio)), weights, config, BF16_NUM)
    turns = u.backend.ops.Rope(_rope_config(meta), compressed=True).at(torch.arange(entries) * ratio)
    v.check("latent", lambda: latent, BF16, "bf16")
    recorded, unquantized = v["latent"], Numerics(quantize=False)
    v.check("entry_prequant", lambda: indexer.kv_entry(recorded, turns, unquantized), BF16, "bf16")
    v.check("entry", lambda: BF16_NUM.kv_fp4(v["entry_prequant"]), EXACT)
    key = indexer.IndexKey(linear(v["wk"]), v["k_norm_weight"])
    v.check("index_k_prequant", lambda: indexer.index_key(recorded, turns, key, config, unquantized), BF16, "bf16")
    v.check("index_k", lambda: BF16_NUM.index_fp4(v["index_k_prequant"]), EXACT)
    steps = meta["prefill_tokens"] + torch.arange(meta["decode_tokens"])
    v.check("step_emits", lambda: ((steps + 1) % ratio == 0).int(), EXACT)


def indexer(u: Unit) -> None:
    """Index scores, candidate blocks, and choices inside and outside of them."""
    v, stage, meta = u.vectors, u.backend.indexer, u.meta
    config = _config(
        candidate_block_size=meta["candidate_block_size"], candidate_topk_blocks=meta["candidate_topk_blocks"]
    )
    visible = (torch.arange(len(v["q"])) + 1) // meta["ratio"]
    hidden = torch.arange(len(v["k"])) >= visible.unsqueeze(-1)

    def scores(who: str) -> Tensor:
        found = stage.score(v["q"], v[f"{who}_weights"].double() * meta["weight_scale"], v["k"])
        return found.masked_fill(hidden, float("-inf"))

    kept = stage.candidates(scores("source"), visible, config)
    for end, tolerance, mode in (("_f32", GATE, "f32"), ("", SCORES_BF16, "bf16")):
        for who in ("source", "user"):
            name = f"{who}_scores{end}"
            if name not in v:
                v.report.skip(v.name, name, "not in this file")
                continue
            with v.needed_for(name):
                v.compare(f"{name} (where -inf)", hidden, torch.isinf(v[name]), EXACT, mode)
                v.compare(name, scores(who).masked_fill(hidden, 0), v[name].masked_fill(hidden, 0), tolerance, mode)
        v.check(f"candidates{end}", lambda: kept, EXACT, mode)
        v.check(f"source_sel{end}", lambda: stage.choose(scores("source"), meta["topk"]), EXACT, mode)
        inside = scores("user").masked_fill(~kept, float("-inf"))
        v.check(f"user_sel{end}", lambda x=inside: stage.choose(x, meta["topk"]), EXACT, mode)
    v.check("decode_user_sel", lambda: stage.choose(inside[-1:], meta["topk"])[0], EXACT)


def gate(u: Unit) -> None:
    """Expert choice and route weights."""
    v, moe = u.vectors, u.backend.moe
    top = u.meta["topk"]
    weights = moe.Weights(u.backend.ops.Linear(v["weight"]), v["bias"], [], None, top)
    chosen, route = moe.route(v["x"], weights, _config(routed_scaling_factor=u.meta["route_scale"]))
    v.check("indices", lambda: chosen, EXACT)
    v.check("weights", lambda: route, GATE)
    biased = v["biased_scores"].double()
    ranked, order = biased.sort(dim=-1, descending=True, stable=True)
    v.compare("biased_scores (their order)", chosen, order[:, :top], EXACT)
    score = (biased - v["bias"]).gather(-1, chosen)
    score = score / score.sum(-1, keepdim=True) * u.meta["route_scale"]
    v.compare("biased_scores (their weights)", route, score, GATE)
    v.check("margin", lambda: ranked[:, top - 1] - ranked[:, top], F32)


def linear(u: Unit) -> None:
    """Products with fp8 weights (a partial last block too) and packed fp4 weights."""
    v = u.vectors
    for kind in ("fp8", "fp4"):
        product = u.backend.ops.Linear(v[f"{kind}.weight"], v[f"{kind}.scale"])
        v.check(f"{kind}.dequant", lambda p=product: p.decoded, EXACT)
        for end, num, tolerance, mode in MODES:
            v.check(f"{kind}.y{end}", lambda p=product, num=num: p(num.fp8(v["x"])).to(num.dtype), tolerance, mode)


def moe(u: Unit) -> None:
    """One expert with an active clamp, the shared expert, the whole block."""
    v, stage, meta = u.vectors, u.backend.moe, u.meta
    product = u.backend.ops.Linear

    def expert(name: str) -> Any:
        return stage.Expert(*(product(v[f"{name}.{w}.weight"], v[f"{name}.{w}.scale"]) for w in ("w1", "w2", "w3")))

    numbers = sorted({int(name.split(".")[0]) for name in v.tensors if re.match(r"\d+\.w1\.weight", name)})
    experts, limit = [expert(str(number)) for number in numbers], meta["swiglu_limit"]
    config = _config(swiglu_limit=limit, routed_scaling_factor=meta["route_scale"])
    weights = stage.Weights(product(v["gate.weight"]), v["gate.bias"], experts, expert("shared"), meta["topk"])

    everyone = stage.Visits.of(torch.zeros(len(v["x"]), 1, dtype=torch.int64))

    def alone(which: Any, weight: Tensor | None, num: Numerics) -> Tensor:
        hidden = stage.gate_up(num.fp8(v["x"].to(num.dtype)), [which], everyone, weight, limit, num)
        return stage.down(hidden, [which], everyone, num)

    for number, which in zip(numbers, experts, strict=True):
        name = f"expert{number}."
        if name + "route_weight" not in v:
            continue
        x = BF16_NUM.fp8(v["x"])
        v.check(name + "gate_raw", lambda w=which, x=x: w.w1(x).bfloat16().float(), BF16, "bf16")
        v.check(name + "up_raw", lambda w=which, x=x: w.w3(x).bfloat16().float(), BF16, "bf16")
        for end, num, tolerance, mode in (("", BF16_NUM, MOE, "bf16"), ("_f32", F32_NUM, MOE_F32, "f32")):
            v.check(
                f"{name}y{end}",
                lambda w=which, n=name, num=num: alone(w, v[n + "route_weight"], num),
                tolerance,
                mode,
            )
    v.check("shared.y", lambda: alone(weights.shared, None, BF16_NUM), MOE, "bf16")
    for end, num, tolerance, mode in (("", BF16_NUM, MOE, "bf16"), ("_f32", F32_NUM, MOE_F32, "f32")):
        v.check(f"moe.y{end}", lambda num=num: stage.moe(v["x"].to(num.dtype), weights, config, num), tolerance, mode)


def engram(u: Unit) -> None:
    """Token map, hash constants, row numbers with and without masked tokens, gated sum."""
    v, stage = u.vectors, u.backend.engram
    for name in ("release.multipliers", "release.primes"):
        v.check(name, lambda name=name: _release_constants(name), EXACT)
    beside = u.beside(u.meta["config"])
    if beside is None:
        reason = f"not compared: no configuration {u.meta['config']!r} beside this directory to take weights from"
        for name in sorted(v.tensors):
            if not name.startswith("release."):
                v.leave(name, reason)
        return
    config, token_map = beside.checkpoint.config, beside.token_map
    v.check("token_map", lambda: token_map, EXACT)
    v.check("multipliers", lambda: torch.tensor(config.engram_multipliers), EXACT)
    v.check("primes", lambda: torch.tensor(config.engram_primes), EXACT)
    sizes = torch.tensor(config.engram_primes).flatten(1)
    v.check("offsets", lambda: sizes.cumsum(1) - sizes, EXACT)
    v.check("pad_id", lambda: torch.tensor([config.engram_pad_token_id]), EXACT)

    layer = u.meta["layer"]
    place = config.engram_layer_ids.index(layer)
    weights = stage.Weights.read(beside.checkpoint, f"layers.{layer}.engram.")
    gather = beside.checkpoint.engram_gather(layer)
    ids = token_map[v["ids"].long()]
    pad = token_map[config.engram_pad_token_id]
    for end in ("", "_masked"):
        if f"hash{end}" not in v:
            v.report.skip(v.name, f"hash{end}", "not in this file")
            continue
        with v.needed_for(f"hash{end}"):
            text = v["mask"] if end else torch.ones_like(ids, dtype=torch.bool)
            hashes = stage.row_ids(_history(ids, text, pad, config.engram_max_ngram_size), config)
            v.check(f"hash{end}", lambda h=hashes: h, EXACT)
            rows = gather(v[f"hash{end}"][:, place])
            if not end:
                v.check("rows", lambda r=rows: r, EXACT)
            added = stage.inject(v["stream"], rows, weights, config, BF16_NUM)
            got = torch.where(text[:, None, None], added, v["stream"])  # a masked token takes nothing from the table
            v.check(f"out{end}", lambda got=got: got, BF16, "bf16")
            if not end:
                key, _ = stage.project(rows, weights, config, BF16_NUM)
                gate = stage.gate(v["stream"], key, weights, config).squeeze(-1)
                v.check("gate", lambda got=gate: got, ENGRAM_GATE)


def _history(ids: Tensor, text: Tensor, pad: Tensor, size: int) -> Tensor:
    """Compressed ids [rows, size] of each row's token and those before it, up to the first that is not text."""
    columns, unbroken = [], torch.ones_like(text)
    for back in range(size):
        shifted = torch.nn.functional.pad(ids, (back, 0))[: len(ids)]
        unbroken = unbroken & torch.nn.functional.pad(text, (back, 0), value=False)[: len(ids)]
        columns.append(torch.where(unbroken, shifted, pad))
    return torch.stack(columns, dim=-1)


def _release_constants(name: str) -> Tensor:
    config = replace(ModelConfig.from_dict(small_config()), **_RELEASE)
    return torch.tensor(config.engram_primes if name.endswith("primes") else config.engram_multipliers)


def draft_heads(u: Unit) -> None:
    """Markov correction, confidence, and a greedy chain over them."""
    v, head = u.vectors, u.backend.head
    product = u.backend.ops.Linear
    weights = head.DraftHeads(v["markov.embed"], product(v["markov.head"]), product(v["confidence.weight"]))
    v.check("markov.bias", lambda: head.markov(v["tokens"].long(), weights), F32)
    v.check("confidence", lambda: head.confidence(v["hidden"], v["tokens"].long(), weights), F32)
    with v.needed_for("chain.ids"):
        chain, logits = [v["chain.first"].long()], []
        for base in v["chain.base_logits"].unbind(1):
            logits.append(base + head.markov(chain[-1], weights))
            chain.append(logits[-1].argmax(-1))
        v.check("chain.logits", lambda: torch.stack(logits, 1), F32)
        v.check("chain.ids", lambda: torch.stack(chain, 1), EXACT)


# By the start of the file name: `compressor_r2` is checked by `compressor`.
UNITS: dict[str, Callable[[Unit], None]] = {
    check.__name__: check
    for check in (
        act_quant,
        fp4_act_quant,
        rms_norm,
        rope,
        hyper_connections,
        sparse_attn,
        window_indices,
        compressor,
        indexer,
        gate,
        linear,
        moe,
        engram,
        draft_heads,
    )
}


def check_for(name: str) -> Callable[[Unit], None] | None:
    """The check of the unit file `name`, or None where there is none."""
    return UNITS.get(re.sub(r"_r\d+$", "", name))
