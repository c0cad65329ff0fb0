"""The command line: arguments in, one function of the package out. Nothing is computed here."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flashstep
from flashstep.ranks import RankFailure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. 2 = wrong usage or input, 1 = a check that failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the output's encoding lacks is shown escaped, not refused
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left: nothing to say, nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 141
    except SystemExit:  # how rich leaves when the reader of its tables has left
        return 141
    except (ValueError, OSError) as error:  # what a user can cause; every one of our messages says what to do
        print(f"flashstep: error: {error}", file=sys.stderr)
        return 2
    except RankFailure as error:
        print(f"flashstep: error: {error}", file=sys.stderr)
        return 1


# -- commands -------------------------------------------------------------------------------------------------------
# Each imports what it needs: `--help` and usage errors answer at once, without loading torch.


def _generate(args: argparse.Namespace) -> int:
    from flashstep.generate import run

    return run(args)


def _serve(args: argparse.Namespace) -> int:
    from flashstep.server.serve import run

    return run(args)


def _info(args: argparse.Namespace) -> int:
    from flashstep.info import print_info, read_info
    from flashstep.loading import BUNDLED_MODEL

    path = args.model or BUNDLED_MODEL
    if args.json:
        print(json.dumps(read_info(path, world=args.world).as_dict(), indent=2))
    else:
        print_info(path, world=args.world)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from flashstep.doctor import print_report

    return print_report(as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from flashstep.verify import print_report, verify

    report = verify(args.directory, backend=args.backend, show_progress=not args.json)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report)
    return 0 if report.passed else 1


def _bench_step(args: argparse.Namespace) -> int:
    from flashstep.bench.step import run

    return run(args)


def _bench_prefill(args: argparse.Namespace) -> int:
    from flashstep.bench.prefill import run

    return run(args)


# -- arguments ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashstep", description="Low-latency DeepSeek-V4.1-Flash with DSpark speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"flashstep {flashstep.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = _command(commands, "generate", _generate, "write on from a prompt, then say how fast it went")
    generate.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    _add_model(generate)
    generate.add_argument("--max-tokens", type=int, default=200, metavar="N", help="stop after N tokens (%(default)s)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT; repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="write on behind the end-of-sentence token")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the stream")
    _add_chat(generate)
    _add_sampling(generate)
    _add_speculation(generate)
    machine = generate.add_argument_group("machine")
    _add_backend(machine)
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    machine.add_argument("--max-model-len", type=int, metavar="N", help="room for context (default: the model's limit)")
    _add_ranks(machine)

    serve = _command(commands, "serve", _serve, "answer OpenAI clients over HTTP")
    serve.add_argument(
        "model", nargs="?", type=_path, metavar="MODEL", help="model directory (default: the bundled tiny model)"
    )
    _add_server(serve)
    _add_engine(serve)
    _add_speculation(serve)

    info = _command(commands, "info", _info, "roles, sizes and bytes of a model directory or a bare config.json")
    info.add_argument(
        "model", nargs="?", type=_path, metavar="PATH", help="model directory or config.json (default: bundled)"
    )
    info.add_argument("--world", type=int, metavar="N", help="ranks that the step's bytes are shown for (default: 4)")
    info.add_argument("--json", action="store_true", help="print JSON")

    doctor = _command(commands, "doctor", _doctor, "what this machine can run, and why not more")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    verify = _command(commands, "verify", _verify, "check golden vectors against an implementation")
    verify.add_argument("directory", type=_path, metavar="DIR", help="a directory in the golden format")
    verify.add_argument("--backend", default="reference", metavar="NAME", help="implementation to check (%(default)s)")
    verify.add_argument("--json", action="store_true", help="print JSON")

    bench = commands.add_parser("bench", help="measure on the device", description="Measure on the device.")
    what = bench.add_subparsers(required=True, metavar="WHAT")
    _add_bench_step(_command(what, "step", _bench_step, _BENCH_STEP))
    _add_bench_prefill(_command(what, "prefill", _bench_prefill, _BENCH_PREFILL))
    return parser


_BENCH_PREFILL = "times of a prompt's chunk, stage by stage: one rank's random weights, peers looped back"
_BENCH_STEP = "times of a decode step, stage by stage: one rank's random weights, peers looped back"


def _add_bench_prefill(parser: argparse.ArgumentParser) -> None:
    _add_rank(parser)
    for option, default, text in (
        ("--rows", [4096], "rows of a chunk"),
        ("--context", [0], "tokens of context in front of it"),
        ("--prompt", [], "also time whole prompts of N tokens, in chunks of the most rows (default: none)"),
    ):
        more = f" ({default[0]})" if default else ""
        parser.add_argument(option, type=int, nargs="+", default=default, metavar="N", help=text + more)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each chunk (%(default)s)")
    parser.add_argument("--json", type=_path, metavar="FILE", help="write figures and samples")


def _add_rank(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=_path, metavar="PATH", help="model directory or config.json that gives the shapes"
    )
    parser.add_argument("--world", type=int, default=4, metavar="N", help="ranks that share the model (%(default)s)")
    parser.add_argument("--num-layers", type=int, metavar="N", help="only the first N layers (default: all)")


def _add_bench_step(parser: argparse.ArgumentParser) -> None:
    _add_rank(parser)
    for option, default, text in (
        ("--requests", [1], "requests, 1..32"),
        ("--context", [1024], "tokens of context of each request"),
        ("--verified", [5], "drafts of each request that are verified, 0..5; the others are masked rows"),
    ):
        parser.add_argument(option, type=int, nargs="+", default=default, metavar="N", help=f"{text} ({default[0]})")
    parser.add_argument(
        "--product",
        choices=("wgmma", "f16", "both"),
        default="wgmma",
        help="of the experts: SM90's own, the one of every architecture, or both in turns (%(default)s)",
    )
    parser.add_argument(
        "--engram-placement",
        choices=("device", "pinned"),
        default="device",
        help="where Engram tables lie (%(default)s)",
    )
    parser.add_argument("--replays", type=int, default=40, metavar="N", help="of each step (%(default)s)")
    parser.add_argument("--json", type=_path, metavar="FILE", help="write figures and samples")
    parser.add_argument("--timeline", type=_path, metavar="FILE", help="write a picture of two layers as HTML")


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run)
    return command


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=_path, metavar="DIR", help="model directory (default: the bundled tiny model)")


def _add_backend(group: Any) -> None:
    group.add_argument(
        "--decode-backend",
        default="auto",
        choices=("auto", "latency_specialized", "portable", "reference"),
        help="what runs the steps; auto takes the best that this machine has (%(default)s)",
    )
    group.add_argument("--device", metavar="NAME", help="torch device (default: the backend's own kind)")
    group.add_argument(
        "--engram-placement",
        choices=("device", "pinned", "mapped"),
        help="where Engram tables lie: the device's memory, page-locked host memory that the GPU reads, or the mapped "
        "files (default: device; the reference: mapped)",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    chat = parser.add_argument_group("chat")
    chat.add_argument("--chat", action="store_true", help="take PROMPT as a user's message in the chat format")
    chat.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    chat.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        help="think before answering: low, high, xhigh, max or 1..100 (with --chat; default: no thinking)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="the likeliest tokens of mass P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="tokens at least P times the likeliest")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: fewer repeats")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="once per token written")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="per occurrence written")
    sampling.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="add BIAS to the logit of a token id; -inf bans it; repeatable",
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="drafts per step, 0..block size (default: block size)"
    )
    speculation.add_argument("--no-speculation", action="store_true", help="one token per step")
    speculation.add_argument(
        "--rejection",
        choices=("standard", "block", "synthetic"),
        default="standard",
        help="how drafts are accepted; synthetic is for timing alone and its text is worthless (%(default)s)",
    )
    speculation.add_argument(
        "--synthetic-accepted", type=float, metavar="N", help="mean accepted drafts per step (with synthetic)"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (%(default)s)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes any free port (%(default)s)")
    server.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="let only those with a key in; repeatable"
    )
    server.add_argument(
        "--api-key-file",
        type=_path,
        metavar="FILE",
        help="more keys, one a line; a file keeps them off the process list",
    )
    server.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME", help="name that clients use; repeatable"
    )
    server.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin read answers; repeatable",
    )
    server.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this host name; repeatable (default: loopback names alone on a loopback address "
        "without API keys, else any)",
    )
    server.add_argument("--max-body", default="16MiB", metavar="SIZE", help="largest body of a request (%(default)s)")
    server.add_argument(
        "--request-timeout", type=float, metavar="S", help="end requests after S seconds (default: never)"
    )
    server.add_argument(
        "--step-deadline",
        type=float,
        default=60.0,
        metavar="S",
        help="unhealthy when a step takes longer (%(default)s)",
    )
    server.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="when told to end, let requests finish so long (%(default)s)",
    )
    server.add_argument("--log-requests", action="store_true", help="log bodies of requests, users' text included")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    from flashstep.settings import EngineConfig

    default = EngineConfig()
    engine = parser.add_argument_group("engine")
    for option, value, text in (
        ("--max-num-seqs", default.max_num_seqs, "requests that run at once"),
        ("--prefill-schedule-interval", default.prefill_schedule_interval, "work on prompts in every N-th step"),
        ("--max-queue", default.max_queue, "requests that may wait; more get status 429"),
    ):
        engine.add_argument(option, type=int, default=value, metavar="N", help=f"{text} (%(default)s)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="rows of one step (default: what suits the backend)"
    )
    engine.add_argument(
        "--decode-slowdown",
        type=float,
        default=default.decode_slowdown,
        metavar="X",
        help="prompts may make the steps of running users take X times as long, inf: no limit (%(default)s)",
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="prompt and answer (default: the model's limit)")
    engine.add_argument(
        "--kv-cache-memory",
        default=f"{default.kv_cache_memory >> 20}MiB",
        metavar="SIZE",
        help="memory for cache pages: bytes, 512MiB, 2GiB (%(default)s)",
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="prompts share nothing")
    _add_backend(engine)
    engine.add_argument(
        "--load-format",
        choices=("checkpoint", "random"),
        default="checkpoint",
        help="random: the model directory's shapes with made-up weights, for timing (%(default)s)",
    )
    engine.add_argument("--num-layers", type=int, metavar="N", help="with random weights: only the first N layers")
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    _add_ranks(engine)


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the weights, one per GPU; each has its part of --threads' default (%(default)s)",
    )
    group.add_argument(
        "--check-ranks", action="store_true", help="compare every choice across the processes in every step (slow)"
    )


def _path(given: str) -> Path:
    if not given:  # an unset variable, as a rule; Path would take it for the current directory
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(given)


if __name__ == "__main__":
    sys.exit(main())
