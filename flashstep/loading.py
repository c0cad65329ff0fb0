"""From a model directory to a model that runs: configuration, weights, token map, tokenizer.

Owns where the bundled model lies, and where Engram tables are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tokenizers
import torch
from torch import Tensor

from flashstep.chat import Tokenizer
from flashstep.checkpoint import Checkpoint, Progress
from flashstep.config import ModelConfig
from flashstep.draft import Draft
from flashstep.executor import Step
from flashstep.formats import Numerics, decode_fp8_rows
from flashstep.layout import engram_offsets
from flashstep.model import Model
from flashstep.ops import Gather
from flashstep.shards import CheckpointError
from flashstep.stages.engram.token_map import compressed_token_map
from flashstep.state import State

BUNDLED_MODEL = Path(__file__).parent / "models" / "tiny"
EngramPlacement = Literal["mapped", "device"]

# Models up to this size keep their weights decoded to float64 (up to 16 times it); above, a weight is decoded at
# every use.
DECODED_BYTES = 100_000_000


class CheckpointReader:
    """Gives the reference its weights from a checkpoint (`ops.Reader`).

    Engram tables are read in place from the mapped files, or loaded onto the device. With `world` above 1 it gives
    what `rank` holds (`layout.py`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        engram: EngramPlacement = "mapped",
        progress: Progress | None = None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._checkpoint, self._device, self._engram = checkpoint, device, engram
        self._progress, self._read = progress, 0
        self._rank, self._world = rank, world

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` as stored, on the device."""
        self._read += 1
        if self._progress is not None:
            self._progress(name, self._read, len(self._checkpoint.specs))
        return self._checkpoint.tensor(name, self._rank, self._world, self._device)

    def __contains__(self, name: object) -> bool:
        """Whether the checkpoint has a tensor `name`."""
        return name in self._checkpoint.specs

    def engram_gather(self, layer: int) -> Gather:
        """Rows of the Engram table of `layer`, decoded to bf16.

        It is given rows of the whole table, one column per head, and answers for the columns of the rank's heads.
        """
        table = self._checkpoint.engram_table(layer, self._rank, self._world)
        if self._engram == "device":
            codes, scales = table.load(self._device)
            # Indexing is not implemented for 8-bit floats, so the bytes are gathered.
            code_bytes, scale_bytes = codes.view(torch.uint8), scales.view(torch.uint8)

            def gather(ids: Tensor) -> Tensor:
                return decode_fp8_rows(code_bytes[ids].view(codes.dtype), scale_bytes[ids])
        else:

            def gather(ids: Tensor) -> Tensor:
                return decode_fp8_rows(*table.rows(ids)).to(ids.device)

        if self._world == 1:
            return gather
        columns, shifts = self._engram_columns(layer)
        return lambda ids: gather(ids[:, columns] + shifts)

    def _engram_columns(self, layer: int) -> tuple[Tensor, Tensor]:
        """The columns of the rank's heads among those of all, and what turns their rows into rows of its own table."""
        config = self._checkpoint.config
        whole = torch.tensor(engram_offsets(config, layer))  # [n-gram sizes, heads]
        own = torch.tensor(engram_offsets(config, layer, self._rank, self._world))
        heads = own.shape[1]
        first = heads * self._rank
        columns = torch.arange(whole.numel()).view_as(whole)[:, first : first + heads]
        shifts = own - whole[:, first : first + heads]
        return columns.flatten().to(self._device), shifts.flatten().to(self._device)


@dataclass
class LoadedModel:
    """A model directory, ready to run.

    usual_rows, max_rows: of one forward, where nobody asks for others, and at most (None: any number). ring_rows: rows
    of one request that its rings hold beside a window; None: as many as a forward may have.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    model: Model
    draft: Draft

    usual_rows: int = 512
    max_rows: int | None = None
    ring_rows: int | None = None

    state_type: ClassVar[type[State]] = State

    def step(self, state: State, **options: Any) -> Step:
        """The step over `state`, which is of `state_type`; options as of `Step`."""
        return Step(self.model, self.draft, state, **options)


def check_device(device: torch.device | str) -> None:
    """Raise ValueError where torch can keep no values on `device` on this machine."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by kind of device and build of torch
        reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"device {device}: {reason}; `flashstep doctor` says what this machine has") from None


def token_map(path: Path, config: ModelConfig) -> Tensor:
    """Compressed Engram ids [vocab_size] int64 of the tokenizer in directory `path`.

    Raises ValueError where the tokenizer is not the one that the checkpoint's tables were made for.
    """
    try:
        raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path / 'tokenizer.json'}: the tokenizers library cannot load it: {error}") from error
    mapped = torch.from_numpy(compressed_token_map(raw)).long()
    count = int(mapped.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise ValueError(
            f"{path / 'tokenizer.json'}: its tokens fold into {count} compressed ids, expected "
            f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size}; another tokenizer addresses other "
            "Engram rows: put the checkpoint's own tokenizer.json there"
        )
    if len(mapped) > config.vocab_size:
        raise ValueError(f"{path / 'tokenizer.json'}: {len(mapped)} tokens, expected at most {config.vocab_size}")
    # Ids that pad the vocabulary are never produced by the tokenizer; they count as the pad token.
    padding = mapped[config.engram_pad_token_id].expand(config.vocab_size - len(mapped))
    return torch.cat((mapped, padding))


def weight_bytes(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> int:
    """Bytes of what `rank` of `world` holds, as stored and without the Engram tables."""
    specs = checkpoint.specs.items()
    return sum(spec.local_bytes(rank, world) for name, spec in specs if ".engram.embed." not in name)


def load(
    path: Path | str = BUNDLED_MODEL,
    *,
    num: Numerics | None = None,
    device: torch.device | str = "cpu",
    engram: EngramPlacement = "mapped",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model directory `path` for the reference backend; `progress` hears of every tensor that is read.

    Raises `ConfigError`, `CheckpointError`, `TokenizerError` or ValueError, each naming every problem it found.
    """
    path = Path(path)
    check_device(device)
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config
    tokenizer = Tokenizer.load(path)
    keep_decoded = weight_bytes(checkpoint) <= DECODED_BYTES
    compressed = token_map(path, config)
    reader = CheckpointReader(checkpoint, device, engram, progress)
    try:
        model = Model(config, reader, compressed, num, keep_decoded=keep_decoded)
        draft = Draft(model, reader, keep_decoded=keep_decoded)
    except CheckpointError:
        checkpoint.check_values()  # one tensor holds bad values: name all that do
        raise
    return LoadedModel(path, config, tokenizer, model, draft)
