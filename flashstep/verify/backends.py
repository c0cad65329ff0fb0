"""The implementations that can be verified, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashstep import formats, ops
from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.formats import Numerics
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.stages.attention import reference as attention
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.engram import reference as engram
from flashstep.stages.head import reference as head
from flashstep.stages.indexer import reference as indexer
from flashstep.stages.moe import reference as moe
from flashstep.state import State


@dataclass(frozen=True)
class Backend:
    """Modules with the stages' functions, and the classes that compose them.

    Modules are `Any`: choosing a backend is choosing modules that define the same functions. A backend of kernels is
    compared where its whole model can be: in bf16, by logits, drafts and final states. Its primitives have no form of
    their own to compare; they are held to the reference's in the tests of their stages.
    """

    formats: Any
    ops: Any
    attention: Any
    boundary: Any
    engram: Any
    head: Any
    indexer: Any
    moe: Any
    model: Callable[[ModelConfig, Checkpoint, Tensor, Numerics], Any]  # checkpoint's model, `Model` or alike
    draft: Callable[[Any, Checkpoint], Any]
    state: type[State] = State
    whole_only: str = ""  # why only whole models in bf16 are compared; empty: everything is
    max_rows: int = 1 << 20  # of one forward
    ring_rows: int | None = None  # rows of one request that rings hold; None: those of a forward


def _kernels(config: ModelConfig, checkpoint: Checkpoint, token_map: Tensor, num: Numerics) -> Any:
    from flashstep import packed_weights as weights
    from flashstep.specialized.model import SpecializedModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = weights.read(config, weights.CheckpointSource(checkpoint, 0, 1, device))
    return SpecializedModel(packed, token_map, max_rows=_KERNEL_ROWS)


def _portable(config: ModelConfig, checkpoint: Checkpoint, token_map: Tensor, num: Numerics) -> Any:
    from flashstep import packed_weights as weights
    from flashstep.portable.model import PortableModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = weights.read(config, weights.CheckpointSource(checkpoint, 0, 1, device))
    return PortableModel(packed, token_map)


def _portable_draft(model: Any, checkpoint: Checkpoint) -> Any:
    from flashstep.portable.model import PortableDraft

    return PortableDraft(model)


def _kernel_draft(model: Any, checkpoint: Checkpoint) -> Any:
    from flashstep.specialized.model import SpecializedDraft

    return SpecializedDraft(model)


_WHOLE_ONLY = "kernels are compared as a whole model in bf16; their parts in the tests beside them"
_KERNEL_ROWS = 16  # one bucket more or less is compiled in seconds, but emulated in minutes
_STAGES = (formats, ops, attention, boundary, engram, head, indexer, moe)
BACKENDS: dict[str, Backend] = {
    "reference": Backend(*_STAGES, Model, Draft),
    "hopper": Backend(
        *_STAGES,
        _kernels,
        _kernel_draft,
        state=PackedState,
        whole_only=_WHOLE_ONLY,
        max_rows=_KERNEL_ROWS,
    ),
    "portable": Backend(
        *_STAGES,
        _portable,
        _portable_draft,
        state=PackedState,
        whole_only=_WHOLE_ONLY,
        ring_rows=16,
    ),
}
"""By the names that `--backend` takes."""


def backend_named(name: str) -> Backend:
    """The backend `name`. Raises ValueError, which lists those there are."""
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}: expected one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
