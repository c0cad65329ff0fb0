"""A server under load: many streaming clients, some of which leave, ask nonsense or share prefixes.

    python benchmarks/load.py --minutes 5 --clients 64 --out benchmarks/results/load_cpu.json

Starts `flashstep serve` with the bundled model on a loopback port, asks each request once alone, then lets the clients
loose. Every answer that finishes must equal the one given alone; afterwards pages, slots, file descriptors and memory
must be back. Then measures the pace of one running user beside the prompt of another. Exits 1 on a broken promise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

PROMPTS = Path(__file__).parent.parent / "scripts" / "prompts_heldout.json"
# Cache pages are allocated at the start but touched, and so counted, as they are used for the first time.
MEMORY_SLACK_MIB = 700
BAD_REQUESTS: list[dict[str, Any]] = [
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": []},
    {"prompt": "x", "model": "no-such-model"},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "logit_bias": {"a": 1}},
]


@dataclass
class Tally:
    """What the clients saw."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0


def main() -> int:
    """Run all parts and print the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=48, help="different requests (default: 48)")
    parser.add_argument("--port", type=int, default=18321)
    parser.add_argument("--long-prompt", type=int, default=4000, help="tokens of the prompt beside a running user")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-m", "flashstep", "serve", "--port", str(args.port)]
    server = subprocess.Popen(command)
    try:
        record = asyncio.run(_measure(args, psutil.Process(server.pid)))
    finally:
        server.terminate()
        code = server.wait(60)
    record |= {"server_exit_code": code, "machine": f"{platform.machine()}, {psutil.cpu_count()} cores"}
    record["command"] = " ".join(["python", *sys.argv])
    if code != 0:
        record["faults"].append(f"the server exited with {code} on SIGTERM")
    print(json.dumps(record, indent=2))
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    return 1 if record["faults"] else 0


async def _measure(args: argparse.Namespace, server: psutil.Process) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{args.port}", timeout=httpx.Timeout(300), limits=limits
    ) as client:
        await _until_ready(client)
        requests = _requests(args.requests)
        alone = [await _whole(client, request) for request in requests]
        await asyncio.sleep(0.5)
        at_rest = await _held(client, server)
        tally = Tally()
        end = time.monotonic() + args.minutes * 60
        started = time.monotonic()
        await asyncio.gather(*(_client(client, seed, requests, alone, end, tally) for seed in range(args.clients)))
        took = time.monotonic() - started
        after = await _until_at_rest(client, server, at_rest)
        again = [await _whole(client, request) for request in requests[:6]]
        tally.faults += [f"request {i} changed for good" for i, text in enumerate(again) if text != alone[i]]
        for name in ("slots", "pages", "waiting"):
            if after[name] != at_rest[name]:
                tally.faults.append(f"{name}: {at_rest[name]} before, {after[name]} after")
        if after["descriptors"] > at_rest["descriptors"] + 2:
            tally.faults.append(f"descriptors: {at_rest['descriptors']} before, {after['descriptors']} after")
        if after["memory_mib"] > at_rest["memory_mib"] + MEMORY_SLACK_MIB:
            tally.faults.append(f"memory: {at_rest['memory_mib']:.0f} MiB before, {after['memory_mib']:.0f} after")
        pace = await _pace(client, args.long_prompt)
        if pace["ratio_of_means"] > 2:
            tally.faults.append(f"a running user was slowed down {pace['ratio_of_means']:.2f} times by a prompt")
        return {
            "clients": args.clients,
            "seconds": took,
            "ended": dict(tally.ended),
            "tokens_per_s": tally.tokens / took,
            "first_token_s_median": statistics.median(tally.first_s),
            "before": at_rest,
            "after": after,
            "pace": pace,
            "faults": tally.faults[:50],
        }


def _requests(count: int) -> list[dict[str, Any]]:
    """Requests of every kind; a third share a long prefix."""
    draws = random.Random(0)
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text())["prompts"]]
    shared = "\n".join(texts[-8:])
    requests = []
    for number in range(count):
        text = texts[number % (len(texts) - 8)]
        request: dict[str, Any] = {
            "prompt": shared + text if number % 3 == 0 else text,
            "max_tokens": draws.randrange(8, 96),
            "temperature": 0.0 if number % 2 else 0.8,
            "seed": number,
        }
        if number % 5 == 0:
            request["stop"] = ["\n\n", "self"]
        if number % 7 == 0:
            request |= {"presence_penalty": 0.5, "top_p": 0.9}
        requests.append(request)
    return requests


async def _client(
    client: httpx.AsyncClient,
    seed: int,
    requests: list[dict[str, Any]],
    alone: list[str],
    end: float,
    tally: Tally,
) -> None:
    draws = random.Random(seed)
    while time.monotonic() < end:
        number = draws.randrange(len(requests))
        kind = draws.random()
        try:
            if kind < 0.1:
                bad = draws.choice(BAD_REQUESTS)
                answer = await client.post("/v1/completions", json=bad)
                if not 400 <= answer.status_code < 500:
                    tally.faults.append(f"{bad} was answered with {answer.status_code}")
                tally.ended["refused"] += 1
            elif kind < 0.25:
                await _leave(client, requests[number], draws.randrange(1, 6))
                tally.ended["left"] += 1
            elif kind < 0.35:
                answer = await client.post("/v1/completions", json=requests[number])
                _compare(answer.json()["choices"][0]["text"], alone[number], number, tally)
            else:
                _compare(await _whole(client, requests[number], tally), alone[number], number, tally)
        except Exception as error:  # whatever a client meets is a finding
            tally.faults.append(f"request {number}: {type(error).__name__}: {error}")


def _compare(text: str, expected: str, number: int, tally: Tally) -> None:
    tally.ended["finished"] += 1
    if text != expected:
        tally.faults.append(f"request {number} differs from its answer alone: {text[:60]!r} / {expected[:60]!r}")


async def _events(client: httpx.AsyncClient, request: dict[str, Any]):
    body = request | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event


async def _whole(client: httpx.AsyncClient, request: dict[str, Any], tally: Tally | None = None) -> str:
    text, started, first = "", time.monotonic(), None
    async for event in _events(client, request):
        if event["choices"]:
            first = first or time.monotonic() - started
            text += event["choices"][0]["text"]
        elif tally is not None:
            tally.tokens += event["usage"]["completion_tokens"]
    if tally is not None and first is not None:
        tally.first_s.append(first)
    return text


async def _leave(client: httpx.AsyncClient, request: dict[str, Any], events: int) -> None:
    """Close the connection in the middle of an answer."""
    seen = 0
    async for _ in _events(client, request | {"max_tokens": 400}):
        seen += 1
        if seen == events:
            return


async def _pace(client: httpx.AsyncClient, prompt_tokens: int) -> dict[str, float]:
    """Gaps between the chunks of one running user: alone, and while another's long prompt is computed."""
    running = {"prompt": "def main():\n", "max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
    times: list[float] = []

    async def run() -> None:
        async for _ in _events(client, running):
            times.append(time.monotonic())

    user = asyncio.create_task(run())
    while len(times) < 80:
        await asyncio.sleep(0.02)
    draws = random.Random(1)
    prompt = [draws.randrange(300, 1000) for _ in range(prompt_tokens)]
    begin = time.monotonic()
    answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    answer.raise_for_status()
    end = time.monotonic()
    user.cancel()
    alone = [b - a for a, b in itertools.pairwise(times) if b < begin]
    beside = [b - a for a, b in itertools.pairwise(times) if begin < a and b < end]
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_s": end - begin,
        "gap_alone_ms_mean": statistics.mean(alone) * 1000,
        "gap_beside_prompt_ms_mean": statistics.mean(beside) * 1000,
        "gap_beside_prompt_ms_max": max(beside) * 1000,
        "ratio_of_means": statistics.mean(beside) / statistics.mean(alone),
    }


async def _until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("the server did not become ready within a minute")


async def _held(client: httpx.AsyncClient, server: psutil.Process) -> dict[str, float]:
    """What the server holds, by its own metrics and by the operating system."""
    text = (await client.get("/metrics")).text

    def gauge(name: str) -> float:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"/metrics has no {name}")
        return float(found[1])

    return {
        "slots": gauge("flashstep_slots_free"),
        "pages": gauge("flashstep_pages_free"),
        "waiting": gauge("flashstep_requests_waiting"),
        "descriptors": server.num_fds(),
        "memory_mib": server.memory_info().rss / 2**20,
    }


async def _until_at_rest(client: httpx.AsyncClient, server: psutil.Process, rest: dict[str, float]) -> dict[str, float]:
    for _ in range(100):
        held = await _held(client, server)
        if all(held[name] == rest[name] for name in ("slots", "pages", "waiting")):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    return await _held(client, server)


if __name__ == "__main__":
    sys.exit(main())
