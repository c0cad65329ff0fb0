"""Decoding slots on the device, and the launches that verify drafts, draw tokens and report them, without the host.

Owns the state of the slots (`SlotState`), the buffers between the kernels (`Workspace`), the records that the host
polls (`Ring`) and the launches of `slots.cu`, `accept.cu` and `filter.cu`. A step is `begin`, the backbone and head
(others), then `accept`, `commit`, and the draft (`stages/head/cuda.py` chooses its tokens). `reference.py` says what is
computed.

Served are temperature, top-k, top-p, min-p and every acceptance rule, side by side in a batch. Penalties, logit bias
and grammars are not; such requests take the host's path.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashstep import jit
from flashstep.params import SamplingParams
from flashstep.settings import RULES, Rule

THREADS = 256
_RESIDENT = 264  # blocks that are enough to keep the multiprocessors busy
_MOST_CLUSTER = 8  # blocks of a row of logits
_MOST_TOKENS = 1 << 14  # of a block: what the masses of a histogram have room for (`filter.cu`)
_MOST_RACE_BLOCKS = 32  # blocks that draw one token: a record for each lane of a warp
RULE_CODES: dict[Rule, int] = {rule: code for code, rule in enumerate(RULES)}
_BINS = 256  # of a histogram of that search
_PROGRESS_WORDS = 34  # of a row between the launches of that search
FILTER_SHARED = 2 * 3 * _BINS * 4 + 512  # bytes: histograms of three words a bin for both searches, and small change
SMALL_SHARED = 256  # bytes of shared memory of the kernels that keep no logits there
RECORD_HEADER = 6  # words: step, slot, count, accepted, drafted, failed
MAX_PEERS = 8

_SLOTS = [
    ("position", "const i32*"),
    ("num_drafts", "const i32*"),
    ("seed", "const u64*"),
    ("temperature", "const float*"),
    ("min_p", "const float*"),
    ("rule", "const i32*"),
    ("synthetic_words", "const i64*"),
    ("draft_stats", "const float*"),
    ("draft_logits", "const float*"),
]
_ACCEPT = jit.Params(
    "Accept",
    [
        *_SLOTS,
        ("row_token", "const i32*"),
        ("row_slot", "const i32*"),
        ("logits", "const float*"),
        ("rows", "const u32*"),
        ("rows_out", "u32*[8]"),
        ("excess", "const float*"),
        ("excess_out", "float*[8]"),
        ("races_out", "u32*[8]"),
        ("decisions", "i32*"),
        ("first_token", "int"),
        ("num_rows", "int"),
        ("num_places", "int"),
        ("rows_per_request", "int"),
    ],
)
ACCEPT = jit.Source(
    "stages/accept/accept.cu",
    {"weigh": _ACCEPT, "excess": _ACCEPT, "race": _ACCEPT},
    hot=("weigh", "excess", "race"),
)
_FILTER = jit.Params(
    "Filter",
    [
        ("temperature", "const float*"),
        ("top_k", "const i32*"),
        ("top_p", "const float*"),
        ("min_p", "const float*"),
        ("row_token", "const i32*"),
        ("row_slot", "const i32*"),
        ("logits", "const float*"),
        ("rows", "const u32*"),
        ("rows_out", "u32*[8]"),
        ("histograms", "const u32*"),
        ("histograms_out", "u32*[8]"),
        ("progress", "u32*"),
        ("level", "int"),
        ("first_token", "int"),
        ("num_rows", "int"),
        ("rows_per_request", "int"),
    ],
)
FILTER = jit.Source("stages/accept/filter.cu", {"narrow": _FILTER, "cut": _FILTER}, hot=("narrow", "cut"))
SLOTS = jit.Source(
    "stages/accept/slots.cu",
    {
        "begin": jit.Params(
            "Begin",
            [
                ("step", "i32*"),
                ("batch_slot", "const i32*"),
                ("position", "const i32*"),
                ("tokens", "const i32*"),
                ("num_drafts", "const i32*"),
                ("failed", "const i32*"),
                ("row_token", "i32*"),
                ("row_position", "i32*"),
                ("row_slot", "i32*"),
                ("num_places", "int"),
                ("rows_per_request", "int"),
                ("max_model_len", "int"),
            ],
        ),
        "commit": jit.Params(
            "Commit",
            [
                ("step", "const i32*"),
                ("position", "i32*"),
                ("tokens", "i32*"),
                ("num_drafts", "i32*"),
                ("failed", "i32*"),
                ("row_slot", "const i32*"),
                ("decisions", "const i32*"),
                ("races", "const u32*"),
                ("committed_slot", "i32*"),
                ("draft_token", "i32*"),
                ("draft_position", "i32*"),
                ("draft_slot", "i32*"),
                ("draft_last", "i32*"),
                ("ring", "u32*"),
                ("ring_length", "int"),
                ("ring_places", "int"),
                ("noise_token", "int"),
                ("num_places", "int"),
                ("rows_per_request", "int"),
                ("max_model_len", "int"),
            ],
        ),
    },
    hot=("begin", "commit"),
)


# ---- state ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotState:
    """What a decoding request is to the device; one row per slot, all arrays contiguous.

    A request's text has position + 1 tokens: caches hold `position` of them, the last one is tokens[0]. The kernels
    advance position, tokens, num_drafts, failed and the draft's figures; the host writes a slot's row with `load`.
    """

    step: Tensor  # [1] i32: steps begun since the allocation
    position: Tensor  # [slots] i32: positions computed, that is the position of row 0
    tokens: Tensor  # [slots, block + 1] i32: the last token, then the drafts behind it
    num_drafts: Tensor  # [slots] i32: how many of them the next step verifies
    failed: Tensor  # [slots] i32: 1 after logits from which nothing can be drawn; the slot then rests
    seed: Tensor  # [slots] i64: the 64 bits of the seed
    temperature: Tensor  # [slots] f32; 0 is greedy
    top_k: Tensor  # [slots] i32; 0 is off
    top_p: Tensor  # [slots] f32; 1 is off
    min_p: Tensor  # [slots] f32; 0 is off
    rule: Tensor  # [slots] i32: RULE_CODES
    synthetic_words: Tensor  # [slots, block] i64: rule "synthetic": a draft stands if its random word is below
    draft_stats: Tensor  # [slots, block, 4] f32: maximum, sum of exponentials, the draft's logit; u32 1 if all finite
    draft_logits: Tensor  # [slots, block, vocab_local] f32: q before temperature, of the drafts in `tokens`

    @classmethod
    def allocate(cls, slots: int, block: int, vocab_local: int, device: torch.device) -> SlotState:
        """Empty slots for requests of up to `block` drafts; vocab_local: tokens of this rank's vocabulary shard."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            step=zeros(1),
            position=zeros(slots),
            tokens=zeros(slots, block + 1),
            num_drafts=zeros(slots),
            failed=zeros(slots),
            seed=zeros(slots, dtype=torch.int64),
            temperature=zeros(slots, dtype=torch.float32),
            top_k=zeros(slots),
            top_p=torch.ones(slots, dtype=torch.float32, device=device),
            min_p=zeros(slots, dtype=torch.float32),
            rule=zeros(slots),
            synthetic_words=zeros(slots, block, dtype=torch.int64),
            draft_stats=zeros(slots, block, 4, dtype=torch.float32),
            draft_logits=zeros(slots, block, vocab_local, dtype=torch.float32),
        )

    @property
    def block(self) -> int:
        """Drafts that a request may bring."""
        return self.tokens.shape[1] - 1

    @property
    def vocab_local(self) -> int:
        """Tokens of the vocabulary shard."""
        return self.draft_logits.shape[2]

    def load(
        self,
        slot: int,
        *,
        position: int,
        token: int,
        seed: int,
        params: SamplingParams,
        rule: Rule = "standard",
        rates: Sequence[float] = (),
    ) -> None:
        """Bring a request to `slot`, without drafts; enqueued on the current stream.

        position: its computed positions. token: its last token, not computed yet. rates: with the rule "synthetic",
        the probability that draft i stands if those before it do. Raises ValueError for parameters that this path
        does not serve.
        """
        if params.penalizes or params.logit_bias:
            raise ValueError("penalties and logit bias are served by the host's path alone")
        if rule == "synthetic" and len(rates) > self.block:
            raise ValueError(f"rates: found {len(rates)}, wanted at most {self.block}")
        self.position[slot] = position
        self.tokens[slot, 0] = token
        self.num_drafts[slot] = 0
        self.failed[slot] = 0
        self.seed[slot] = seed
        # A positive temperature must not become 0, which is another thing; below 1e-30 nothing changes any more.
        self.temperature[slot] = max(params.temperature, 1e-30) if params.temperature > 0 else 0.0
        self.top_k[slot] = min(params.top_k, 2**31 - 1)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.rule[slot] = RULE_CODES[rule]
        if rates:
            self.synthetic_words[slot, : len(rates)] = torch.tensor([synthetic_word(rate) for rate in rates])


