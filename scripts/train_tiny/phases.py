"""The two phases of training: the backbone, then the draft layers against the frozen backbone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from flashstep.config import ModelConfig
from scripts.train_tiny import corpus as text
from scripts.train_tiny import weights as storage
from scripts.train_tiny.learner import Learner
from scripts.train_tiny.twin import Twin, Weights

DENSE_PART = 0.25  # of the backbone's time, in which every row attends to all entries while the indexer learns
WARM_UP, DECAY = 0.02, 0.45  # parts of a phase
ANCHOR_EVERY = 8  # tokens per draft block in training
HARD_PART = 0.5  # of the draft loss: the backbone's best token rather than its distribution
LATER_DRAFT = 0.9  # weight of a draft relative to the one before it
INCONSISTENT = 0.2  # weight of drafts behind a token that greedy decoding would not have written


@dataclass
class Run:
    """What every phase needs."""

    twin: Twin
    config: ModelConfig
    tokenizer: Tokenizer
    training: Tensor  # token stream on the device
    held_out: Tensor
    prompts: list[list[int]]  # held-out prompts as tokens, the begin token first
    batch: int
    length: int
    generator: torch.Generator
    start: float  # time.monotonic() of the process

    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self.start

    def rows(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Random stretches of a stream behind a begin token: inputs and next tokens [batch, length]."""
        starts = torch.randint(len(stream) - self.length, (self.batch,), generator=self.generator)
        places = starts.to(stream.device)[:, None] + torch.arange(self.length, device=stream.device)
        tokens = stream[places].long()
        return F.pad(tokens[:, :-1], (1, 0), value=text.BOS), tokens


class Progress:
    """Time of a phase: how far it is, a line every 20 s, and the last means for the record."""

    def __init__(self, run: Run, end_s: float, name: str) -> None:
        self.run, self.name = run, name
        self.begin_s, self.end_s = run.elapsed(), end_s
        self.steps = self.reported_steps = 0
        self.reported_s = self.begin_s
        self.sums: dict[str, Tensor] = {}
        self.summed = 0
        self.history: list[dict[str, float]] = []

    def advance(self) -> float:
        """Part of the phase's time that is over; the phase's clock starts again once the first steps have compiled."""
        if self.steps == 2:
            self.begin_s = min(self.run.elapsed(), self.end_s - 1e-3)
            self.reported_s, self.reported_steps = self.begin_s, self.steps
        done = (self.run.elapsed() - self.begin_s) / max(self.end_s - self.begin_s, 1e-3)
        return done if self.steps >= 2 else 0.0

    def report(self, **values: Tensor) -> None:
        """Count a step with its figures; `loss` is among them."""
        self.steps += 1
        self.summed += 1
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach()
        if self.steps % 8 == 0 or self.steps == 1:
            values["loss"].item()  # keeps the host within a few steps of the device, so that the clock is true
        if self.run.elapsed() - self.reported_s > 20 or self.run.elapsed() > self.end_s:
            self._print()

    def _print(self) -> None:
        count = max(self.steps - self.reported_steps, 1)
        means = {name: round(float(value) / self.summed, 4) for name, value in self.sums.items()}
        elapsed = self.run.elapsed()
        rate = count * self.run.batch * self.run.length / max(elapsed - self.reported_s, 1e-3)
        print(f"{elapsed:5.0f} s  {self.name} step {self.steps}  {rate:,.0f} tokens/s  {means}", flush=True)
        self.history.append({"s": round(elapsed, 1), "step": self.steps, **means})
        self.sums, self.summed, self.reported_s, self.reported_steps = {}, 0, elapsed, self.steps

    def record(self) -> dict[str, Any]:
        """Steps, end and the printed means."""
        return {"steps": self.steps, "end_s": round(self.run.elapsed(), 1), "history": self.history}


# -- backbone -------------------------------------------------------------------------------------------------------


def train_backbone(
    run: Run, weights: Weights, specs: dict[str, storage.Spec], end_s: float
) -> tuple[Weights, dict[str, Any]]:
    """Next-token training of everything but the draft layers, until `end_s`."""
    names = {name: spec for name, spec in specs.items() if not name.startswith("mtp.")}
    learner = Learner(weights, names, run.twin.device, run.twin.dtype)
    progress = Progress(run, end_s, "backbone")
    while (done := progress.advance()) < 1:
        ids, targets = run.rows(run.training)
        output = run.twin(learner.rounded(), ids, dense=done < DENSE_PART)
        loss = F.cross_entropy(output.logits, targets.flatten())
        (loss + output.index_loss).backward()
        learner.step(schedule(done), output.loads)
        progress.report(loss=loss, index=output.index_loss, busiest=busiest(output.loads))
    return learner.masters(), progress.record()


