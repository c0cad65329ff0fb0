"""Launches of the draft's heads: the Markov chain that chooses the drafted tokens, confidences, and how many to verify.

Owns the packing of `markov_head.head` and the launches of `draft.cu`. The base logits of the draft rows are a dense
product of another stage. `reference.py` beside it says what the heads compute, `stages/accept/reference.py` how tokens
are drawn; the drafts and what they were drawn from go to `SlotState` of `stages/accept/cuda.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep import jit
from flashstep.stages.accept.cuda import MAX_PEERS, SlotState

MULTIPROCESSORS = 132  # of an H200: the strips of a vocabulary shard are spread over so many blocks where they can be
MAX_PLACES = 32
STRIP = 16  # tokens of the vocabulary; a warp has two strips
RECORD_WORDS = 8

_SLOTS = [
    ("position", "const i32*"),
    ("tokens", "i32*"),
    ("temperature", "const float*"),
    ("draft_stats", "float*"),
]
DRAFT = jit.Source(
    "stages/head/draft.cu",
    {
        "markov": jit.Params(
            "Markov",
            [
                *_SLOTS,
                ("seed", "const u64*"),
                ("draft_logits", "float*"),
                ("draft_slot", "const i32*"),
                ("base", "const float*"),
                ("hidden", "const bf16*"),
                ("embed", "const bf16*"),
                ("head", "const bf16*"),
                ("confidence_weight", "const bf16*"),
                ("confidence", "float*"),
                ("records", "const u32*"),
                ("records_out", "u32*[8]"),
                ("index", "int"),
                ("num_places", "int"),
                ("first_token", "int"),
            ],
        ),
        "settle": jit.Params(
            "Settle",
            [
                *_SLOTS,
                ("num_drafts", "i32*"),
                ("draft_slot", "const i32*"),
                ("records", "const u32*"),
                ("confidence", "const float*"),
                ("threshold", "const float*"),
                ("num_places", "int"),
                ("max_model_len", "int"),
            ],
        ),
    },
    hot=("markov", "settle"),
)


# ---- weights --------------------------------------------------------------------------------------------------------


def pack_markov_head(weight: Tensor) -> Tensor:
    """Units of `common.cuh` [rows / 16, rank / 16, 256] bf16 of `markov_head.head` [rows, rank] bf16.

    rows: the rank's shard of the vocabulary. Raises ValueError unless both are multiples of 16.
    """
    rows, columns = weight.shape
    if rows % 16 or columns % 16:
        raise ValueError(f"markov head: found shape {[rows, columns]}, wanted multiples of 16")
    # [strip, row half, row in it, unit, column half, pair of columns, column of the pair] -> lane, register
    parts = weight.view(rows // 16, 2, 8, columns // 16, 2, 4, 2)
    return parts.permute(0, 3, 2, 5, 4, 1, 6).reshape(rows // 16, columns // 16, 256).contiguous()


def unpack_markov_head(packed: Tensor) -> Tensor:
    """[rows, rank] bf16; inverse of `pack_markov_head`."""
    strips, units, _ = packed.shape
    parts = packed.view(strips, units, 8, 4, 2, 2, 2)
    return parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(strips * 16, units * 16).contiguous()


@dataclass(frozen=True)
class HeadWeights:
    """The draft's heads as the kernels read them."""

    embed: Tensor  # [vocab, rank] bf16, all tokens
    head: Tensor  # `pack_markov_head` of this rank's shard
    confidence: Tensor  # [hidden + rank] bf16

    @classmethod
    def pack(cls, embed: Tensor, head: Tensor, confidence: Tensor) -> HeadWeights:
        """Of `markov_head.embed` [vocab, rank], the shard of `markov_head.head` and `confidence_head.proj` [1, ..]."""
        return cls(embed.contiguous(), pack_markov_head(head), confidence.flatten().contiguous())

    @property
    def rank(self) -> int:
        """Columns of the Markov head."""
        return self.embed.shape[1]

    @property
    def vocab_local(self) -> int:
        """Tokens of the shard."""
        return self.head.shape[0] * STRIP


# ---- buffers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftWorkspace:
    """What passes between the kernels of the chain. Slab r of the mailbox is written by rank r."""

    records: Tensor  # [2, world, blocks, places, 8] i32: of even and of odd places of the block
    confidence: Tensor  # [slots, block] f32: a logit, at the request's slot

    @classmethod
    def allocate(cls, state: SlotState, places: int, world: int) -> DraftWorkspace:
        """Buffers of a bucket of `places` requests."""
        device = state.step.device
        blocks = _blocks(state.vocab_local)
        return cls(
            records=torch.zeros(2, world, blocks, places, RECORD_WORDS, dtype=torch.int32, device=device),
            confidence=torch.zeros(state.position.shape[0], state.block, device=device),
        )


# ---- launches -------------------------------------------------------------------------------------------------------


