"""The implementations that can be verified, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashstep import formats, ops
from flashstep.draft import Draft
from flashstep.model import Model
from flashstep.stages.attention import reference as attention
from flashstep.stages.boundary import reference as boundary
from flashstep.stages.engram import reference as engram
from flashstep.stages.head import reference as head
from flashstep.stages.indexer import reference as indexer
from flashstep.stages.moe import reference as moe


@dataclass(frozen=True)
class Backend:
    """Modules with the stages' functions, and the classes that compose them.

    Modules are `Any`: choosing a backend is choosing modules that define the same functions.
    """

    formats: Any
    ops: Any
    attention: Any
    boundary: Any
    engram: Any
    head: Any
    indexer: Any
    moe: Any
    model: type[Model]
    draft: type[Draft]


BACKENDS: dict[str, Backend] = {
    "reference": Backend(formats, ops, attention, boundary, engram, head, indexer, moe, Model, Draft),
}


def backend_named(name: str) -> Backend:
    """The backend `name`. Raises ValueError, which lists those there are."""
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}: expected one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
