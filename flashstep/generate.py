"""`flashstep generate`: one prompt, streamed, with the figures of its steps."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from flashstep.backends import Choice, choose, load_for
from flashstep.chat import (
    ContentText,
    Event,
    OutputParser,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    render_chat,
    thinking_budget,
)
from flashstep.engine import Engine
from flashstep.loading import BUNDLED_MODEL, LoadedModel, check_device
from flashstep.params import InvalidSamplingParams, SamplingParams
from flashstep.ranks.launch import Ranks, ranks_for
from flashstep.requests import GenerationRequest, Usage
from flashstep.settings import EngineConfig
from flashstep.terminal import progress_bar

SYNTHETIC_NOTE = "SYNTHETIC ACCEPTANCE: drafts were taken by chance; figures are for timing, the text is worthless"


def run(args: argparse.Namespace) -> int:
    """Generate as the command line asks. Raises ValueError or OSError with a message for the user."""
    params = _check(args)
    text = _prompt_text(args)
    choice = choose(args.decode_backend, args.device, world=args.tensor_parallel_size)
    with ranks_for(
        BUNDLED_MODEL if args.model is None else args.model,
        args.tensor_parallel_size,
        device=choice.device,
        threads=args.threads,
        check=args.check_ranks,
    ) as ranks:
        return _run(args, params, text, choice, ranks)


def _run(args: argparse.Namespace, params: SamplingParams, text: str, choice: Choice, ranks: Ranks | None) -> int:
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    started = time.perf_counter()
    config = EngineConfig(
        max_num_seqs=1,
        max_model_len=args.max_model_len,
        enable_prefix_caching=False,
        num_speculative_tokens=0 if args.no_speculation else args.num_speculative_tokens,
        rule=args.rejection,
        synthetic_accepted=args.synthetic_accepted,
    )
    with progress_bar("loading tensors") as progress:
        if ranks is None:
            engine = Engine(load_for(choice, args.model, engram=args.engram_placement, progress=progress), config)
        else:
            engine = ranks.engine(config, progress)
    prompt, thinking = _prompt(args, text, engine.loaded)
    parser = OutputParser(thinking=thinking, tools=False) if args.chat else None
    room = max(1, engine.max_model_len - len(prompt))  # a prompt that leaves none is refused by the engine
    request = GenerationRequest(
        prompt=tuple(prompt),
        params=params,
        max_tokens=min(args.max_tokens, room),
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    engine.check(request)
    load_s = time.perf_counter() - started

    token_ids: list[int] = []
    said: dict[str, list[str]] = {"text": [], "reasoning": []}
    finish_reason, usage = None, Usage()
    for delta in engine.run(request):
        if delta.error is not None:
            raise ValueError(delta.error)
        usage = delta.usage or usage
        token_ids += delta.tokens
        finish_reason = delta.finish_reason
        for kind, text in _texts(delta.pieces, parser, last=finish_reason is not None):
            said[kind].append(text)
            if not args.json:
                print(text, end="", flush=True)
    if args.json:
        record = _record(usage, load_s, engine, finish_reason)
        record |= {"text": "".join(said["text"]), "token_ids": token_ids}
        if args.chat:
            record["reasoning"] = "".join(said["reasoning"])
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        print(flush=True)  # the text ends before the figures begin, also where both streams share a file
        print(_summary(usage, load_s, finish_reason), file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters. Refuses options that contradict each other, have no effect or cannot be, all at once.

    What only the loaded model can tell (its context, its block, its vocabulary) is checked after loading.
    """
    problems = []
    if args.model is not None and not args.model.is_dir():
        problems.append(f"--model {args.model}: no such directory; give one on this machine, nothing is downloaded")
    if args.no_speculation and args.num_speculative_tokens:
        problems.append("--no-speculation and --num-speculative-tokens exclude each other: give one")
    if (args.rejection == "synthetic") != (args.synthetic_accepted is not None):
        problems.append("--rejection synthetic and --synthetic-accepted N go together")
    if args.chat:
        try:
            thinking_budget(_effort(args))
        except ValueError as error:
            problems.append(f"--{error}".replace("reasoning_effort", "reasoning-effort", 1))
    elif args.system is not None or args.reasoning_effort is not None:
        problems.append("--system and --reasoning-effort need --chat")
    if args.engram_placement and args.tensor_parallel_size > 1:
        problems.append("--engram-placement is for one rank so far: leave --tensor-parallel-size out")
    if args.max_tokens < 1:
        problems.append(f"--max-tokens {args.max_tokens}: expected at least 1")
    if "" in args.stop:
        problems.append("--stop '': an empty text is nothing to stop at, leave it out")
    cores = os.cpu_count() or 1
    if args.threads is not None and not 1 <= args.threads <= cores:
        problems.append(f"--threads {args.threads}: expected 1..{cores}, the cores of this machine")
    try:
        check_device(args.device or "cpu")
    except ValueError as error:
        problems.append(f"--{error}")
    bias: dict[int, float] = {}
    for given in args.logit_bias:
        token, _, value = given.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            problems.append(f"--logit-bias {given}: expected TOKEN=BIAS, for example 42=-inf")
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    try:
        params = SamplingParams.from_fields({name: getattr(args, name) for name in names} | {"logit_bias": bias})
    except InvalidSamplingParams as error:
        problems += error.problems
    if len(problems) > 1:
        raise ValueError("\n  - ".join([f"{len(problems)} problems with the options:", *problems]))
    if problems:
        raise ValueError(problems[0])
    return params


