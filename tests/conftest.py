"""What the tests share: random models in the released layout, and the golden directory where it is present."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashstep.checkpoint import Checkpoint
from flashstep.draft import Draft
from flashstep.formats import Numerics
from flashstep.loading import CheckpointReader
from flashstep.model import Model
from flashstep.tiny import random_checkpoint, small_config

RandomModel = Callable[..., tuple[Model, Draft]]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tests run one process per core


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Build a model of random weights: random_model(seed, num=..., **config overrides)."""
    built: dict[str, tuple[Model, Draft]] = {}

    def build(seed: int = 0, num: Numerics | None = None, **overrides: Any) -> tuple[Model, Draft]:
        key = repr((seed, num, sorted(overrides.items())))
        if key not in built:
            directory: Path = tmp_path_factory.mktemp("random") / "model"
            random_checkpoint(small_config(**overrides), directory, seed)
            checkpoint = Checkpoint.open(directory)
            reader = CheckpointReader(checkpoint, "cpu")
            model = Model(checkpoint.config, reader, torch.arange(checkpoint.config.vocab_size), num)
            built[key] = model, Draft(model, reader)
        return built[key]

    return build


@pytest.fixture(scope="module")
def own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sources in temporary directories never come back: keep their binaries out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
