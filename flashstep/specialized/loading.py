"""From a model directory, or from shapes alone, to a model that runs on the specialized kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from flashstep.chat import Tokenizer
from flashstep.checkpoint import Checkpoint
from flashstep.config import ModelConfig
from flashstep.doctor import free_host_memory
from flashstep.draft import Draft
from flashstep.executor import Step
from flashstep.layout import tensor_specs
from flashstep.loading import BUNDLED_MODEL, LoadedModel, check_device, token_map
from flashstep.model import Model
from flashstep.packed_state import PackedState
from flashstep.specialized import weights as packed
from flashstep.specialized.graph import GraphDecoder
from flashstep.specialized.model import SpecializedDraft, SpecializedModel
from flashstep.specialized.plan import MAX_ROWS
from flashstep.specialized.step import SpecializedStep
from flashstep.stages.accept.reference import synthetic_rates
from flashstep.stages.engram.tables import Placement
from flashstep.state import State

log = logging.getLogger("flashstep.loading")


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


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Bytes that a rank's weights take, without caches and buffers; `tables` are those of the Engram tables among them.

    Where the device is the CPU, all of them are the host's.
    """

    device: int
    host: int
    tables: int

    @classmethod
    def of(cls, config: ModelConfig, engram: Placement, device: torch.device, rank: int = 0, world: int = 1) -> Need:
        """What `rank` of `world` needs: its weights, once more the largest layer of them, and its tables."""
        tables = weights = 0
        layers: dict[str, int] = {}
        for name, spec in tensor_specs(config).items():
            nbytes = spec.local_bytes(rank, world)
            if ".engram.embed." in name:
                tables += nbytes
                continue
            weights += nbytes
            layer = ".".join(name.split(".")[:2])
            layers[layer] = layers.get(layer, 0) + nbytes
        weights += max(layers.values())  # a layer is packed beside what was read
        on_device, on_host = (tables, 0) if engram == "device" else (0, tables if engram == "pinned" else 0)
        if device.type == "cpu":
            return cls(0, weights + on_device + on_host, tables)
        return cls(weights + on_device, on_host, tables)


def free_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Free bytes of the device and of the host; None where they are not known or not there."""
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return on_device, free_host_memory()


def check_memory(need: Need, free: tuple[int | None, int | None], engram: Placement) -> None:
    """Say what loading will take, and raise ValueError where it is not there, with what to do instead."""
    missing = []
    for place, wanted, found in (("device", need.device, free[0]), ("host", need.host, free[1])):
        if not wanted:
            continue
        log.info("weights take %.2f GB of the %s's memory, %s", wanted / 1e9, place, _free(found))
        if found is not None and wanted > found:
            missing.append(f"{wanted / 1e9:.2f} GB of the {place}'s memory are needed, {_free(found)}")
    if not missing:
        return
    tables = f"{need.tables / 1e9:.2f} GB"
    ways = {
        "device": f"--engram-placement device puts them ({tables}) on the device",
        "pinned": f"--engram-placement pinned keeps them ({tables}) in the host's memory, {_free(free[1])}",
        "mapped": "--engram-placement mapped leaves them in their files, where the GPU can read those",
    }
    others = [way for placement, way in ways.items() if placement != engram] if need.tables else []
    others.append("more ranks hold less each (--tensor-parallel-size)")
    raise ValueError(
        f"{'; '.join(missing)} (Engram tables: {engram}; caches come on top). Instead: {'; '.join(others)}"
    )


def _free(nbytes: int | None) -> str:
    return "how much is free is not known" if nbytes is None else f"{nbytes / 1e9:.2f} GB are free"
