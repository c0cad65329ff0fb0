"""Where the kernels find Engram tables: on the device, in page-locked host memory, or in the checkpoint's mapped files.

Owns the three placements and the locking of host memory. The rows are the same wherever they lie; what differs is the
latency of a row and whose memory the bytes take: the device's; the host's, of which nothing can be paged out; or none
but the page cache, where the GPU can read what the process has mapped.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flashstep import jit
from flashstep.checkpoint import EngramTable

Placement = Literal["device", "pinned", "mapped"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

_LOCK_BYTES = 1 << 30  # locked by one call: the driver lets nobody else in for as long as one takes
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class Table(NamedTuple):
    """A table as the kernels read it."""

    codes: Tensor  # uint8 [rows, dim]: fp8
    scales: Tensor  # uint8 [rows, dim / 32]: UE8M0
    whole: bool  # the rows of all ranks, as in the file; else those of this rank


def place(table: EngramTable, placement: Placement, device: torch.device) -> Table:
    """Put `table` where `placement` says. Raises ValueError or OSError where this machine cannot have it there.

    Copies are checked for NaN as they are made; in a mapped file a bad row shows when it is used, in logits that are
    not finite.
    """
    if placement == "mapped":
        codes, scales = (part.view(torch.uint8) for part in table.views())
        if not jit.emulated(device) and not reads_mapped_files(device):
            raise ValueError(
                "this GPU cannot read the files that a process has mapped (it needs a Linux kernel with HMM and "
                "NVIDIA's open kernel modules, or a coherent link to the CPU): use --engram-placement device or pinned"
            )
        return Table(codes, scales, whole=True)
    if placement == "device":
        codes, scales = (part.view(torch.uint8) for part in table.load(device))
        return Table(codes, scales, whole=False)
    found = locked_table(table.num_rows, table.head_dim, device)
    table.copy_to(found.codes, found.scales)
    return found


def locked_table(rows: int, dim: int, device: torch.device) -> Table:
    """Room in page-locked host memory for a rank's own rows."""
    codes, scales = (locked(rows * width, device).view(rows, width) for width in (dim, dim // 32))
    return Table(codes, scales, whole=False)


class _Locked(mmap.mmap):
    """Anonymous memory, page-locked in pieces; unlocked before it is given back."""

    pieces: tuple[int, ...] = ()

    def __del__(self) -> None:
        for address in self.pieces:
            torch.cuda.cudart().cudaHostUnregister(address)


def locked(nbytes: int, device: torch.device) -> Tensor:
    """Page-locked host memory, uint8 [nbytes], that `device` reads. On the emulator any memory is.

    torch's own allocator of such memory rounds up to a power of two, which at the size of a table is too much.
    Raises OSError where the driver refuses.
    """
    if jit.emulated(device):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = _Locked(-1, nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        for start in range(0, nbytes, _LOCK_BYTES):
            address, size = tensor.data_ptr() + start, min(_LOCK_BYTES, nbytes - start)
            error = runtime.cudaHostRegister(address, size, _PORTABLE_MAPPED)
            if int(error):
                raise OSError(
                    f"cannot page-lock {nbytes:,} bytes for an Engram table, at {start:,}: {error}; see the limits of "
                    "this container or machine, or use --engram-placement device or mapped"
                )
            memory.pieces += (address,)
    return tensor


def reads_mapped_files(device: torch.device) -> bool:
    """Whether a GPU reads memory of the process that nobody has made known to it."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
    error, value = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    return not int(error) and bool(value)
