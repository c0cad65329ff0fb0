"""The specialized kernels behind the interface of `Model` and `Draft`: any rows in, values out, the host decides.

Serves requests about which the host has to decide between two steps, and prompts, in chunks of up to `MAX_ROWS` rows;
longer ones where the portable kernels take them. Steady decoding does not come through here (`graph.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashstep import jit
from flashstep.draft import Pick, Proposal
from flashstep.formats import Numerics, fp8_quantize, ue8m0_encode
from flashstep.jit import Launch
from flashstep.model import Output, Trace, untraced
from flashstep.packed_state import PackedState
from flashstep.packed_weights import Weights
from flashstep.portable.model import PortableDraft, PortableModel
from flashstep.specialized.plan import MAX_ROWS, BlockInputs, Plan, RowInputs
from flashstep.state import Rows, State

# A forward runs in the smallest of these that its rows fit in; the rest of the rows are inactive.
BUCKETS = (1, 8, 16, 48, 96, MAX_ROWS)


def bucket(rows: int, most: int) -> int:
    """The bucket of `rows` rows; ValueError above `most`."""
    if rows > most:
        raise ValueError(f"{rows} rows in one forward: at most {most}; split the prompt into chunks")
    return min([size for size in BUCKETS if size >= rows and size <= most], default=most)


class Chain:
    """A list of launches that is run again and again: on a GPU as one graph from the second time on."""

    def __init__(self, launches: list[Launch], device: torch.device) -> None:
        self.launches = launches
        self._emulated = jit.emulated(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> None:
        """Enqueue the launches."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self._warm and not self._emulated:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for launch in self.launches:
                    launch()
            self._graph.replay()
            return
        for launch in self.launches:
            launch()
        self._warm = True


