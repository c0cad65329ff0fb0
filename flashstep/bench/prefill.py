"""`flashstep bench prefill`: where the time of a prompt's chunk goes, stage by stage, on the portable kernels.

A rank-shaped run: the weights of one rank at the configuration's shapes, random, peers looped back to the same device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flashstep import packed_weights as packed
from flashstep.bench.step import fill_caches, machine
from flashstep.config import ModelConfig
from flashstep.packed_state import PackedState
from flashstep.portable.loading import RING_ROWS
from flashstep.portable.model import PortableDraft, PortableModel, unmarked
from flashstep.state import Rows

_PAGE_TOKENS = 64


def run(args: argparse.Namespace) -> int:
    """Measure as the command line asks. Raises ValueError with a message for the user."""
    _check(args)
    device = torch.device("cuda")
    config = ModelConfig.from_file(args.config)
    if args.num_layers is not None:
        config = config.first_layers(args.num_layers)
    started = time.perf_counter()
    weights = packed.read(config, packed.RandomSource(config, 0, args.world, device), 0, args.world)
    torch.cuda.synchronize()
    loaded_s = time.perf_counter() - started
    record: dict[str, Any] = {
        "command": "flashstep " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "settings": {"world": args.world, "num_layers": config.num_hidden_layers, "repeats": args.repeats},
        "weights_s": loaded_s,
        "chunks": [],
        "prompts": [],
    }
    console = Console(highlight=False)
    console.print(f"{record['machine']['device']}: weights made in {loaded_s:.1f} s")
    bench = _Bench(weights, max(args.rows), max([*(c + max(args.rows) for c in args.context), *args.prompt]))
    for context in args.context:
        for rows in args.rows:
            found = bench.chunk(rows, context, args.repeats)
            record["chunks"].append(found)
            _print(console, found)
    for length in args.prompt:
        found = bench.prompt(length, max(args.rows), args.repeats)
        record["prompts"].append(found)
        console.print(
            f"prompt of {length:,} tokens in chunks of {found['chunk_rows']:,}: {found['ms']:.1f} ms, "
            f"{length / found['ms'] * 1e3:,.0f} tokens/s"
        )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


@dataclass
class _Marks:
    """Stages in order, each with the event in front of it."""

    found: list[tuple[str, torch.cuda.Event]]

    def __call__(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.found.append((stage, event))

    def milliseconds(self) -> dict[str, float]:
        """Time by stage; the last mark ends the last stage."""
        torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (stage, begin), (_, end) in itertools.pairwise(self.found):
            total[stage] = total.get(stage, 0.0) + begin.elapsed_time(end)
        return total


class _Bench:
    """A model, and a state whose caches are full of random entries."""

    def __init__(self, weights: packed.Weights, rows: int, length: int) -> None:
        config = self.config = weights.config
        self.state = PackedState(
            config,
            num_slots=1,
            page_tokens=_PAGE_TOKENS,
            rows_per_request=RING_ROWS,
            chunk_rows=rows,
            max_model_len=-(-length // _PAGE_TOKENS) * _PAGE_TOKENS,
            device=weights.device,
        )
        fill_caches(self.state)
        self.slot = self.state.acquire()
        self.state.reserve(self.slot, self.state.max_model_len)
        token_map = torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size
        self.model = PortableModel(weights, token_map)
        self.draft = PortableDraft(self.model)
        self.tokens = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    def _forward(self, start: int, count: int) -> None:
        """A chunk: the backbone, the draft's windows, the last row's logits."""
        rows = Rows.of([(self.slot, start, self.tokens[start : start + count])], self.model.device)
        output = self.model.forward(self.state, rows)
        self.draft.observe(self.state, rows, output.taps)
        self.model.logits(output.hidden[-1:])

    def chunk(self, rows: int, context: int, repeats: int) -> dict[str, Any]:
        """Times of a chunk of `rows` behind `context` tokens."""
        self._forward(context, rows)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        samples = [self._timed(lambda: self._forward(context, rows)) for _ in range(repeats)]
        peak = torch.cuda.max_memory_allocated() - before
        marks = _Marks([])
        self.model.mark = marks
        self._forward(context, rows)
        marks("end")
        self.model.mark = unmarked
        stages = marks.milliseconds()
        flop = _flop(self.config, self.model.weights, rows, context)
        return {
            "rows": rows,
            "context": context,
            "ms": statistics.median(samples),
            "samples_ms": samples,
            "extra_memory_bytes": peak,
            "stages": [{"stage": stage, "ms": ms, "flop": flop.get(stage)} for stage, ms in stages.items()],
        }

    def prompt(self, length: int, chunk: int, repeats: int) -> dict[str, Any]:
        """Times of a whole prompt, in chunks of `chunk` rows."""

        def whole() -> None:
            for start in range(0, length, chunk):
                self._forward(start, min(chunk, length - start))

        whole()
        samples = [self._timed(whole) for _ in range(repeats)]
        return {"tokens": length, "chunk_rows": chunk, "ms": statistics.median(samples), "samples_ms": samples}

    @staticmethod
    def _timed(call: Any) -> float:
        """Milliseconds from the first launch to the end on the device, host time included."""
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def _flop(config: ModelConfig, weights: packed.Weights, rows: int, context: int) -> dict[str, float]:
    """Floating-point operations of the rank's products, by stage."""
    layers, dim, hidden = len(weights.layers), config.head_dim, config.hidden_size
    block = weights.layers[0].block
    found: dict[str, float] = {
        "wq_a, wkv": layers * hidden * (config.q_lora_rank + dim),
        "wq_b": layers * config.q_lora_rank * weights.heads * dim,
        "wo_a": layers * weights.heads * dim * config.o_lora_rank,
        "wo_b": layers * weights.groups * config.o_lora_rank * hidden,
        "router": layers * hidden * config.n_routed_experts,
        "experts": layers * (config.num_experts_per_tok + 1) * 3 * hidden * block.moe_shape.inner,
        "mixes": layers * 2 * (2 + config.hc_mult) * config.hc_mult * config.hc_mult * hidden,
    }
    end = context + rows
    seen = 0.0
    for number in range(layers):
        ratio = config.compress_ratios[number]
        seen += config.sliding_window + (min(config.index_topk, (context + end) / 2 / ratio) if ratio else 0)
    found["attend"] = 2 * weights.heads * dim * seen
    return {stage: 2 * rows * count for stage, count in found.items()}


