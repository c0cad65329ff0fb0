"""Runs of a backend over recorded tokens: everything it computes on the way, by absolute position.

Prompts go in as one chunk each. Then all requests decode together, one recorded token a step whatever the backend
itself would choose, and draft after every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.model import Model
from flashstep.state import Rows, State

# Rejected rows of the run that verifies several rows at a time; any wrong token does.
_WRONG_BY = 7


@dataclass(frozen=True)
class Tokens:
    """What is fed: a prompt, then one token per decode step; the last one is only predicted."""

    prompt: list[int]
    decode: list[int]

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.decode) - 1

    @property
    def fed(self) -> list[int]:
        """All tokens that are fed, by position."""
        return self.prompt + self.decode[:-1]


@dataclass
class Run:
    """What a backend computes for one prompt; position by position, then draft call by draft call."""

    logits: Tensor  # [positions, vocab] f32
    values: dict[str, Tensor]  # [positions, ...] by traced name
    draft_ids: Tensor  # [calls, block]
    draft_logits: Tensor  # [calls, block, vocab] f32
    confidence: Tensor  # [calls, block] f32
    draft_ffn_in: Tensor  # [calls, draft layers, block, hidden]


@dataclass
class _Collected:
    """The parts of a `Run` as they come."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    drafts: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add(self, name: str, value: Tensor) -> None:
        self.values.setdefault(name, []).append(value)

    def run(self) -> Run:
        values = {name: torch.cat(parts) for name, parts in self.values.items()}
        return Run(values.pop("logits"), values, *(torch.stack(parts) for parts in zip(*self.drafts, strict=True)))


def state_for(
    config: ModelConfig,
    model: Model,
    lengths: Sequence[int],
    rows_per_request: int,
    kind: type[State] = State,
    ring_rows: int | None = None,
) -> State:
    """A state of `kind` with one slot, filled with pages, for each request of `lengths` positions.

    rows_per_request: in one forward; ring_rows: that rings hold, where these are not as many.
    """
    page = 16 * math.lcm(1, *(config.compress_ratios[layer] for layer in config.kv_source_layer_ids))
    state = kind(
        config,
        num_slots=len(lengths),
        num_pages=sum(-(-length // page) for length in lengths),
        page_tokens=page,
        rows_per_request=rows_per_request if ring_rows is None else ring_rows,
        chunk_rows=rows_per_request,
        dtype=model.num.dtype,
        device=model.device,
    )
    for length in lengths:
        state.reserve(state.acquire(), length)  # slots come in order
    return state


def run_all(
    model: Model,
    draft: Draft,
    prompts: Sequence[Tokens],
    advance: Callable[[], None],
    *,
    kind: type[State] = State,
    max_rows: int = 1 << 20,
    ring_rows: int | None = None,
) -> list[Run]:
    """Feed all `prompts`; `advance` is called after each prompt and each step.

    kind: of the state that the model reads. max_rows: of one forward; longer prompts come in chunks. ring_rows: as of
    `state_for`.
    """
    config = model.config
    longest = min(max_rows, max(len(p.prompt) for p in prompts))
    state = state_for(config, model, [len(p.fed) for p in prompts], longest, kind, ring_rows)
    collected = [_Collected() for _ in prompts]

    def forward(parts: list[tuple[int, int, list[int]]]) -> None:
        rows = Rows.of(parts, model.device)
        traced: list[tuple[str, Tensor]] = []
        output = model.forward(state, rows, lambda name, value: traced.append((name, value)))
        draft.observe(state, rows, output.taps)
        traced += [("final_hidden", output.hidden), ("main_hidden", output.taps)]
        traced.append(("logits", model.logits(output.hidden)))
        owners = [slot for slot, _, _ in parts]
        requests = iter(owners * len(traced))
        for name, value in traced:
            if name.endswith(".candidates"):  # traced once per request, in their order
                collected[next(requests)].add(name, block_ids(value, config))
                continue
            for span in rows.spans:
                collected[span.slot].add(name, value[span.first : span.end].cpu())

    for slot, tokens in enumerate(prompts):
        for first in range(0, len(tokens.prompt), max_rows):
            forward([(slot, first, tokens.prompt[first : first + max_rows])])
        advance()
    for step in range(max(p.steps for p in prompts)):
        alive = [slot for slot, p in enumerate(prompts) if step < p.steps]
        for first in range(0, len(alive), max_rows):
            part = alive[first : first + max_rows]
            forward([(slot, len(prompts[slot].prompt) + step, [prompts[slot].decode[step]]) for slot in part])
        inputs: list[Tensor] = []
        proposal = draft.propose(
            state,
            torch.tensor(alive, device=model.device),
            torch.tensor([len(prompts[slot].prompt) + step for slot in alive], device=model.device),
            torch.tensor([prompts[slot].decode[step + 1] for slot in alive], device=model.device),
            lambda _, logits: logits.argmax(-1),
            trace=lambda _, value: inputs.append(value),  # noqa: B023 - called before the next step
        )
        # A backend of kernels traces nothing.
        untraced = torch.empty(len(alive), 0)
        ffn_in = torch.stack(inputs).unflatten(1, (len(alive), -1)).transpose(0, 1) if inputs else untraced
        parts = (proposal.tokens, proposal.logits, proposal.confidence, ffn_in)
        for i, slot in enumerate(alive):
            collected[slot].drafts.append(tuple(part[i].cpu() for part in parts))
        advance()
    return [part.run() for part in collected]


def chunked_logits(model: Model, tokens: list[int], sizes: Sequence[int]) -> Tensor:
    """Logits [positions, vocab] of `tokens` fed in chunks of `sizes`, over and over."""
    state = state_for(model.config, model, [len(tokens)], max(sizes))
    found, start, turn = [], 0, 0
    while start < len(tokens):
        chunk = tokens[start : start + sizes[turn % len(sizes)]]
        output = model.forward(state, Rows.of([(0, start, chunk)], model.device))
        found.append(model.logits(output.hidden).cpu())
        start, turn = start + len(chunk), turn + 1
    return torch.cat(found)


def verified_logits(model: Model, tokens: list[int]) -> Tensor:
    """Logits of `tokens` fed as verification does: several rows, of which the last are wrong and taken back."""
    config, width = model.config, model.config.dspark_block_size + 1
    state = state_for(config, model, [len(tokens) + width], width)
    found, start, turn = [], 0, 0
    while start < len(tokens):
        accepted = min(1 + turn % width, len(tokens) - start)
        rows = tokens[start : start + accepted]
        wrong = [(token + _WRONG_BY) % config.vocab_size for token in (rows * width)[: width - accepted]]
        output = model.forward(state, Rows.of([(0, start, rows + wrong)], model.device))
        found.append(model.logits(output.hidden[:accepted]).cpu())
        start, turn = start + accepted, turn + 1
    return torch.cat(found)


def block_ids(candidates: Tensor, config: ModelConfig) -> Tensor:
    """Block numbers [rows, candidate_topk_blocks], ascending, -1 pads, of entries [rows, entries] bool."""
    size, limit = config.candidate_block_size, config.candidate_topk_blocks
    padded = torch.nn.functional.pad(candidates, (0, -candidates.shape[-1] % size))
    blocks = padded.unflatten(-1, (-1, size)).any(-1)
    numbers = torch.where(blocks, torch.arange(blocks.shape[-1], device=blocks.device), blocks.shape[-1])
    numbers = torch.nn.functional.pad(numbers, (0, limit), value=blocks.shape[-1]).sort(-1).values[:, :limit]
    return numbers.masked_fill(numbers == blocks.shape[-1], -1).cpu()