class SpecializedModel:
    """The backbone of one rank. All ranks of a world make the same calls."""

    def __init__(
        self,
        weights: Weights,
        token_map: Tensor,
        *,
        wgmma: bool = True,
        max_rows: int = MAX_ROWS,
        prompts: PortableModel | None = None,
    ) -> None:
        """token_map: [vocab] compressed Engram ids. wgmma: the product of SM90 where there is one.

        max_rows: of one forward of these kernels; fewer save buffers and compiled variants. prompts: serves forwards
        of more rows, over the same weights and states.
        """
        self.weights, self.config, self.device = weights, weights.config, weights.device
        self.num = Numerics()
        self.token_map = token_map.to(self.device)
        self._wgmma, self.max_rows, self.prompts = wgmma, max_rows, prompts
        self._plans: dict[int, Plan] = {}
        self._chains: dict[tuple[int, str, int], tuple[Chain, RowInputs, Tensor]] = {}

    def plan(self, state: State) -> Plan:
        """The chains over `state`, made at the first use."""
        if not isinstance(state, PackedState):
            raise TypeError(f"specialized kernels read a PackedState, found {type(state).__name__}")
        if id(state) not in self._plans:
            self._plans[id(state)] = Plan(
                self.weights, state, self.token_map, wgmma=self._wgmma, max_rows=self.max_rows
            )
        return self._plans[id(state)]

    def chain(
        self, state: State, kind: str, count: int, build: Callable[[Plan, RowInputs, Tensor], list[Launch]]
    ) -> tuple[Chain, RowInputs, Tensor]:
        """The chain `kind` for `count` rows over `state`, its row inputs, and a fourth int32 [rows] for its use."""
        key = (id(state), kind, count)
        if key not in self._chains:
            plan = self.plan(state)
            rows, last = plan.dummy_rows(count), torch.zeros(count, dtype=torch.int32, device=self.device)
            self._chains[key] = Chain(build(plan, rows, last), self.device), rows, last
        return self._chains[key]

    @torch.inference_mode()
    def forward(self, state: State, rows: Rows, trace: Trace = untraced) -> Output:
        """Run `rows`, which may be of several requests, and write the caches. Pages must be reserved."""
        if self.prompts is not None and len(rows.tokens) > self.max_rows:
            return self.prompts.forward(state, rows, trace)
        state.check(rows)
        plan, count = self.plan(state), len(rows.tokens)
        size = bucket(count, plan.max_rows)
        chain, inputs, _ = self.chain(state, "forward", size, lambda p, r, _: p.forward(r))
        fill(inputs, rows.tokens, rows.positions, rows.slots)
        chain()
        hidden = from_fragments(plan.hidden(size).values)[:count]
        return Output(hidden.clone(), plan.taps(size)[:count].clone())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab of the rank] float32 of `Output.hidden` [rows, hidden]."""
        plan = next(iter(self._plans.values()))
        parts = []
        for part in hidden.split(plan.max_rows):
            size = bucket(len(part), plan.max_rows)
            chain, _, _ = self.chain(plan.state, "logits", size, lambda p, r, _: p.logits(r.count))
            to_fragments(part, plan.hidden(size).values)
            chain()
            parts.append(plan.logit_rows(size)[: len(part)].clone())
        return torch.cat(parts) if parts else hidden.new_empty(0, self.weights.vocab, dtype=torch.float32)


class SpecializedDraft:
    """The draft layers of one rank, for requests whose drafts the host picks."""

    def __init__(self, model: SpecializedModel) -> None:
        self.model, self.config = model, model.config
        self._prompts = None if model.prompts is None else PortableDraft(model.prompts)
        self._heads = model.weights.draft.heads
        self._markov_head = model.weights.draft.markov_head.float()

    @torch.inference_mode()
    def observe(self, state: State, rows: Rows, taps: Tensor) -> None:
        """Write what committed `rows` leave in the draft's windows; `taps` as `Output.taps`."""
        if self._prompts is not None and len(rows.tokens) > self.model.max_rows:
            self._prompts.observe(state, rows, taps)
            return
        model, plan = self.model, self.model.plan(state)
        weights = model.weights
        width = weights.draft.main_proj.columns
        mine = taps[:, weights.rank * width : (weights.rank + 1) * width]
        for first in range(0, len(mine), plan.max_rows):
            part = slice(first, first + plan.max_rows)
            size = bucket(len(mine[part]), plan.max_rows)
            chain, inputs, _ = model.chain(state, "observe", size, lambda p, r, _: p.observe(r))
            fill(inputs, rows.tokens[part], rows.positions[part], rows.slots[part])
            quantize_fragments(mine[part], plan.tap_fragments(size).codes, plan.tap_fragments(size).scales)
            chain()

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
        """As `Draft.propose`."""
        size, plan = self.config.dspark_block_size, self.model.plan(state)
        per_call = plan.max_rows // size
        hidden, base = [], []
        for first in range(0, len(slots), per_call):
            part = slice(first, first + per_call)
            requests = len(slots[part])
            rows = requests * size
            blocks = -(-bucket(rows, plan.max_rows) // size) if rows > size else 1
            chain, inputs, ends = self.model.chain(
                state, "draft", min(blocks, per_call) * size, lambda p, r, e: p.draft(BlockInputs(r, e))
            )
            tokens = torch.full((requests, size), self.config.dspark_noise_token_id, device=self.model.device)
            tokens[:, 0] = anchors[part]
            positions = last[part].unsqueeze(-1) + torch.arange(1, size + 1, device=self.model.device)
            fill(inputs, tokens.flatten(), positions.flatten(), slots[part].repeat_interleave(size))
            ends[:rows] = last[part].repeat_interleave(size)
            chain()
            hidden.append(plan.draft_hidden(inputs.count)[:rows].clone())
            base.append(plan.logit_rows(inputs.count)[:rows].clone())
        states = torch.cat(hidden).unflatten(0, (-1, size))
        scores = torch.cat(base).unflatten(0, (-1, size))
        previous, chosen, logits, confidence = anchors, [], [], []
        for place in range(size if count is None else count):
            embedded = self._heads.embed[previous].float()
            logits.append(scores[:, place] + embedded @ self._markov_head.T)
            both = torch.cat((states[:, place].float(), embedded), dim=-1)
            confidence.append(both @ self._heads.confidence.float())
            previous = pick(place, logits[-1])
            chosen.append(previous)
        return Proposal(*(torch.stack(x, dim=1) for x in (chosen, logits, confidence)))


# -- values in and out ------------------------------------------------------------------------------------------------


def fill(inputs: RowInputs, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Put rows into `inputs`; those behind them become inactive."""
    count = len(tokens)
    inputs.slot[count:] = -1
    inputs.token[count:] = 0
    inputs.position[count:] = 0
    inputs.token[:count], inputs.position[:count], inputs.slot[:count] = tokens, positions, slots


def from_fragments(values: Tensor) -> Tensor:
    """[8 * tiles, columns] of bf16 fragments [tiles, columns / 8, 8, 8]."""
    return values.transpose(1, 2).flatten(2).flatten(0, 1)


def to_fragments(rows: Tensor, values: Tensor) -> None:
    """Write `rows` [n, columns] into bf16 fragments; the rest of the last tile becomes zero."""
    tiles, pieces = values.shape[:2]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 8 * tiles - len(rows)))
    values.copy_(padded.view(tiles, 8, pieces, 8).transpose(1, 2))


def quantize_fragments(rows: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `rows` [n, columns], quantized, into fp8 fragments; the rest of the last tile becomes zero."""
    tiles, pieces = codes.shape[:2]
    quantized, scale = fp8_quantize(torch.nn.functional.pad(rows, (0, 0, 0, 8 * tiles - len(rows))))
    codes.copy_(quantized.view(torch.uint8).view(tiles, 8, pieces, 16).transpose(1, 2))
    scales.copy_(ue8m0_encode(scale).view(tiles, 8, -1).transpose(1, 2))
