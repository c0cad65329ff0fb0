"""Speed of generation on this machine: with drafts and without, interleaved, over the held-out prompts.

    python benchmarks/generate.py --out benchmarks/results/generate_cpu.json

Greedy decoding; every figure is of real text, whose mean accepted length stands beside it. `bare` is the step called in
a loop, without the engine around it: the difference to `drafts` is what the engine costs at one user. The start of the
command (process start to first printed text) is measured from outside, in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.progress import track

from flashstep.engine import Engine
from flashstep.executor import Request
from flashstep.loading import BUNDLED_MODEL, load
from flashstep.params import SamplingParams
from flashstep.requests import GenerationRequest, Usage
from flashstep.settings import EngineConfig

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = Path(__file__).parent.parent / "scripts" / "prompts_heldout.json"


def main() -> None:
    """Measure and print; write all samples where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--prompts", type=int, default=200, help="how many of the held-out prompts (default: 200)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated per prompt (default: 64)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model)
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text())["prompts"]][: args.prompts]
    engines = {
        "drafts": Engine(loaded, EngineConfig(max_num_seqs=1, enable_prefix_caching=False)),
        "plain": Engine(loaded, EngineConfig(max_num_seqs=1, enable_prefix_caching=False, num_speculative_tokens=0)),
    }
    samples: dict[str, list[Usage]] = {"drafts": [], "plain": [], "bare": []}
    differing = 0
    for number, text in enumerate(track(texts, "generating")):
        prompt = (loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text))
        outputs = {}
        # A B C for one prompt, C B A for the next: what drifts on the machine falls on all alike.
        for name in list(samples) if number % 2 == 0 else list(samples)[::-1]:
            if name == "bare":
                outputs[name], usage = bare(engines["drafts"], prompt, args.tokens)
            else:
                outputs[name], usage = with_engine(engines[name], prompt, args.tokens)
            samples[name].append(usage)
        differing += not outputs["drafts"] == outputs["plain"] == outputs["bare"]
    starts = [first_text_s(args.model, args.threads) for _ in range(5)]

    rates = {name: rate(usages) for name, usages in samples.items()}
    medians = {name: statistics.median(s for usage in samples[name] for s in usage.step_s) * 1000 for name in samples}
    accepted = sum(sum(usage.accepted) for usage in samples["drafts"])
    steps = sum(usage.steps - 1 for usage in samples["drafts"])
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {args.threads} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git_head(),
        "prompts": len(texts),
        "tokens_per_prompt": args.tokens,
        "texts_that_differ": differing,
        "tokens_per_s": rates,
        "speedup": rates["drafts"] / rates["plain"],
        "engine_overhead_of_step": medians["drafts"] / medians["bare"] - 1,
        "mean_accepted_length": accepted / steps + 1,
        "step_ms_median": medians,
        "first_token_ms_median": statistics.median(usage.first_token_s for usage in samples["drafts"]) * 1000,
        "start_to_first_text_s": starts,
    }
    print(json.dumps(record, indent=2))
    if args.out:
        record["step_s"] = {name: [usage.step_s for usage in samples[name]] for name in samples}
        args.out.write_text(json.dumps(record) + "\n")


def with_engine(engine: Engine, prompt: tuple[int, ...], count: int) -> tuple[list[int], Usage]:
    """`count` greedy tokens and their figures, through the engine."""
    request = GenerationRequest(prompt=prompt, params=GREEDY, max_tokens=count, ignore_eos=True)
    deltas = list(engine.run(request))
    assert deltas[-1].usage is not None
    return [token for delta in deltas for token in delta.tokens], deltas[-1].usage


def bare(engine: Engine, prompt: tuple[int, ...], count: int) -> tuple[list[int], Usage]:
    """The same with nothing but the step."""
    step = engine.core
    request = Request(engine.state.acquire(), list(prompt), GREEDY, 0, engine.loaded.config.vocab_size)
    step([request])
    usage = Usage(steps=1)
    while len(request.tokens) - len(prompt) < count:
        started = time.perf_counter()
        step([request])
        usage.step_s.append(time.perf_counter() - started)
        usage.steps += 1
    engine.state.release(request.slot)
    usage.decode_s = sum(usage.step_s)
    usage.completion_tokens = count
    return request.tokens[len(prompt) :][:count], usage


def rate(usages: list[Usage]) -> float:
    """Delivered tokens after each first one, over the time of their steps."""
    return sum(usage.completion_tokens - 1 for usage in usages) / sum(usage.decode_s for usage in usages)


def first_text_s(model: str, threads: int) -> float:
    """Seconds from starting the command to its first output."""
    command = [sys.executable, "-m", "flashstep", "generate", "def main():", "--model", model, "--max-tokens", "8"]
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, "--threads", str(threads)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - started


def git_head() -> str:
    """The commit that was measured, with a mark where the tree had changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
