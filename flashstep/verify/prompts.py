"""End to end: runs of whole prompts in each recorded mode, compared with the prompt files and with each other.

A prompt file is a prompt, tokens to feed, and what one or more modes made of them: bf16 under plain names, f32 under
`f32.`. Runs without quantizers of several prompts share a file, under the prompt's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.formats import Numerics
from flashstep.model import Model
from flashstep.verify import tolerances as tol
from flashstep.verify.backends import Backend
from flashstep.verify.files import Vectors
from flashstep.verify.runs import Run, Tokens, chunked_logits, run_all, verified_logits

BF16, F32, NOQUANT = "bf16", "f32", "noquant"
NUMERICS = {BF16: Numerics(), F32: Numerics(torch.float32), NOQUANT: Numerics(torch.float32, quantize=False)}
# Quantities besides logits and drafts that a mode records; one of these that a file lacks is reported as skipped.
_SELECTIONS = ("router_idx", "index_sel", "candidate_blocks")
_COEFFICIENTS = tuple(f"hc_{kind}_{part}" for kind in ("attn", "ffn") for part in ("pre", "post", "comb"))
_SNAPSHOTS = ("stream", "attn_in", "attn_out", "ffn_in", "ffn_out", "final_hidden")
_RECORDED = {
    BF16: (
        *_SELECTIONS,
        "router_w",
        "draft_router_idx",
        "engram_hash",
        *_COEFFICIENTS,
        *(f"snap.{name}" for name in (*_SNAPSHOTS, "main_hidden")),
    ),
    F32: (*_SELECTIONS, *(f"snap.{name}" for name in _SNAPSHOTS)),
    NOQUANT: _SELECTIONS[:2],
}
_CHUNK = 7  # odd, so that chunks also end inside groups of compressed tokens


@dataclass(frozen=True)
class Recorded:
    """What one mode recorded of one prompt: a file, and what stands in front of the names in it."""

    vectors: Vectors
    prefix: str
    tokens: Tokens

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.vectors

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[self.prefix + name]


def tokens_of(vectors: Vectors) -> Tokens:
    """The tokens of a prompt file."""
    return Tokens(vectors["prompt"].tolist(), vectors["decode_tokens"].tolist())


@dataclass
class EndToEnd:
    """Comparisons of one mode under one configuration."""

    mode: str
    config: ModelConfig
    model: Model
    draft: Draft
    backend: Backend
    hc_layer: int | None  # whose hyper-connection coefficients are recorded
    advance: Callable[[], None]

    def check(self, recorded: Mapping[str, Recorded]) -> None:
        """Run every prompt in this mode and compare it with what was recorded."""
        self.limits = self._limits(recorded)
        runs = run_all(
            self.model,
            self.draft,
            [r.tokens for r in recorded.values()],
            self.advance,
            kind=self.backend.state,
            max_rows=self.backend.max_rows,
            ring_rows=self.backend.ring_rows,
        )
        medians = []
        for record, run in zip(recorded.values(), runs, strict=True):
            errors = self._logits(record, run)
            medians.append(float(errors.median()) if len(errors) else None)
            agrees = torch.full((len(record.tokens.fed),), self.mode != F32)
            if self.mode == F32 and len(errors):
                agrees = errors < tol.AGREES
            self._drafts(record, run)
            if self.backend.whole_only:
                for name in (n for n in _RECORDED[self.mode] if n in record):
                    record.vectors.leave(record.prefix + name, self.backend.whole_only)
                continue
            self._choices(record, run, agrees)
            self._snapshots(record, run, agrees)
            for name in _RECORDED[self.mode]:
                if name not in record:
                    record.vectors.report.skip(record.vectors.name, record.prefix + name, "not in this file")
        known = [median for median in medians if median is not None]
        if self.mode == F32 and known:
            short = (len(known) + 1) // 2 - sum(median < tol.AGREES for median in known)
            files = ", ".join(r.vectors.name for r in recorded.values())
            report = next(iter(recorded.values())).vectors.report
            report.add(files, "prompts that agree", self.mode, {"prompts short of half": max(short, 0)}, tol.F32_HALF)
        if self.mode == NOQUANT:
            self.check_cuts(recorded, dict(zip(recorded, runs, strict=True)))

    def check_cuts(self, recorded: Mapping[str, Recorded], runs: Mapping[str, Run]) -> None:
        """The same logits however a sequence is cut: chunks of a prompt, several rows with rejected ones behind.

        They are compared with `runs`, or with one chunk where there is no run.
        """
        for name, record in recorded.items():
            report, fed = record.vectors.report, record.tokens.fed
            whole = runs[name].logits if name in runs else chunked_logits(self.model, fed, [len(fed)])
            for cut, logits in (
                (f"logits in chunks of {_CHUNK}", chunked_logits(self.model, fed, [_CHUNK])),
                ("logits verified in blocks", verified_logits(self.model, fed)),
            ):
                report.compare(record.vectors.name, record.prefix + cut, self.mode, logits, whole, tol.SAME_LOGITS)
                self.advance()

    def _limits(self, recorded: Mapping[str, Recorded]) -> tol.EndToEnd:
        """Dense tolerances where no run can choose: every expert active, every visible entry and block kept."""
        config = self.config
        longest = max(len(r.tokens.fed) for r in recorded.values())
        entries = {layer: longest // config.compress_ratios[layer] for layer in config.index_source_layer_ids}
        blocks = config.candidate_topk_blocks * config.candidate_block_size
        chooses = (
            config.num_experts_per_tok < config.n_routed_experts
            or config.dspark_num_experts_per_tok < config.dspark_n_routed_experts
            or any(count > config.index_topk for count in entries.values())
            or entries.get(config.candidate_source_layer_id, 0) > blocks
        )
        return tol.FREE if chooses else tol.DENSE

    # -- logits and drafts --------------------------------------------------------------------------------------------

    def _logits(self, record: Recorded, run: Run) -> Tensor:
        """Compare all logits; the error of each row, empty where none are recorded."""
        names = [name for name in ("prefill_logits", "decode_logits") if name in record]
        for name in {"prefill_logits", "decode_logits"} - set(names):
            record.vectors.report.skip(record.vectors.name, record.prefix + name, "not in this file")
        if not names:
            return torch.empty(0)
        length = len(record.tokens.prompt)
        part = {"prefill_logits": run.logits[:length], "decode_logits": run.logits[length:]}
        got, want = torch.cat([part[name] for name in names]), torch.cat([record[name] for name in names]).float()
        limit = {BF16: self.limits.logits, F32: self.limits.f32_logits, NOQUANT: tol.NOQUANT}[self.mode]
        self._compare(record, " + ".join(names), got, want, limit)
        if len(names) < 2 or got.shape != want.shape:
            return torch.empty(0)
        return (got - want).abs().amax(-1)

    def _drafts(self, record: Recorded, run: Run) -> None:
        """Compare draft calls, each up to the first id that differs: later places follow another prefix."""
        report, vectors = record.vectors.report, record.vectors
        calls, block = run.draft_ids.shape
        reached = torch.zeros(calls, block, dtype=torch.bool)
        reached[:, 0] = True
        if "draft_ids" in record:
            ids = record["draft_ids"].long()
            if ids.shape != (calls, block + 1):
                self._compare(record, "draft_ids", run.draft_ids, ids, tol.EXACT)
                return
            start = torch.tensor(record.tokens.decode[1:])
            self._compare(record, "draft_ids (first column)", start, ids[:, 0], tol.CHAIN_START)
            same = run.draft_ids == ids[:, 1:]
            reached[:, 1:] = same.cumprod(1)[:, :-1].bool()
            if self.mode == NOQUANT:
                self._compare(record, "draft_ids", run.draft_ids, ids[:, 1:], tol.EXACT)
            else:
                pair = torch.stack((run.draft_ids, ids[:, 1:]), dim=-1)
                chosen = run.draft_logits.gather(-1, pair)
                gaps = (chosen[..., 0] - chosen[..., 1])[reached & ~same]
                gap = float(gaps.max()) if len(gaps) else 0.0
                report.add(
                    vectors.name,
                    self._plain(record.prefix + "draft_ids"),
                    self.mode,
                    {"logit gap": gap},
                    self.limits.draft_ids,
                )
        else:
            report.skip(vectors.name, record.prefix + "draft_ids", "not in this file; first places compared alone")
        for name, got, limit, exact in (
            ("draft_logits", run.draft_logits, self.limits.drafts, tol.NOQUANT),
            ("confidence", run.confidence, self.limits.confidence, tol.NOQUANT_CONFIDENCE),
        ):
            if name not in record:
                report.skip(vectors.name, record.prefix + name, "not in this file")
                continue
            want = record[name].float()
            count = len(want)
            if want.shape[1:] != got.shape[1:] or count > calls:
                self._compare(record, name, got, want, limit)
                continue
            mask = reached[:count]
            self._compare(record, name, got[:count][mask], want[mask], exact if self.mode == NOQUANT else limit)

    # -- choices ------------------------------------------------------------------------------------------------------

    def _routes(self, run: Run) -> tuple[Tensor, Tensor]:
        """Chosen experts and weights [layers, positions, k]."""
        routes = [
            self.backend.moe.route(run.values[f"layer.{number}.ffn_in"], layer.block.ffn, self.config)
            for number, layer in enumerate(self.model.layers)
        ]
        chosen, weights = zip(*routes, strict=True)
        return torch.stack(chosen).cpu(), torch.stack(weights).cpu()

    def _choices(self, record: Recorded, run: Run, agrees: Tensor) -> None:
        config = self.config
        sets: list[tuple[str, Tensor, tol.Tolerance, str, float]] = []
        chosen, weights = self._routes(run)
        sets.append(("router_idx", chosen, self.limits.router, "router_margin", tol.ROUTER_MARGIN))
        if config.index_source_layer_ids:
            index = torch.stack([run.values[f"layer.{n}.index_sel"] for n in config.index_source_layer_ids])
            sets.append(("index_sel", index, self.limits.index, "index_margin", tol.INDEX_MARGIN))
        for name, got, limit, margin, clear in sets:
            if name in record:
                self._choice(
                    record,
                    name,
                    got.sort(-1).values,
                    record[name].long().sort(-1).values,
                    limit,
                    agrees,
                    (margin, clear),
                )
        candidates = f"layer.{config.candidate_source_layer_id}.candidates"
        if "candidate_blocks" in record and candidates in run.values:
            want = record["candidate_blocks"].long().sort(-1).values
            got = run.values[candidates].sort(-1).values
            width = max(got.shape[-1], want.shape[-1])
            got, want = (torch.nn.functional.pad(x, (width - x.shape[-1], 0), value=-1) for x in (got, want))
            self._choice(record, "candidate_blocks", got, want, self.limits.candidates, agrees, None)
        if "router_w" in record:
            want, got = record["router_w"], weights
            if "router_idx" in record and want.shape == got.shape:
                alike = (chosen.sort(-1).values == record["router_idx"].long().sort(-1).values).all(-1)
                want, got = want[alike], got[alike]
            # By size, since experts of nearly equal scores may change places in the recorded order.
            got, want = got.sort(-1).values, want.sort(-1).values
            self._compare(record, "router_w", got, want, self.limits.router_weights)
        if "draft_router_idx" in record:
            experts = [
                self.backend.moe.route(run.draft_ffn_in[:, layer].flatten(0, 1), block.ffn, config)[0].cpu()
                for layer, block in enumerate(self.draft.blocks)
            ]
            got = torch.stack([e.unflatten(0, (len(run.draft_ids), -1)) for e in experts], dim=1).sort(-1).values
            want = record["draft_router_idx"].long().sort(-1).values
            limit = self.limits.draft_router if self.mode == BF16 else tol.F32_SELECTIONS
            self._compare(record, "draft_router_idx", got, want, limit)
        if "engram_hash" in record and config.engram_layer_ids:
            self._compare(record, "engram_hash", run.values["engram_hash"], record["engram_hash"].long(), tol.EXACT)

    def _choice(
        self,
        record: Recorded,
        name: str,
        got: Tensor,
        want: Tensor,
        limit: tol.Tolerance,
        agrees: Tensor,
        margin: tuple[str, float] | None,
    ) -> None:
        """Compare sorted sets [..., positions, k]: all in rows that met no flip, or by how far they may differ."""
        if self.mode != BF16 or got.shape != want.shape:
            if got.shape == want.shape:
                got, want = got[..., agrees, :], want[..., agrees, :]
            self._compare(record, name, got, want, tol.F32_SELECTIONS if self.mode == F32 else tol.EXACT)
            return
        clear = torch.zeros(got.shape[:-1], dtype=torch.bool)
        if margin is not None and margin[0] in record:
            clear = record[margin[0]] > margin[1]
        measured = {
            measure: float(((got != want).any(-1) & clear).sum())
            if measure == "clear rows differing"
            else tol.MEASURES[measure](got, want)
            for measure in limit.limits
        }
        vectors = record.vectors
        vectors.report.add(vectors.name, self._plain(record.prefix + name), self.mode, measured, limit)

    # -- intermediate values ------------------------------------------------------------------------------------------

    def _snapshots(self, record: Recorded, run: Run, agrees: Tensor) -> None:
        config, report, vectors = self.config, record.vectors.report, record.vectors
        self._coefficients(record, run)
        snapshots = [name for name in vectors.tensors if name.startswith(f"{record.prefix}snap.")]
        if not snapshots:
            return
        if "snap_pos" not in record:
            for name in snapshots:
                vectors.leave(name, "needs snap_pos, which is not in this file")
            return
        positions = record["snap_pos"].long()
        kept = agrees[positions]
        if not bool(kept.any()):
            for name in snapshots:
                vectors.leave(name, "not compared: a quantizer or a choice has flipped before every snapshot")
            return
        at = positions[kept]
        layers = range(config.num_hidden_layers)
        streams = [run.values[f"layer.{n}.stream_in"] for n in layers]
        streams.append(run.values[f"layer.{config.num_hidden_layers - 1}.stream_out"])
        computed = {"stream": torch.stack([s[at] for s in streams])}
        for name in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
            computed[name] = torch.stack([run.values[f"layer.{n}.{name}"][at] for n in layers])
        for name in ("final_hidden", "main_hidden"):
            computed[name] = run.values[name][at].unsqueeze(0)
        for name, got in computed.items():
            if f"snap.{name}" not in record:
                continue
            want = record[f"snap.{name}"]
            want = want[None, kept] if name.endswith("_hidden") else want[:, kept]
            if self.mode != BF16 or got.shape != want.shape:
                self._compare(record, f"snap.{name}", got, want, tol.F32_VALUES)
            elif name.endswith("_out"):
                self._compare(record, f"snap.{name}", got, want, self.limits.output)
            else:
                first, last = tol.DENSE_STREAM if self.limits is tol.DENSE else tol.FREE_STREAM
                grown = torch.linspace(first, last, len(got)) if len(got) > 1 else torch.tensor([last])
                shares = [
                    tol.MEASURES["rel rms"](g, w) / float(limit) for g, w, limit in zip(got, want, grown, strict=True)
                ]
                report.add(
                    vectors.name,
                    self._plain(f"{record.prefix}snap.{name}"),
                    self.mode,
                    {"of layer limit": max(shares)},
                    self.limits.stream,
                )

    def _coefficients(self, record: Recorded, run: Run) -> None:
        present = [name for name in _COEFFICIENTS if name in record]
        if not present:
            return
        if self.hc_layer is None or not 0 <= self.hc_layer < self.config.num_hidden_layers:
            for name in present:
                record.vectors.leave(record.prefix + name, "index.json does not say of which layer (hc_layer)")
            return
        prefix, block = f"layer.{self.hc_layer}.", self.model.layers[self.hc_layer].block
        before = run.values.get(prefix + "stream_engram", run.values[prefix + "stream_in"])
        attn = self.backend.boundary.mixes(before, block.hc_attn, self.config)
        ffn = self.backend.boundary.mixes(run.values[prefix + "stream_mid"], block.hc_ffn, self.config)
        for name, got in zip(_COEFFICIENTS, (*attn, *ffn), strict=True):
            if name in present:
                self._compare(record, name, got, record[name], self.limits.coefficients)

    def _compare(self, record: Recorded, name: str, got: Tensor, want: Tensor, limit: tol.Tolerance) -> None:
        vectors = record.vectors
        vectors.report.compare(vectors.name, self._plain(record.prefix + name), self.mode, got.cpu(), want, limit)

    def _plain(self, name: str) -> str:
        """Without the mode's own prefix, which the row states apart; a prompt's name stays."""
        return name.removeprefix("f32.")
