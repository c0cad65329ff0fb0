"""Speed of `generate` on this machine: with drafts and without, interleaved, over the held-out prompts.

    python benchmarks/generate.py --out benchmarks/results/generate_cpu.json

Greedy decoding; every figure is of real text, whose mean accepted length stands beside it. The start of the command
(process start to first printed text) is measured from outside, in fresh processes.
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

from flashstep.engine import Engine, Stats
from flashstep.loading import BUNDLED_MODEL, load
from flashstep.stages.accept.reference import SamplingParams

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
    engines = {"drafts": Engine(loaded), "plain": Engine(loaded, num_speculative_tokens=0)}
    samples: dict[str, list[Stats]] = {"drafts": [], "plain": []}
    differing = 0
    for number, text in enumerate(track(texts, "generating", console=None)):
        prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)]
        outputs = {}
        # A B for one prompt, B A for the next: what drifts on the machine falls on both alike.
        for name in ("drafts", "plain") if number % 2 == 0 else ("plain", "drafts"):
            stats, deltas = engines[name].generate(
                prompt, SamplingParams(temperature=0.0), max_tokens=args.tokens, ignore_eos=True
            )
            outputs[name] = [token for delta in deltas for token in delta.tokens]
            samples[name].append(stats)
        differing += outputs["drafts"] != outputs["plain"]
    starts = [first_text_s(args.model, args.threads) for _ in range(5)]

    drafts, plain = (rate(samples[name]) for name in ("drafts", "plain"))
    accepted = sum(sum(stats.accepted) for stats in samples["drafts"])
    steps = sum(stats.steps - 1 for stats in samples["drafts"])
    record = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {args.threads} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git_head(),
        "prompts": len(texts),
        "tokens_per_prompt": args.tokens,
        "texts_that_differ": differing,
        "tokens_per_s": {"drafts": drafts, "plain": plain},
        "speedup": drafts / plain,
        "mean_accepted_length": accepted / steps + 1,
        "step_ms_median": {
            name: statistics.median(s for stats in samples[name] for s in stats.step_s) * 1000 for name in samples
        },
        "first_token_ms_median": statistics.median(stats.first_token_s for stats in samples["drafts"]) * 1000,
        "start_to_first_text_s": starts,
    }
    print(json.dumps(record, indent=2))
    if args.out:
        record["step_s"] = {name: [stats.step_s for stats in samples[name]] for name in samples}
        args.out.write_text(json.dumps(record) + "\n")


def rate(stats: list[Stats]) -> float:
    """Delivered tokens after each first one, over the time of their steps."""
    return sum(s.completion_tokens - 1 for s in stats) / sum(s.decode_s for s in stats)


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
