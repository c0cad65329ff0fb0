"""From a model directory, or from shapes alone, to a model that runs on the specialized kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from flashstep.chat import Tokenizer
from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.executor import Step
from flashstep.loading import BUNDLED_MODEL, LoadedModel, check_device, token_map
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.specialized import weights as packed
from flashstep.specialized.graph import GraphDecoder
from flashstep.specialized.memory import Need, check_memory, free_memory
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
    max_rows: ClassVar[int | None] = MAX_ROWS

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
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """Load the model directory `path` onto one device, packed.

    random_weights: read its configuration and tokenizer alone and make up the weights; num_layers: of these, only so
    many. The text is then worthless, the time is not. engram: where the tables lie. max_rows, wgmma: as of
    `SpecializedModel`. Raises as `load`, and ValueError before anything is read where the memory does not suffice.
    """
    path, device = Path(path), torch.device(device)
    check_device(device)
    if random_weights:
        config = ModelConfig.from_file(path)
        config = config if num_layers is None else config.first_layers(num_layers)
        source: packed.Source = packed.RandomSource(config, 0, 1, device, engram=engram)
    else:
        if num_layers is not None:
            raise ValueError("--num-layers goes with random weights: a checkpoint is served whole")
        checkpoint = Checkpoint.open(path)
        config, source = checkpoint.config, packed.CheckpointSource(checkpoint, 0, 1, device, engram)
    check_memory(Need.of(config, engram, device), free_memory(device), engram)
    tokenizer = Tokenizer.load(path)
    weights = packed.read(config, source, progress=progress)
    model = SpecializedModel(weights, token_map(path, config), max_rows=max_rows, wgmma=wgmma)
    # The engine and the step ask of a model what these two offer as well.
    return SpecializedLoadedModel(path, config, tokenizer, cast(Model, model), cast(Draft, SpecializedDraft(model)))
