"""What loading a model for the kernels takes of the device's and the host's memory, compared with what is free."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from flashstep.config import ModelConfig
from flashstep.doctor import free_host_memory
from flashstep.layout import tensor_specs
from flashstep.stages.engram.tables import Placement

log = logging.getLogger("flashstep.loading")


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
