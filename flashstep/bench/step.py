"""`flashstep bench step`: where a decode step's time goes, stage by stage, beside its bytes and the read ceiling.

A rank-shaped run: the weights of one rank at the configuration's shapes, random, peers looped back to the same device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashstep import packed_weights as packed
from flashstep.bench.replay import capture, interleaved_ms, read_ceiling_tb_s
from flashstep.bench.timeline import kernel_times, write_timeline
from flashstep.config import ModelConfig
from flashstep.packed_state import PackedState
from flashstep.params import SamplingParams
from flashstep.specialized.graph import GraphDecoder
from flashstep.specialized.model import SpecializedModel

_PAGE_TOKENS = 64


@dataclass(frozen=True)
class Scenario:
    """What is measured: a step of `requests` requests at `context` tokens, `verified` of the drafts active."""

    requests: int
    context: int
    verified: int
    wgmma: bool

    @property
    def name(self) -> str:
        """Short, for tables and files."""
        product = "wgmma" if self.wgmma else "f16"
        return f"{self.requests} x {1 + self.verified} rows, context {self.context}, {product}"


def run(args: argparse.Namespace) -> int:
    """Measure as the command line asks. Raises ValueError with a message for the user."""
    _check(args)
    device = torch.device("cuda")
    config = ModelConfig.from_file(args.config)
    if args.num_layers is not None:
        config = config.first_layers(args.num_layers)
    started = time.perf_counter()
    source = packed.RandomSource(config, 0, args.world, device, engram=args.engram_placement)
    weights = packed.read(config, source, 0, args.world)
    torch.cuda.synchronize()
    loaded_s = time.perf_counter() - started
    ceiling = read_ceiling_tb_s()
    record: dict[str, Any] = {
        "command": "flashstep " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "settings": {
            "world": args.world,
            "num_layers": config.num_hidden_layers,
            "replays": args.replays,
            "engram": args.engram_placement,
        },
        "weights_s": loaded_s,
        "read_ceiling_tb_s": ceiling,
        "scenarios": [],
    }
    console = Console(highlight=False)
    console.print(f"{record['machine']['device']}: reads {ceiling:.2f} TB/s; weights made in {loaded_s:.1f} s")
    for context in args.context:
        benches = [
            _Bench(weights, Scenario(requests, context, verified, wgmma))
            for requests in args.requests
            for verified in args.verified
            for wgmma in {"wgmma": (True,), "f16": (False,), "both": (True, False)}[args.product]
        ]
        samples = interleaved_ms({b.scenario.name: b.step_graph() for b in benches}, replays=args.replays)
        for bench in benches:
            found = bench.report(samples[bench.scenario.name], ceiling)
            record["scenarios"].append(found)
            _print(console, found)
        if args.timeline is not None:
            write_timeline(args.timeline, benches[0].launches, benches[0].step_graph())
        del benches
        torch.cuda.empty_cache()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


class _Bench:
    """One scenario: a state filled with random entries at its context, and the step's launches."""

    def __init__(self, weights: packed.Weights, scenario: Scenario) -> None:
        config, self.scenario = weights.config, scenario
        self.config = config
        block = config.dspark_block_size
        length = scenario.context + 2 * (block + 1)
        self.state = PackedState(
            config,
            num_slots=scenario.requests,
            page_tokens=_PAGE_TOKENS,
            rows_per_request=block + 1,
            max_model_len=-(-length // _PAGE_TOKENS) * _PAGE_TOKENS,
            device=weights.device,
        )
        fill_caches(self.state)
        token_map = torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size
        # No more rows than the scenario has, so that only its variants are compiled.
        rows = scenario.requests * (block + 1)
        self.model = SpecializedModel(weights, token_map, wgmma=scenario.wgmma, max_rows=rows)
        self.decoder = GraphDecoder(self.model, self.state, num_speculative_tokens=block)
        slots = [self.state.acquire() for _ in range(scenario.requests)]
        generator = torch.Generator().manual_seed(1)
        for slot in slots:
            self.state.reserve(slot, self.state.max_model_len)
            token = int(torch.randint(config.vocab_size, (1,), generator=generator))
            self.decoder.slots.load(
                slot, position=scenario.context, token=token, seed=slot, params=SamplingParams(temperature=0)
            )
        self.decoder.set_batch(slots)
        assert self.decoder.current is not None
        self._restore = _Restore(self.decoder, slots, scenario)
        # A replay must not advance: what moves is put back by the first launches of every step.
        self.launches = self.decoder.current.chain.launches
        self._graph: torch.cuda.CUDAGraph | None = None

    def step_graph(self) -> torch.cuda.CUDAGraph:
        """The whole step, preceded by copies that take the slots back to where the scenario stands."""
        if self._graph is None:

            def step() -> None:
                self._restore()
                for launch in self.launches:
                    launch()

            self._graph = capture(step)
        return self._graph

    def report(self, samples_ms: list[float], ceiling: float) -> dict[str, Any]:
        """Figures of the step and of its stages."""
        in_step = self._increments()
        stages: dict[str, list[int]] = {}
        for place, launch in enumerate(self.launches):
            stages.setdefault(launch.stage, []).append(place)
        table = []
        for stage, places in stages.items():
            launches = [self.launches[place] for place in places]
            table.append(
                {
                    "stage": stage,
                    "launches": len(launches),
                    "us_in_step": None if in_step is None else sum(in_step[place] for place in places),
                    "bytes": sum(launch.nbytes for launch in launches),
                }
            )
        nbytes = sum(launch.nbytes for launch in self.launches)
        floor_ms = nbytes / ceiling / 1e9
        step_ms = statistics.median(samples_ms)
        return {
            "scenario": {**vars(self.scenario), "name": self.scenario.name},
            "step_ms": step_ms,
            "bytes": nbytes,
            "floor_ms": floor_ms,
            "times_floor": step_ms / floor_ms,
            "launches": len(self.launches),
            "distinct_experts": self._distinct_experts(),
            "stages": table,
            "samples_ms": samples_ms,
        }

    def _increments(self) -> list[float] | None:
        """By how many microseconds each launch moved the end of the step on, in one profiled replay of it."""
        names = {launch.name for launch in self.launches}
        times = [kernel for kernel in kernel_times(self.step_graph()) if kernel.name in names]
        if [kernel.name for kernel in times] != [launch.name for launch in self.launches]:
            return None  # the profiler has lost kernels, or is not there
        ends = [times[0].start, *(kernel.end for kernel in times)]
        return [after - before for before, after in itertools.pairwise(ends)]

    def _distinct_experts(self) -> float | None:
        """Routed pairs of the last backbone layer in the last replay (a pair is an expert where rows are few)."""
        lists = [launch.fields["list"] for launch in self.launches if launch.name in ("experts", "gate_up")]
        found: Tensor | None = lists[-1 - self.config.num_nextn_predict_layers] if lists else None
        return None if found is None else float(found[0])


class _Restore:
    """Puts slots back: position, last token and random drafts, as many as are verified."""

    def __init__(self, decoder: GraphDecoder, slots: list[int], scenario: Scenario) -> None:
        state, block = decoder.slots, decoder.slots.block
        generator = torch.Generator().manual_seed(2)
        vocab = decoder.vocab_size
        drafts = torch.randint(vocab, (len(state.position), block + 1), generator=generator, dtype=torch.int32)
        self._pairs = [
            (state.position, state.position.clone()),
            (state.tokens, drafts.to(state.tokens.device)),
            (state.num_drafts, torch.full_like(state.num_drafts, scenario.verified)),
        ]

    def __call__(self) -> None:
        for target, value in self._pairs:
            target.copy_(value)


def fill_caches(state: PackedState) -> None:
    """Random but valid entries everywhere: codes without NaN, scales around 1."""
    stores = [state.window, state.draft_window, *state.kv.values(), *state.index_keys.values()]
    for store in stores:
        store.codes.random_(0, 256)
        if store.kind == "window":
            store.codes.bitwise_and_(0xBF)
        store.scales.fill_(0x38 if store.kind == "kv" else 127)  # E4M3 1.0, or UE8M0 2^0
    for raw in state.raw.values():
        raw.normal_()


def _check(args: argparse.Namespace) -> None:
    problems = []
    if not torch.cuda.is_available():
        problems.append("no GPU: this measures kernels on a device; `flashstep doctor` says what is missing")
    if not args.config.exists():
        problems.append(f"--config {args.config}: no such file or directory")
    problems += [f"--requests {n}: expected 1..32" for n in args.requests if not 1 <= n <= 32]
    problems += [f"--verified {n}: expected 0..5" for n in args.verified if not 0 <= n <= 5]
    problems += [f"--context {n}: expected at least 1" for n in args.context if n < 1]
    if args.replays < 4:
        problems.append(f"--replays {args.replays}: expected at least 4")
    if problems:
        raise ValueError("; ".join(problems))


def machine() -> dict[str, str]:
    """What a record says of the device and the software."""
    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return {
        "device": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": commit.stdout.strip() or "unknown",
    }


def _print(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"{found['scenario']['name']}: {found['step_ms']:.3f} ms, {found['times_floor']:.2f} x floor")
    for column in ("stage", "launches", "us each", "MB each", "TB/s", "x floor", "ms a step"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    per_ms = found["bytes"] / found["floor_ms"]
    for row in found["stages"]:
        total_us = row["us_in_step"] or float("nan")
        each_us, each_bytes = total_us / row["launches"], row["bytes"] / row["launches"]
        floor_us = each_bytes / per_ms * 1e3
        table.add_row(
            row["stage"],
            str(row["launches"]),
            f"{each_us:.2f}",
            f"{each_bytes / 1e6:.2f}",
            f"{each_bytes / each_us / 1e6:.2f}" if floor_us > 0.05 else "",
            f"{each_us / floor_us:.1f}" if floor_us > 0.05 else "",
            f"{total_us / 1e3:.3f}",
        )
    console.print(table)
    experts = found["distinct_experts"]
    console.print(
        f"floor {found['floor_ms']:.3f} ms ({found['bytes'] / 1e9:.2f} GB), {found['launches']} launches, "
        f"{experts:g} routed pairs in the last layer; us each: by how much a launch moves the step's end on "
        "(one profiled replay)"
    )