def _effort(args: argparse.Namespace) -> str | int | None:
    """The reasoning effort as the chat format takes it: a number or a name."""
    effort: str | None = args.reasoning_effort
    try:
        return None if effort is None else int(effort)
    except ValueError:
        return effort


def _prompt_text(args: argparse.Namespace) -> str:
    """The prompt, from the command line or standard input."""
    try:
        text: str = sys.stdin.read() if args.prompt == "-" else args.prompt
        text.encode()  # bytes that are no UTF-8 may also arrive as surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"the prompt is not UTF-8 text ({error.reason} at {error.start})") from None
    if not text:
        raise ValueError("the prompt is empty: give at least one character")
    return text


def _prompt(args: argparse.Namespace, text: str, loaded: LoadedModel) -> tuple[list[int], bool]:
    """Token ids of the prompt, and whether the answer starts with reasoning."""
    tokenizer = loaded.tokenizer
    if not args.chat:
        return [tokenizer.bos_id, *tokenizer.encode(text)], False
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    effort = _effort(args)
    prompt = render_chat(
        [*messages, {"role": "user", "content": text}], thinking=effort is not None, reasoning_effort=effort
    )
    return tokenizer.encode_prompt(prompt.pieces), prompt.thinking


def _texts(pieces: Sequence[Piece], parser: OutputParser | None, *, last: bool) -> list[tuple[str, str]]:
    """What to show of `pieces`: (kind, text), with kind "text" or "reasoning"."""
    if parser is None:
        return [("text", piece.text) for piece in pieces if not piece.special]
    events = parser.push(pieces)
    if last:
        events += parser.finish()
    return [_event_text(event) for event in events]


def _event_text(event: Event) -> tuple[str, str]:
    match event:
        case ReasoningText(text):
            return "reasoning", text
        case ContentText(text):
            return "text", text
        case ToolCallStart(name=name):
            return "text", f"\n[call {name} "
        case ToolCallArguments(text=text):
            return "text", text
        case ToolCallEnd():
            return "text", "]\n"


def _record(stats: Usage, load_s: float, engine: Engine, finish_reason: str | None) -> dict[str, Any]:
    record = {
        "model": str(engine.loaded.path),
        "backend": "reference",
        "finish_reason": finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "num_speculative_tokens": engine.core.num_speculative_tokens,
        "rejection": engine.core.rule,
        "synthetic": stats.synthetic,
        "steps": stats.steps,
        "tokens_per_step": stats.tokens_per_step,
        "drafted_per_position": stats.drafted,
        "accepted_per_position": stats.accepted,
        "load_s": load_s,
        "time_to_first_token_s": stats.first_token_s,
        "tokens_per_s": stats.tokens_per_s,
        "step_s": stats.step_s,
    }
    return record | ({"note": SYNTHETIC_NOTE} if stats.synthetic else {})


def _summary(stats: Usage, load_s: float, finish_reason: str | None) -> str:
    """The figures behind a stream. Per step and per token are different words here."""
    mark = f"{SYNTHETIC_NOTE}\n" if stats.synthetic else ""
    count = stats.completion_tokens
    speed = f"{stats.tokens_per_s:.1f} tokens/s after the first, " if count > 1 else ""
    lines = [
        f"{mark}{count} token{'s' if count > 1 else ''} ({finish_reason}), {speed}"
        f"time to first token {stats.first_token_s * 1000:.0f} ms ({stats.prompt_tokens} prompt tokens), "
        f"load {load_s:.1f} s",
    ]
    if stats.step_s:
        median_ms = statistics.median(stats.step_s) * 1000
        lines.append(
            f"{len(stats.step_s)} decoding steps of {median_ms:.1f} ms (median), {stats.tokens_per_step:.2f} tokens "
            "per step" + (" [synthetic]" if stats.synthetic else "")
        )
    if any(stats.drafted):
        rates = [f"{a}/{d} ({a / d:.0%})" for a, d in zip(stats.accepted, stats.drafted, strict=True) if d]
        label = "accepted drafts by position [synthetic]: " if stats.synthetic else "accepted drafts by position: "
        lines.append(label + ", ".join(rates))
    return "\n".join(lines)
