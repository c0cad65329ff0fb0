"""compute-sanitizer over the specialized step: memory errors and shared-memory races, counted by kernel.

    python -m scripts.sanitize [--tools memcheck racecheck] [--steps 2] [--json FILE]

Runs the bundled model for a few steps under each tool: two requests, one greedy and one that samples with filters, with
drafts. Needs a GPU and compute-sanitizer, which comes with the CUDA toolkit. Ends with status 1 where a tool reports
anything of our kernels or does not come to its end. Calls of the driver that fail are not reported: torch probes with
some, and ours raise by themselves.

racecheck knows of an mbarrier's arrival only what the arriving thread wrote. Where the lanes of a warp write, meet in
sync_warp, and one of them arrives for all, it reports a race; the memory model has none there (the meeting orders the
lanes' writes before the arrival, the arrival orders them before what waits for it).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROWS = 12  # two requests of six
_FINDING = re.compile(r"=========\s+(Invalid .*|Misaligned .*|(?:Error|Warning|Info): .*)")
_PLACE = re.compile(r"=========.*?\bat (?:void )?([\w:]+)(?:[<(].*?)?\+0x[0-9a-f]+(?: in ([^ ]+))?")
_SUMMARY = re.compile(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)")


class Finding(NamedTuple):
    """What a tool reports: of which kernel, where in the sources, and what."""

    kernel: str
    place: str
    what: str


def main() -> int:
    """Run every tool asked for and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sanitize", description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], help="of compute-sanitizer")
    parser.add_argument("--steps", type=int, default=2, help="decode steps under each tool")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each tool")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to a file as well")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        decode(args.steps)
        return 0
    command = [sys.executable, "-m", "scripts.sanitize", "--child", "--steps", str(args.steps)]
    subprocess.run(command, check=True)  # compiles what is not in the cache yet, at full speed
    record, failed = {}, False
    for tool in args.tools:
        started = time.monotonic()
        log, ended = _run(tool, command, args.timeout)
        found = findings(log)
        # Ours are C functions; what the libraries' kernels do is shown, and theirs to judge.
        failed |= any("::" not in finding.kernel for finding in found) or not ended
        summary = _SUMMARY.findall(log)
        record[tool] = {
            "ended": ended,
            "seconds": round(time.monotonic() - started, 1),
            "summary": summary[-1] if summary else "",
            "findings": [{**finding._asdict(), "count": count} for finding, count in found.most_common()],
        }
        print(f"{tool}: {summary[-1] if summary else 'no summary'}, {record[tool]['seconds']} s")
        for finding, count in found.most_common(20):
            print(f"  {count:5} x {finding.kernel} {finding.place}: {finding.what}")
        if not ended:
            print(f"  the run did not end well:\n{log[-2000:]}")
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(failed)


def _run(tool: str, command: list[str], timeout_s: float) -> tuple[str, bool]:
    """Output of `command` under `tool`, and whether it came to its end."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, "--report-api-errors", "no", "--print-limit", "1000", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return output.decode(errors="replace") if isinstance(output, bytes) else output, False
    except FileNotFoundError:
        raise SystemExit("compute-sanitizer is not here: it comes with the CUDA toolkit") from None
    return done.stdout, "decoded" in done.stdout


def findings(log: str) -> Counter[Finding]:
    """The reports in a tool's output; the place is that of the first access named."""
    found: Counter[Finding] = Counter()
    what = ""
    for line in log.splitlines():
        if _SUMMARY.search(line):
            continue
        if report := _FINDING.search(line):
            what = report[1]
        if what and (place := _PLACE.search(line)):
            text = re.sub(r" at (?:void )?[\w:]+(?:[<(].*?)?\+0x[0-9a-f]+.*", "", what)
            found[Finding(place[1], (place[2] or "").rpartition("/")[2], text)] += 1
            what = ""
    return found


def decode(steps: int) -> None:
    """Two requests of the bundled model for some steps, launch by launch."""
    import torch

    from flashstep.executor import Request
    from flashstep.packed_state import PackedState
    from flashstep.params import SamplingParams
    from flashstep.specialized.loading import load_specialized
    from flashstep.specialized.model import Chain

    def launch_each(chain: Chain) -> None:
        for launch in chain.launches:
            launch()

    Chain.__call__ = launch_each  # type: ignore[method-assign]  # no graphs: a report then names a launch
    loaded = load_specialized(device="cuda", max_rows=ROWS)
    state = PackedState(
        loaded.config, num_slots=2, page_tokens=64, rows_per_request=2 * ROWS, max_model_len=256, device="cuda"
    )
    step = loaded.step(state, num_speculative_tokens=5)
    prompt = loaded.tokenizer.encode("class Stack:\n    def push(self, item):\n")[:ROWS]
    kinds = SamplingParams(temperature=0), SamplingParams(top_k=50, top_p=0.9, min_p=0.01)
    requests = [Request(state.acquire(), list(prompt), kind, 1, loaded.config.vocab_size) for kind in kinds]
    for request in requests:
        step([request], [ROWS])
    for _ in range(steps):
        step(requests)
    torch.cuda.synchronize()
    print("decoded", [len(request.tokens) - len(prompt) for request in requests], "tokens")


if __name__ == "__main__":
    sys.exit(main())
