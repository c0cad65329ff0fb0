"""`flashstep info PATH`: what a checkpoint is, what it needs and how short a step on it can be.

Owns gathering and printing; every figure comes from `bytes.py`. Works on a checkpoint directory, which it validates,
and on a bare `config.json`, since all sizes follow from the configuration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashstep.bytes import (
    RankMemory,
    Size,
    StageBytes,
    distinct_experts,
    floor_ms,
    rank_memory,
    request_bytes,
    sizes,
    state_read_bytes,
    step_bytes,
)
from flashstep.checkpoint import Checkpoint
from flashstep.config import ConfigError, ModelConfig
from flashstep.terminal import wide_console

WORLDS = (1, 2, 4, 8)
READ_TB_S = 4.6  # measured read ceiling of an H200, section 3 of the design
_CONTEXTS = (1_024, 131_072, 1_048_576)


@dataclass(frozen=True)
class LayerRun:
    """Consecutive backbone layers `first`..`last` with one role; sources are None without compressed attention."""

    first: int
    last: int
    role: str
    kv_source: int | None
    index_source: int | None


@dataclass(frozen=True)
class Info:
    """All figures of `flashstep info`. `stages` are those of one rank of `step_world`."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    layers: list[LayerRun]
    sizes: dict[str, Size]
    memory: list[RankMemory]
    refused_worlds: dict[int, str]  # why the model does not divide over so many ranks
    context_bytes_per_token: float
    request_bytes: int
    step_world: int
    step_rows: int
    distinct_experts: float
    stages: list[StageBytes]
    state_read_bytes: dict[int, float]  # by context length

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON holds it."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["config"] = asdict(self.config)
        record["checkpoint"] = str(self.checkpoint.path) if self.checkpoint else None
        for name in ("layers", "memory", "stages"):
            record[name] = [asdict(part) for part in record[name]]
        record["sizes"] = {kind: asdict(size) for kind, size in self.sizes.items()}
        return record | {"step_bytes": self.step_bytes}

    @property
    def step_bytes(self) -> float:
        """Weight bytes of one step on one rank; caches come on top (`state_read_bytes`)."""
        return sum(stage.nbytes for stage in self.stages)


def describe(config: ModelConfig, checkpoint: Checkpoint | None = None, *, world: int | None = None) -> Info:
    """The figures for one request that verifies a whole block, over `world` ranks (default: 4, or as many as divide).

    Raises `ConfigError` where the model does not divide over a given `world`.
    """
    memory, refused = [], {}
    for ranks in WORLDS:
        try:
            memory.append(rank_memory(config, ranks))
        except ConfigError as error:
            refused[ranks] = "; ".join(error.problems)
    if world is None:
        world = max(found.world for found in memory if found.world <= 4)
    rows = config.dspark_block_size + 1
    contexts = [context for context in _CONTEXTS if context <= config.max_position_embeddings]
    return Info(
        config=config,
        checkpoint=checkpoint,
        layers=_layer_runs(config),
        sizes=sizes(config),
        memory=memory,
        refused_worlds=refused,
        context_bytes_per_token=config.context_bytes_per_token,
        request_bytes=request_bytes(config),
        step_world=world,
        step_rows=rows,
        distinct_experts=distinct_experts(config.n_routed_experts, config.num_experts_per_tok, rows),
        stages=step_bytes(config, world=world),
        state_read_bytes={context: state_read_bytes(config, context) for context in contexts},
    )


def read_info(path: Path | str, *, world: int | None = None) -> Info:
    """The figures of `path`, a checkpoint directory or a `config.json`. Raises what opening it raises."""
    path = Path(path)
    weights = path.is_dir() and any(path.glob("*.safetensors*"))
    checkpoint = Checkpoint.open(path) if weights else None
    return describe(checkpoint.config if checkpoint else ModelConfig.from_file(path), checkpoint, world=world)