def synthetic_word(rate: float) -> int:
    """The bound below which a random word means (word + 1/2) / 2^32 < rate; exact for any rate in [0, 1]."""
    whole, half = divmod(rate * 2.0**33 - 1.0, 2.0)  # word < whole + half / 2; scaling by a power of two is exact
    return max(0, int(whole) + (half > 0))


@dataclass(frozen=True)
class Batch:
    """Which slots a bucket serves, and the rows that they make. R = places * rows_per_request.

    Row i of place b is row b * rows_per_request + i. It is inactive (row_slot -1, token and position 0) where the place
    is empty, the request has failed or filled its context, or brings fewer drafts.
    """

    batch_slot: Tensor  # [places] i32, -1 empty; the host writes it
    row_token: Tensor  # [R] i32
    row_position: Tensor  # [R] i32
    row_slot: Tensor  # [R] i32
    committed_slot: Tensor  # [R] i32: row_slot where the row's token stands after acceptance, else -1
    draft_token: Tensor  # [places * block] i32: the new token, then noise
    draft_position: Tensor  # [places * block] i32
    draft_slot: Tensor  # [places * block] i32, -1 where nothing is to be drafted
    draft_last: Tensor  # [places * block] i32: the last committed position of the row's request

    @classmethod
    def allocate(cls, places: int, rows_per_request: int, block: int, device: torch.device) -> Batch:
        """Empty places; rows_per_request in 1..block + 1."""
        if not 1 <= rows_per_request <= block + 1:
            raise ValueError(f"rows_per_request = {rows_per_request}: expected 1..{block + 1}")

        def empty(count: int) -> Tensor:
            return torch.full((count,), -1, dtype=torch.int32, device=device)

        rows, drafts = places * rows_per_request, places * block
        return cls(empty(places), *[empty(rows) for _ in range(4)], *[empty(drafts) for _ in range(4)])

    @property
    def places(self) -> int:
        """Requests that the bucket has room for."""
        return self.batch_slot.shape[0]

    @property
    def rows_per_request(self) -> int:
        """Rows of a request: its last token and the drafts that are verified."""
        return self.row_slot.shape[0] // self.places


