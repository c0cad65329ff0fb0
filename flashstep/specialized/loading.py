"""From a model directory, or from shapes alone, to a model that runs on the specialized kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from flashstep import doctor
from flashstep import packed_weights as packed
from flashstep.draft import Draft
from flashstep.executor import Step
from flashstep.loading import BUNDLED_MODEL, LoadedModel
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.portable.loading import CHUNK_ROWS, read_packed, reads
from flashstep.portable.model import PortableModel
from flashstep.specialized.graph import GraphDecoder
from flashstep.specialized.model import SpecializedDraft, SpecializedModel
from flashstep.specialized.plan import MAX_ROWS
from flashstep.specialized.step import SpecializedStep
from flashstep.stages.accept.reference import synthetic_rates
from flashstep.stages.engram.tables import Placement
from flashstep.state import State


@dataclass
class SpecializedLoadedModel(LoadedModel):
    """A model whose steps run on the specialized kernels."""

    state_type: ClassVar[type[State]] = PackedState

    def step(self, state: State, **options: Any) -> Step:
        """As of `LoadedModel`, with steady decoding as one graph."""
        drafts, accepted = options["num_speculative_tokens"], options.get("synthetic_accepted")
        decoder = GraphDecoder(
            cast(SpecializedModel, self.model),
            state,
            num_speculative_tokens=drafts,
            rule=options.get("rule", "standard"),
            rates=() if accepted is None else synthetic_rates(accepted, drafts),
        )
        return SpecializedStep(self.model, self.draft, state, decoder=decoder, **options)


def load_specialized(
    path: Path | str = BUNDLED_MODEL,
    *,
    device: torch.device | str = "cuda",
    random_weights: bool = False,
    num_layers: int | None = None,
    engram: Placement = "device",
    max_rows: int = MAX_ROWS,
    wgmma: bool = True,
    prefill: bool | None = None,
    progress: packed.Progress | None = None,
) -> LoadedModel:
    """Load the model directory `path` onto one device, packed.

    random_weights, num_layers, engram: as of `read_packed`. max_rows, wgmma: as of `SpecializedModel`. prefill:
    whether the portable kernels serve forwards of more rows; None: where this machine can run them. Raises as
    `read_packed`.
    """
    device = torch.device(device)
    found = read_packed(
        path, device, random_weights=random_weights, num_layers=num_layers, engram=engram, progress=progress
    )
    if prefill is None:
        prefill = doctor.backend("portable").available and reads(engram, device)
    prompts = PortableModel(found.weights, found.token_map) if prefill else None
    model = SpecializedModel(found.weights, found.token_map, max_rows=max_rows, wgmma=wgmma, prompts=prompts)
    # The engine and the step ask of a model what these two offer as well.
    loaded = SpecializedLoadedModel(
        found.path, found.config, found.tokenizer, cast(Model, model), cast(Draft, SpecializedDraft(model))
    )
    if prompts is None:
        loaded.max_rows = max_rows
    else:
        loaded.usual_rows = CHUNK_ROWS
    loaded.ring_rows = max_rows
    return loaded