def schedule(done: float) -> float:
    """Rate relative to its peak when the part `done` of a phase's time is over: up, flat, straight down to 0."""
    return min(1.0, done / WARM_UP + 1e-3, max(0.0, (1 - done) / DECAY))


def busiest(loads: Weights) -> Tensor:
    """Largest load of an expert relative to the mean, over all layers."""
    return torch.stack([load.max() / load.mean() for load in loads.values()]).max()


# -- draft ----------------------------------------------------------------------------------------------------------


def train_draft(
    run: Run, weights: Weights, specs: dict[str, storage.Spec], end_s: float
) -> tuple[Weights, dict[str, Any]]:
    """Draft layers and heads towards the frozen backbone, until `end_s`."""
    twin, block = run.twin, run.config.dspark_block_size
    frozen = {
        name: storage.as_stored(weights[name].to(twin.device), spec.kind).to(
            torch.float32 if spec.kind == "f32" else twin.dtype
        )
        for name, spec in specs.items()
        if not name.startswith("mtp.")
    }
    names = {name: spec for name, spec in specs.items() if name.startswith("mtp.")}
    learner = Learner(weights, names, twin.device, twin.dtype)
    progress = Progress(run, end_s, "draft")
    later = LATER_DRAFT ** torch.arange(block, device=twin.device)
    while (done := progress.advance()) < 1:
        ids, _ = run.rows(run.training)
        with torch.no_grad():
            output = twin(frozen, ids)
        anchors = torch.arange(0, run.length, ANCHOR_EVERY) + torch.randint(
            ANCHOR_EVERY, (run.batch, run.length // ANCHOR_EVERY), generator=run.generator
        )
        anchors = anchors.clamp(max=run.length - block - 2).to(twin.device)
        current = frozen | learner.rounded()
        hidden, logits, loads = twin.draft(current, ids, output.taps, anchors)
        view = DraftView(twin, current, ids, output.logits, anchors, hidden, logits)
        weight = (INCONSISTENT + (1 - INCONSISTENT) * view.consistent) * later
        towards = (1 - HARD_PART) * view.divergence() + HARD_PART * view.distance_to_best()
        loss = (weight * towards).sum() / weight.sum()
        unsure = F.binary_cross_entropy_with_logits(view.confidence(), view.overlap(), weight) / weight.mean()
        (loss + 0.1 * unsure).backward()
        learner.step(schedule(done), loads)
        hits = (view.hits() * view.consistent).sum((0, 1)) / view.consistent.sum((0, 1)).clamp(min=1)
        progress.report(
            loss=loss,
            unsure=unsure,
            **{f"d{i + 1}": hit for i, hit in enumerate(hits)},
            expected=1 + hits.cumprod(0).sum(),
            busiest=busiest(loads),
        )
    return learner.masters(), progress.record()


class DraftView:
    """Drafts beside the backbone's distributions for the same positions: [sequences, anchors, block, ...]."""

    def __init__(
        self,
        twin: Twin,
        weights: Weights,
        ids: Tensor,
        target_logits: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        logits: Tensor,
    ) -> None:
        sequences, tokens = ids.shape
        places = anchors[..., None] + torch.arange(1, logits.shape[2] + 1, device=ids.device)
        rows = places + torch.arange(sequences, device=ids.device)[:, None, None] * tokens
        self.twin, self.weights, self.hidden = twin, weights, hidden
        self.previous = ids.flatten()[rows]
        self.target = torch.log_softmax(target_logits[rows], -1)
        self.draft = torch.log_softmax(logits + twin.markov(weights, self.previous), -1)
        self.best = self.target.argmax(-1)
        followed = (ids.flatten()[(rows + 1).clamp(max=ids.numel() - 1)] == self.best).float()
        # 1 where the tokens before draft i are those that greedy decoding writes: the case that acceptance meets.
        self.consistent = F.pad(followed[..., :-1].cumprod(-1), (1, 0), value=1.0)

    def divergence(self) -> Tensor:
        """KL from the draft to the backbone's distribution."""
        return (self.target.exp() * (self.target - self.draft)).sum(-1)

    def distance_to_best(self) -> Tensor:
        """Cross-entropy of the backbone's best token."""
        return -self.draft.gather(-1, self.best[..., None]).squeeze(-1)

    def overlap(self) -> Tensor:
        """Probability that a sampled draft is accepted."""
        return torch.minimum(self.target, self.draft.detach()).exp().sum(-1).clamp(max=1)

    def confidence(self) -> Tensor:
        """Logits of the confidence head; they do not train the stream they are read from."""
        return self.twin.confidence(self.weights, self.hidden.detach(), self.previous)

    def hits(self) -> Tensor:
        """1 where the greedy draft is the backbone's best token."""
        return (self.draft.detach().argmax(-1) == self.best).float()
