"""From a model directory, or from shapes alone, to packed weights on a device, and to a model on the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from flashstep import packed_weights as packed
from flashstep.chat import Tokenizer
from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.loading import BUNDLED_MODEL, LoadedModel, check_device, token_map
from flashstep.memory import Need, check_memory, free_memory
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.portable.model import PortableDraft, PortableModel
from flashstep.stages.engram.tables import Placement
from flashstep.state import State

CHUNK_ROWS = 4096  # of a forward, where nobody asks for others: about 3 GB beside weights and caches
RING_ROWS = 64  # of one request that may be taken back: more than any draft block


@dataclass(frozen=True)
class PackedModel:
    """What every backend over packed weights needs of a model directory."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    weights: packed.Weights
    token_map: Tensor


def read_packed(
    path: Path | str,
    device: torch.device,
    *,
    random_weights: bool = False,
    num_layers: int | None = None,
    engram: Placement = "device",
    progress: packed.Progress | None = None,
) -> PackedModel:
    """Read the model directory `path` and pack its weights on `device`.

    random_weights: read its configuration and tokenizer alone and make up the weights; num_layers: of these, only so
    many. The text is then worthless, the time is not. engram: where the tables lie. Raises as `loading.load`, and
    ValueError before anything is read where the memory does not suffice.
    """
    path = Path(path)
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
    return PackedModel(path, config, tokenizer, packed.read(config, source, progress=progress), token_map(path, config))


def reads(engram: Placement, device: torch.device) -> bool:
    """Whether kernels on `device` can address a table that is placed so: Triton takes what the driver knows alone."""
    return engram != "mapped" or device.type == "cpu"


@dataclass
class PortableLoadedModel(LoadedModel):
    """A model whose steps run on the Triton kernels."""

    usual_rows: int = CHUNK_ROWS
    ring_rows: int | None = RING_ROWS

    state_type: ClassVar[type[State]] = PackedState


def load_portable(
    path: Path | str = BUNDLED_MODEL,
    *,
    device: torch.device | str = "cuda",
    random_weights: bool = False,
    num_layers: int | None = None,
    engram: Placement = "device",
    progress: packed.Progress | None = None,
) -> LoadedModel:
    """Load the model directory `path` onto one device, packed; arguments as of `read_packed`."""
    device = torch.device(device)
    if not reads(engram, device):
        raise ValueError(
            "--engram-placement mapped: the portable kernels cannot read the files that a process has mapped; use "
            "device or pinned"
        )
    found = read_packed(
        path, device, random_weights=random_weights, num_layers=num_layers, engram=engram, progress=progress
    )
    model = PortableModel(found.weights, found.token_map)
    # The engine and the step ask of a model what these two offer as well.
    return PortableLoadedModel(
        found.path, found.config, found.tokenizer, cast(Model, model), cast(Draft, PortableDraft(model))
    )