@dataclass(frozen=True)
class Workspace:
    """Records between the kernels of acceptance. Slab r of the mailboxes is written by rank r."""

    rows: Tensor  # [world, R, 8] i32
    excess: Tensor  # [world, places, block] f32
    races: Tensor  # [world, places, blocks of a race, 4] i32
    histograms: Tensor  # [world, 2, R, 2, bins, 4] i32; R = 0 without filters
    progress: Tensor  # [R, words] i32: of this rank's search; R = 0 without filters
    decisions: Tensor  # [places, 4] i32: accepted, token (greedy), failed, drafts

    @classmethod
    def allocate(
        cls, places: int, rows_per_request: int, block: int, world: int, device: torch.device, *, filters: bool = True
    ) -> Workspace:
        """Buffers of a bucket; filters: whether `accept` gets levels."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = places * rows_per_request
        filtered = rows if filters else 0
        return cls(
            rows=zeros(world, rows, 8),
            excess=zeros(world, places, block, dtype=torch.float32),
            races=zeros(world, places, race_blocks_of(places), 4),
            histograms=zeros(world, 2, filtered, 2, _BINS, 4),
            progress=zeros(filtered, _PROGRESS_WORDS),
            decisions=zeros(places, 4),
        )


@dataclass(frozen=True)
class Record:
    """What a step brought the request of one place; slot -1: the place was inactive."""

    slot: int
    tokens: list[int]  # the accepted drafts, then the token that was drawn
    accepted: int
    drafted: int  # drafts that were verified
    failed: bool  # logits from which nothing can be drawn: no tokens, and the slot rests


@dataclass(frozen=True)
class Ring:
    """Records of the last steps in memory that the device writes and the host reads; entry = step % length.

    buffer: [length, places, words] i32, pinned. A record's words: step, slot, count, accepted, drafted, failed, tokens
    [block + 1] (NO_TOKEN behind the last); the step is written last. Steps count from 1, so zeros are never a record.
    The host may be at most `length` - 1 steps behind.
    """

    buffer: Tensor

    @classmethod
    def allocate(cls, length: int, places: int, block: int, device: torch.device) -> Ring:
        """A ring for the largest bucket of `places`."""
        words = record_words(block)
        return cls(torch.zeros(length, places, words, dtype=torch.int32, pin_memory=not jit.emulated(device)))

    def poll(self, step: int, places: int) -> list[Record] | None:
        """The records of the first `places` places, or None while the step has not reported."""
        entry: np.ndarray = self.buffer.numpy()[step % len(self.buffer), :places]
        if not (entry[:, 0] == step).all():
            return None
        return [
            Record(slot, row[RECORD_HEADER : RECORD_HEADER + count], accepted, drafted, bool(failed))
            for row in entry.tolist()
            for slot, count, accepted, drafted, failed in [row[1:RECORD_HEADER]]
        ]


def record_words(block: int) -> int:
    """i32 words of a record in the ring: whole 16-byte pieces."""
    return -(-(RECORD_HEADER + block + 1) // 4) * 4


# ---- launches -------------------------------------------------------------------------------------------------------


def levels_of(params: SamplingParams) -> int:
    """Levels of the search for where the filters of a request end, enough for any logits (`filter.cu`); 0: none."""
    if not params.filters:
        return 0
    return {0: 1, 1: 5, 2: 8}[(params.top_k > 0) + (params.top_p < 1)]


def cluster_of(rows: int, vocab_local: int) -> int:
    """Blocks of a row of logits: as few as keep the device busy, for each waits for the same chain of loads."""
    least = next(size for size in (2, 4, 8, 16) if vocab_local < size * _MOST_TOKENS)
    return max(least, min(_MOST_CLUSTER, 1 << max(0, -(-_RESIDENT // rows) - 1).bit_length()))


def race_blocks_of(places: int) -> int:
    """Blocks that draw the token of a request."""
    return _MOST_RACE_BLOCKS if places <= _RESIDENT // _MOST_RACE_BLOCKS else _MOST_RACE_BLOCKS // 2


def constants(vocab_local: int, block: int, world: int, *, rows: int, places: int) -> dict[str, jit.Constant]:
    """What `accept.cu` and `filter.cu` are compiled with. Raises ValueError for a vocabulary that does not divide."""
    if vocab_local % 16:
        raise ValueError(f"a vocabulary shard of {vocab_local} tokens: expected a multiple of 16")
    if not 1 <= world <= MAX_PEERS:
        raise ValueError(f"world = {world}: expected 1..{MAX_PEERS}")
    return {
        "VOCAB": vocab_local,
        "BLOCK": block,
        "WORLD": world,
        "CLUSTER": cluster_of(rows, vocab_local),
        "RACE_BLOCKS": race_blocks_of(places),
        "FILTER_SHARED": FILTER_SHARED,
        "SMALL_SHARED": SMALL_SHARED,
    }


@functools.cache
def _module(source: jit.Source, device: torch.device, **constants: jit.Constant) -> jit.Module:
    return source.build(device, **constants)


def _slots_module(device: torch.device, block: int, world: int, places: int) -> jit.Module:
    return _module(SLOTS, device, **_slot_constants(block, world, places))


def _slot_constants(block: int, world: int, places: int) -> dict[str, jit.Constant]:
    race_blocks, words = race_blocks_of(places), record_words(block)
    return {"BLOCK": block, "WORLD": world, "RACE_BLOCKS": race_blocks, "RECORD_WORDS": words}


def begin(state: SlotState, batch: Batch, *, max_model_len: int) -> list[jit.Launch]:
    """Count the step and lay out the rows of `batch`."""
    module = _slots_module(state.step.device, state.block, 1, batch.places)
    return [
        module.launch(
            "begin",
            grid=1,
            block=THREADS,
            stage="accept",
            step=state.step,
            batch_slot=batch.batch_slot,
            position=state.position,
            tokens=state.tokens,
            num_drafts=state.num_drafts,
            failed=state.failed,
            row_token=batch.row_token,
            row_position=batch.row_position,
            row_slot=batch.row_slot,
            num_places=batch.places,
            rows_per_request=batch.rows_per_request,
            max_model_len=max_model_len,
        )
    ]


def accept(
    state: SlotState,
    batch: Batch,
    work: Workspace,
    logits: Tensor,
    *,
    rank: int = 0,
    peers: Sequence[Workspace] = (),
    block_rule: bool,
    levels: int,
) -> list[jit.Launch]:
    """Decide over the drafts of every request and race for its new token.

    logits: [R, vocab_local] f32 of this rank's shard, tokens rank * vocab_local on; the world is that of `work`.
    peers: every rank's workspace, in order; records go to slab `rank` of each. Empty: this one alone (world 1), or,
    in a larger world, looped back into every slab. All ranks' records must have arrived before the next launch.
    block_rule: whether a slot may ask for block verification, which takes one launch more. levels: the most that
    `levels_of` gives for a slot; if any, they take one launch each and one more, and a workspace for them.

    Requests with non-finite logits are marked failed. Raises ValueError for shapes.
    """
    vocab, world = state.vocab_local, work.rows.shape[0]
    if logits.shape != (batch.row_slot.shape[0], vocab) or work.rows.shape[1] != logits.shape[0]:
        raise ValueError(
            f"logits: found {list(logits.shape)}, workspace of {work.rows.shape[1]} rows, "
            f"wanted {[batch.row_slot.shape[0], vocab]}"
        )
    if levels and not work.progress.numel():
        raise ValueError("levels: the workspace was allocated without filters")
    rows = logits.shape[0]
    made = constants(vocab, state.block, world, rows=rows, places=batch.places)
    module, cluster = _module(ACCEPT, logits.device, **made), cluster_of(rows, vocab)

    def slabs(name: str) -> list[Tensor]:
        if peers:
            return [getattr(peer, name)[rank] for peer in peers]
        return [getattr(work, name)[r] for r in range(world)]

    fields = {
        **{name: getattr(state, name) for name, _ in _SLOTS},
        "row_token": batch.row_token,
        "row_slot": batch.row_slot,
        "logits": logits,
        "rows": work.rows,
        "rows_out": slabs("rows"),
        "excess": work.excess,
        "excess_out": slabs("excess"),
        "races_out": slabs("races"),
        "decisions": work.decisions,
        "first_token": rank * vocab,
        "num_rows": rows,
        "num_places": batch.places,
        "rows_per_request": batch.rows_per_request,
    }
    launches = [
        module.launch(
            "weigh",
            grid=rows * cluster,
            block=THREADS,
            cluster=cluster,
            shared=SMALL_SHARED,
            stage="accept",
            **fields,
        )
    ]
    if levels:
        filtering = _module(FILTER, logits.device, **{**made, "BLOCK": 1, "RACE_BLOCKS": 1})  # it knows neither
        launches += _filters(filtering, state, batch, work, logits, rank, levels, slabs("rows"), slabs("histograms"))
    if block_rule and state.block > 1:
        grid = batch.places * (state.block - 1) * cluster
        launches.append(
            module.launch(
                "excess", grid=grid, block=THREADS, cluster=cluster, shared=SMALL_SHARED, stage="accept", **fields
            )
        )
    grid = batch.places * race_blocks_of(batch.places)
    launches.append(module.launch("race", grid=grid, block=THREADS, shared=SMALL_SHARED, stage="accept", **fields))
    return launches


def _filters(
    module: jit.Module,
    state: SlotState,
    batch: Batch,
    work: Workspace,
    logits: Tensor,
    rank: int,
    levels: int,
    rows_out: list[Tensor],
    histograms_out: list[Tensor],
) -> list[jit.Launch]:
    """Between `weigh` and what reads its records: what each row keeps."""
    rows, vocab = logits.shape
    cluster = cluster_of(rows, vocab)
    launches = []
    for level in range(levels + 1):
        launches.append(
            module.launch(
                "narrow" if level < levels else "cut",
                grid=rows * cluster,
                block=THREADS,
                cluster=cluster,
                shared=FILTER_SHARED,
                stage="accept",
                temperature=state.temperature,
                top_k=state.top_k,
                top_p=state.top_p,
                min_p=state.min_p,
                row_token=batch.row_token,
                row_slot=batch.row_slot,
                logits=logits,
                rows=work.rows,
                rows_out=rows_out,
                histograms=work.histograms,
                histograms_out=histograms_out,
                progress=work.progress,
                level=level,
                first_token=rank * vocab,
                num_rows=rows,
                rows_per_request=batch.rows_per_request,
            )
        )
    return launches


def commit(
    state: SlotState, batch: Batch, work: Workspace, ring: Ring, *, noise_token: int, max_model_len: int
) -> list[jit.Launch]:
    """Take in what `accept` found: advance the slots, report to the ring, lay out the rows of the draft.

    The draft block of a request stands at its new token's position on; afterwards num_drafts is 0 until drafts come.
    Raises ValueError for a ring with too few places.
    """
    if ring.buffer.shape[1] < batch.places:
        raise ValueError(f"a ring of {ring.buffer.shape[1]} places for a batch of {batch.places}")
    module = _slots_module(state.step.device, state.block, work.races.shape[0], batch.places)
    return [
        module.launch(
            "commit",
            grid=-(-batch.places // (THREADS // 32)),
            block=THREADS,
            stage="accept",
            step=state.step,
            position=state.position,
            tokens=state.tokens,
            num_drafts=state.num_drafts,
            failed=state.failed,
            row_slot=batch.row_slot,
            decisions=work.decisions,
            races=work.races,
            committed_slot=batch.committed_slot,
            draft_token=batch.draft_token,
            draft_position=batch.draft_position,
            draft_slot=batch.draft_slot,
            draft_last=batch.draft_last,
            ring=ring.buffer,
            ring_length=ring.buffer.shape[0],
            ring_places=ring.buffer.shape[1],
            noise_token=noise_token,
            num_places=batch.places,
            rows_per_request=batch.rows_per_request,
            max_model_len=max_model_len,
        )
    ]


def _released(places: int, world: int = 1) -> dict[str, jit.Constant]:
    """Constants of the released model on one rank of four."""
    return constants(32320, 5, world, rows=6 * places, places=places)


SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [
    (ACCEPT, _released(places=1)),
    (ACCEPT, _released(places=32)),
    (FILTER, _released(places=1)),
    (FILTER, _released(places=32, world=4)),
    (SLOTS, _slot_constants(5, 1, 1)),
]
