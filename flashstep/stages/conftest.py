"""What the stages' tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, otherwise the CPU, where kernels run on the emulator (`jit.emulated` tells which)."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