def _check(args: argparse.Namespace) -> None:
    problems = []
    if not torch.cuda.is_available():
        problems.append("no GPU: this measures kernels on a device; `flashstep doctor` says what is missing")
    if not args.config.exists():
        problems.append(f"{args.config}: no such file or directory")
    problems += [f"--rows {n}: expected at least 1" for n in args.rows if n < 1]
    problems += [f"--context {n}: expected at least 0" for n in args.context if n < 0]
    problems += [f"--prompt {n}: expected at least 1" for n in args.prompt if n < 1]
    if args.repeats < 1:
        problems.append(f"--repeats {args.repeats}: expected at least 1")
    if problems:
        raise ValueError("; ".join(problems))


def _print(console: Console, found: dict[str, Any]) -> None:
    staged = sum(row["ms"] for row in found["stages"])
    table = Table(title=f"{found['rows']:,} rows behind {found['context']:,} tokens: {found['ms']:.1f} ms")
    for column in ("stage", "us", "TFLOP/s", "share"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for row in sorted(found["stages"], key=lambda row: -row["ms"]):
        rate = "" if row["flop"] is None else f"{row['flop'] / row['ms'] / 1e9:.0f}"
        table.add_row(row["stage"], f"{row['ms'] * 1e3:,.0f}", rate, f"{row['ms'] / staged:.1%}")
    console.print(table)
    extra = found["extra_memory_bytes"] / 1e9
    console.print(f"stages of one run: {staged:.1f} ms; extra memory at most {extra:.2f} GB")