def print_info(
    path: Path | str, *, tb_s: float = READ_TB_S, world: int | None = None, console: Console | None = None
) -> None:
    """Print what `path`, a checkpoint directory or a `config.json`, holds and needs. Raises what opening it raises."""
    info = read_info(path, world=world)
    config, checkpoint = info.config, info.checkpoint
    console = console or wide_console()
    if checkpoint:
        console.print(f"{path}: complete, {len(checkpoint.names()):,} tensors, {len(checkpoint.ignored_names)} ignored")
    else:
        console.print(f"{path}: configuration alone, no weights beside it")
    for table in (_layer_table(info), _size_table(info), _memory_table(info)):
        console.print(table)
    for ranks, reason in info.refused_worlds.items():
        console.print(f"TP {ranks} is not possible: {reason}")
    console.print(
        f"A request keeps {_size(info.request_bytes)} and {info.context_bytes_per_token:,.1f} bytes per token of "
        "context, on every rank."
    )
    console.print(_step_table(info, tb_s))
    console.print(
        f"Assumes one request, {info.step_rows} rows, uniform routing ({info.distinct_experts:.1f} distinct of "
        f"{config.n_routed_experts} experts a layer), {tb_s} TB/s, every weight read once, activations and collectives "
        "free. Caches on top: "
        + ", ".join(f"{_size(nbytes)} at {context:,} tokens" for context, nbytes in info.state_read_bytes.items())
        + "."
    )


# -- helpers ----------------------------------------------------------------------------------------------------------


def _layer_runs(config: ModelConfig) -> list[LayerRun]:
    rows = [
        (config.role(layer), config.kv_source(layer), config.index_source(layer))
        for layer in range(config.num_hidden_layers)
    ]
    runs, first = [], 0
    for key, group in groupby(rows):
        last = first + len(list(group)) - 1
        runs.append(LayerRun(first, last, *key))
        first = last + 1
    return runs


def _layer_table(info: Info) -> Table:
    table = _table("layers", "role", "reads KV of", "reads choice of", title="Layers")
    for run in info.layers:
        span = f"{run.first}" if run.first == run.last else f"{run.first}-{run.last}"
        sources = ("-" if source is None else str(source) for source in (run.kv_source, run.index_source))
        table.add_row(span, run.role, *sources)
    drafts = info.config.num_nextn_predict_layers
    table.add_row(f"mtp.0-{drafts - 1}" if drafts > 1 else "mtp.0", "draft, window only", "-", "-")
    return table


def _size_table(info: Info) -> Table:
    table = _table("kind", "parameters", "bytes", title="Checkpoint")
    for kind, size in [*info.sizes.items(), ("total", sum(info.sizes.values(), Size()))]:
        table.add_row(kind, f"{size.parameters / 1e6:,.2f} M", _size(size.nbytes))
    return table


def _memory_table(info: Info) -> Table:
    table = _table("ranks", "experts", "all weights", "Engram tables", "sum", title="Memory of a rank")
    for memory in info.memory:
        parts = (memory.experts, memory.weights, memory.engram_tables, memory.weights + memory.engram_tables)
        table.add_row(f"TP {memory.world}", *map(_size, parts))
    table.caption = "Engram tables lie on the device, in pinned host memory, or stay in the mapped file."
    return table


def _step_table(info: Info, tb_s: float) -> Table:
    table = _table(
        "part", "stage", "calls", "a call", "a step", title=f"Bytes that a rank reads in a step, TP {info.step_world}"
    )
    for stage in info.stages:
        table.add_row(stage.part, stage.stage, str(stage.calls), _size(stage.per_call), _size(stage.nbytes))
    table.caption = f"{_size(info.step_bytes)} a step: floor {floor_ms(info.step_bytes, tb_s):.3f} ms at {tb_s} TB/s"
    return table


def _table(*columns: str, title: str) -> Table:
    """An empty table; columns of numbers are right-aligned."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        words = column in ("layers", "role", "kind", "ranks", "part", "stage")
        table.add_column(column, justify="left" if words else "right")
    return table


def _size(nbytes: float) -> str:
    """Decimal units, as drives and memory bandwidth are quoted."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:,.0f} B"