def _warps(vocab_local: int) -> int:
    """Warps of a block, each with two strips: one block a multiprocessor, as far as 4..8 warps allow it."""
    return max(4, min(8, -(-(vocab_local // STRIP) // (2 * MULTIPROCESSORS))))


def _blocks(vocab_local: int) -> int:
    return -(-(vocab_local // STRIP) // (2 * _warps(vocab_local)))


def constants(
    *, vocab_local: int, rank: int, hidden: int, block: int, world: int, drafts: int, places: int
) -> dict[str, jit.Constant]:
    """What `draft.cu` is compiled with. Raises ValueError for shapes that it does not serve."""
    problems = [
        f"{name} = {value}: expected {wanted}"
        for name, value, wanted, fits in (
            ("vocab_local", vocab_local, "a multiple of 16", vocab_local % 16 == 0),
            ("rank", rank, "a multiple of 16", rank % 16 == 0),
            ("hidden", hidden, "a multiple of 8", hidden % 8 == 0),
            ("world", world, f"1..{MAX_PEERS}", 1 <= world <= MAX_PEERS),
            ("drafts", drafts, f"1..{block}", 1 <= drafts <= block),
            ("places", places, f"1..{MAX_PLACES}", 1 <= places <= MAX_PLACES),
        )
        if not fits
    ]
    if problems:
        raise ValueError("draft heads: " + "; ".join(problems))
    tiles, warps = -(-places // 8), _warps(vocab_local)
    return {
        "VOCAB": vocab_local,
        "RANK": rank,
        "HIDDEN": hidden,
        "BLOCK": block,
        "WORLD": world,
        "WARPS": warps,
        "TILES": tiles,
        "DRAFTS": drafts,
        "MARKOV_SHARED": _markov_shared(rank, warps, 8 * tiles),
    }


def _markov_shared(rank: int, warps: int, places: int) -> int:
    """Bytes: weights, embed rows, transposed tiles, what each strip gave, what slots say, and small change."""
    weights = warps * rank * 32
    return weights + places * (rank + 8) * 2 + warps * 8 * 20 * 4 + warps * places * 40 + places * 24 + warps * 12 + 64


@functools.cache
def _module(device: torch.device, values: tuple[tuple[str, jit.Constant], ...]) -> jit.Module:
    return DRAFT.build(device, **dict(values))


def draft(
    state: SlotState,
    work: DraftWorkspace,
    weights: HeadWeights,
    *,
    draft_slot: Tensor,
    base: Tensor,
    hidden: Tensor,
    threshold: Tensor,
    drafts: int,
    max_model_len: int,
    rank: int = 0,
    peers: Sequence[DraftWorkspace] = (),
) -> list[jit.Launch]:
    """Choose `drafts` tokens for every request that drafts, one after another, and how many of them to verify.

    draft_slot: [places * block] i32, -1 where nothing is drafted (`Batch.draft_slot`). base: [places * block,
    vocab_local] f32, head logits of the draft rows. hidden: [places * block, hidden] bf16, the collapsed stream before
    the final norm. threshold: [1] f32: draft i is verified while the product of the sigmoids of confidences 0..i is not
    below it; 0 verifies all. rank, peers: as for `accept.cuda.accept`.

    Writes to the slots: tokens behind the first, draft_logits, draft_stats and num_drafts. The block ends before the
    first draft whose logits are not finite, and at the end of the context. Raises ValueError for shapes.
    """
    block, vocab = state.block, state.vocab_local
    places, world = draft_slot.shape[0] // block, work.records.shape[1]
    values = constants(
        vocab_local=vocab,
        rank=weights.rank,
        hidden=hidden.shape[1],
        block=block,
        world=world,
        drafts=drafts,
        places=places,
    )
    for name, tensor, wanted in (
        ("base", base, (places * block, vocab)),
        ("hidden", hidden, (places * block, hidden.shape[1])),
        ("head", weights.head, (vocab // STRIP, weights.rank // 16, 256)),
        ("confidence", weights.confidence, (hidden.shape[1] + weights.rank,)),
        ("records", work.records, (2, world, _blocks(vocab), places, RECORD_WORDS)),
    ):
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name}: found shape {list(tensor.shape)}, wanted {list(wanted)}")
    module = _module(base.device, tuple(values.items()))
    slots = {name: getattr(state, name) for name, _ in _SLOTS}

    def slabs(index: int) -> list[Tensor]:
        if peers:
            return [peer.records[index % 2, rank] for peer in peers]
        return [work.records[index % 2, r] for r in range(world)]

    launches = [
        module.launch(
            "markov",
            grid=_blocks(vocab) + places,
            block=32 * _warps(vocab),
            shared=int(values["MARKOV_SHARED"]),
            stage="head",
            nbytes=2 * weights.head.numel(),
            **slots,
            seed=state.seed,
            draft_logits=state.draft_logits,
            draft_slot=draft_slot,
            base=base,
            hidden=hidden,
            embed=weights.embed,
            head=weights.head,
            confidence_weight=weights.confidence,
            confidence=work.confidence,
            records=work.records[(index + 1) % 2],
            records_out=slabs(index),
            index=index,
            num_places=places,
            first_token=rank * vocab,
        )
        for index in range(drafts)
    ]
    return [
        *launches,
        module.launch(
            "settle",
            grid=places,
            block=32,
            stage="head",
            **slots,
            num_drafts=state.num_drafts,
            draft_slot=draft_slot,
            records=work.records[(drafts - 1) % 2],
            confidence=work.confidence,
            threshold=threshold,
            num_places=places,
            max_model_len=max_model_len,
        ),
    ]


def released(places: int) -> dict[str, jit.Constant]:
    """Constants of the released model on one rank of four."""
    return constants(vocab_local=32320, rank=256, hidden=5120, block=5, world=1, drafts=5, places=places)


SOURCES: list[tuple[jit.Source, dict[str, jit.Constant]]] = [(DRAFT, released(places)) for places in (8, 16, 32)]
