"""The server over a scripted engine: faults, refusals and borders that the model does not show; and the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import NOT_THINKING, TOOLS, USER, client_of, events, joined, running, wait_until

from flashstep.chat import Piece, Tokenizer
from flashstep.chat.tokens import DSML, END_THINK
from flashstep.loading import BUNDLED_MODEL
from flashstep.requests import (
    Delta,
    EngineDead,
    EngineStats,
    GenerationRequest,
    QueueFull,
    RequestError,
    TokenLogprob,
    Usage,
)
from flashstep.server import app as app_module
from flashstep.server.interface import ServerSettings
from flashstep.server.serve import Server, parse_bytes

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
STATS = EngineStats(
    ready=True,
    failure=None,
    last_step_age_s=0.0,
    running=0,
    waiting=0,
    free_slots=4,
    total_slots=4,
    free_pages=8,
    total_pages=8,
    cached_pages=0,
    page_tokens=64,
    steps=0,
    prompt_tokens=0,
    cached_tokens=0,
    completion_tokens=0,
    drafted=(0,),
    accepted=(0,),
    preemptions=0,
    finished={},
    cache_queries=0,
    cache_hits=0,
    cache_misses={},
    step_s_sum=0.0,
)


def spelled(text: str) -> list[Piece]:
    """Pieces of an output in which markers are spelled out."""
    parts = re.split(f"({END_THINK}|{DSML})", text)
    return [Piece(part, special=part in (END_THINK, DSML)) for part in parts if part]


@dataclass
class ScriptedEngine:
    """Says the same to everyone, one string a step; `fault` is raised or given where the script says None."""

    script: Sequence[str | None] = ("Hello", " world")
    fault: Exception | Delta | None = None
    refusal: Exception | None = None
    pause_s: float = 0.0
    finish: str = "stop"
    state: EngineStats = STATS
    tokenizer: Tokenizer = TOKENIZER
    model_name: str = "scripted"
    vocab_size: int = TOKENIZER.vocab_size
    max_model_len: int = 4096
    asked: list[GenerationRequest] = field(default_factory=list)
    open: int = 0

    def check(self, request: GenerationRequest) -> None:
        if self.refusal is not None:
            raise self.refusal

    def stats(self) -> EngineStats:
        return self.state

    async def shutdown(self, grace_s: float) -> None:
        await asyncio.sleep(0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.asked.append(request)
        self.open += 1
        usage = Usage(prompt_tokens=len(request.prompt), drafted=[0], accepted=[0])
        try:
            for number, text in enumerate(self.script):
                await asyncio.sleep(self.pause_s)
                if text is None:
                    if isinstance(self.fault, Delta):
                        yield self.fault
                        return
                    assert self.fault is not None
                    raise self.fault
                pieces = spelled(text)
                tokens = self.tokenizer.encode_prompt(pieces)
                usage.completion_tokens += len(tokens)
                usage.steps += 1
                last = number == len(self.script) - 1
                yield Delta(
                    tokens,
                    pieces,
                    logprobs=None if request.logprobs is None else [TokenLogprob(t, -float("inf"), ()) for t in tokens],
                    finish_reason=self.finish if last else None,
                    usage=usage if last else None,
                )
        finally:
            self.open -= 1


@contextlib.contextmanager
def scripted(engine: ScriptedEngine, **settings: Any) -> Iterator[httpx.Client]:
    with running(engine, **settings) as url, client_of(url) as client:
        yield client


CALLS = (
    f"\n\n<{DSML} calls>\n"
    f'<{DSML} invoke name="find">\n<{DSML} parameter name="q" string="true">a "b"\n</x></{DSML} parameter>\n'
    f'<{DSML} parameter name="k" string="false">[1, {{"z": null}}]</{DSML} parameter>\n</{DSML} invoke>\n'
    f'<{DSML} invoke name="stop">\n\n</{DSML} invoke>\n</{DSML} calls>'
)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_borders_inside_a_step(width: int) -> None:
    """The end of thinking and several calls, cut anywhere: stream and whole agree with what was rendered."""
    text = f"I have to look.{END_THINK}Looking: ü数{CALLS}"
    # Cut between pieces' characters, but never a special token.
    atoms = [atom for piece in spelled(text) for atom in ([piece.text] if piece.special else piece.text)]
    steps = ["".join(atoms[at : at + width]) for at in range(0, len(atoms), width)]
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": name}} for name in ("find", "stop")]}
    with scripted(ScriptedEngine(steps)) as client:
        whole = client.post("/v1/chat/completions", json=body).json()
        found = events(client, "/v1/chat/completions", body)
    assert len(found) == len(steps) + 1
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "I have to look."
    assert message["content"] == "Looking: ü数"
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("find", {"q": 'a "b"\n</x>', "k": [1, {"z": None}]}), ("stop", {})]
    streamed = joined(found)[0]
    assert [(call["name"], json.loads(call["arguments"])) for call in streamed["tool_calls"]] == calls
    assert (streamed["content"], streamed["reasoning_content"]) == (message["content"], message["reasoning_content"])
    assert streamed["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    expected = sum(len(TOKENIZER.encode_prompt(spelled(step))) for step in steps[: _step_of(steps, END_THINK)])
    border = TOKENIZER.encode_prompt(spelled(steps[_step_of(steps, END_THINK)]))
    expected += border.index(TOKENIZER.special_id(END_THINK)) + 1
    for usage in (whole["usage"], found[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == expected


def _step_of(steps: Sequence[str], marker: str) -> int:
    return next(number for number, step in enumerate(steps) if marker in step)


def test_a_call_that_is_cut_off_is_no_finished_call() -> None:
    with scripted(ScriptedEngine([END_THINK + CALLS[:90]], finish="length")) as client:
        body = {"messages": USER, "tools": TOOLS}
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "find"


def test_what_the_engine_is_asked() -> None:
    engine = ScriptedEngine()
    with scripted(engine) as client:
        body = {
            "messages": USER,
            "temperature": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": (1 << 63) - 1,
            "n": 2,
            "logit_bias": {"5": -100},
            "stop": "x",
            "stop_token_ids": [9],
            "min_tokens": 2,
            "ignore_eos": True,
            "max_tokens": 9,
            "max_completion_tokens": 7,
            "logprobs": True,
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS, "tool_choice": "none"})
        client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})
        client.post(
            "/v1/chat/completions", json={"messages": USER, "response_format": {"type": "json_object"}} | NOT_THINKING
        )
        client.post("/v1/chat/completions", json={"messages": USER, "response_format": {"type": "json_object"}})
    first, second, no_call, free, constrained, after_thinking = engine.asked
    assert (first.params.seed, second.params.seed) == ((1 << 63) - 1, -(1 << 63))
    assert (first.params.temperature, first.params.top_k, first.params.min_p) == (0.5, 0, 0.1)
    assert first.params.logit_bias == {5: -100}
    assert (first.max_tokens, first.min_tokens, first.ignore_eos) == (7, 2, True)
    assert (first.stop, first.stop_token_ids, first.logprobs) == (("x",), frozenset({9}), 0)
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert no_call.params.logit_bias == {TOKENIZER.special_id(DSML): float("-inf")}
    assert no_call.prompt == free.prompt  # tool_choice leaves the cached prompt alone
    assert free.grammar is None
    assert free.max_tokens is None
    assert (constrained.grammar.kind, after_thinking.grammar.kind) == ("json_object", "lark")


@pytest.mark.parametrize(
    ("fault", "status", "kind", "code"),
    [
        (Delta([], [], finish_reason="error", error="non-finite logits"), 500, "server_error", "engine_error"),
        (RuntimeError("secret text"), 500, "server_error", "internal_error"),
        (EngineDead("the step raised"), 503, "service_unavailable_error", "engine_unavailable"),
        (QueueFull(3, 2.5), 429, "rate_limit_error", "queue_full"),
        (RequestError("prompt", "too long"), 400, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_faults_before_and_behind_the_first_delta(
    path: str, fault: Any, status: int, kind: str, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "x", "messages": USER}
    with scripted(ScriptedEngine([None], fault)) as client:
        for asked in (body, body | {"stream": True}):
            answer = client.post(path, json=asked)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == (kind, code)
            if status == 429:
                assert answer.headers["retry-after"] == "3"
    engine = ScriptedEngine(["Hello", None], fault)
    with scripted(engine) as client:
        assert client.post(path, json=body).status_code == status
        found = events(client, path, body)
        assert len(found) == 2
        assert found[1]["error"]["type"] == kind
    assert engine.open == 0
    assert "secret" not in caplog.text
    assert "secret" not in json.dumps(found)


def test_one_failing_choice_ends_the_others() -> None:
    class OneFails(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            fails = request.params.seed == 1
            async for delta in replace(self, script=["a", None] if fails else ["b"] * 50).base(request):
                yield delta

        def base(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            return super().generate(request)

    engine = OneFails(fault=Delta([], [], finish_reason="error", error="bad row"), pause_s=0.02)
    with scripted(engine) as client:
        started = time.monotonic()
        answer = client.post("/v1/completions", json={"prompt": "x", "n": 3, "seed": 0})
        assert answer.status_code == 500
        assert time.monotonic() - started < 0.8


@pytest.mark.parametrize(
    ("refusal", "status"), [(QueueFull(9, 0.2), 429), (EngineDead("gone"), 503), (RequestError("stop", "bad"), 400)]
)
def test_refusals_of_the_engine(refusal: Exception, status: int) -> None:
    with scripted(ScriptedEngine(refusal=refusal)) as client:
        for stream in (False, True):
            answer = client.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert answer.status_code == status
            if status == 429:
                assert answer.headers["retry-after"] == "1"


def test_deadline() -> None:
    engine = ScriptedEngine(["a"] * 100, pause_s=0.05)
    with scripted(engine, request_timeout_s=0.2) as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        found = events(client, "/v1/completions", {"prompt": "x"})
        assert found[-1]["error"]["type"] == "timeout_error"
        assert engine.open == 0
    queued = ScriptedEngine(["a"], pause_s=5)
    with scripted(queued, request_timeout_s=0.1) as client:
        assert client.post("/v1/completions", json={"prompt": "x", "stream": True}).status_code == 504


def test_a_client_that_leaves_before_the_first_delta() -> None:
    engine = ScriptedEngine(["a"], pause_s=30)
    with running(engine) as url:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": "x", "n": 3}):
            with httpx.Client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body)
            wait_until(lambda: engine.open == 0, "the engine's requests are closed", 3)
        text = httpx.get(f"{url}/metrics").text
    assert 'flashstep_http_requests_total{path="/v1/completions",status="499"} 3.0' in text


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (replace(STATS, ready=False), "starting"),
        (replace(STATS, failure="a step raised"), "failed"),
        (replace(STATS, running=2, last_step_age_s=99.0), "stuck"),
    ],
)
def test_health_of_an_engine_that_cannot_serve(state: EngineStats, status: str) -> None:
    engine = ScriptedEngine(state=state)
    with scripted(engine) as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == status
        assert health.json()["reason"]
        answer = client.post("/v1/chat/completions", json={"messages": USER})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == f"engine_{status}"
        assert answer.headers["retry-after"]
        engine.state = replace(STATS, last_step_age_s=99.0)  # idle for long is no fault
        assert client.get("/health").json() == {"status": "ok", "reason": None}


def test_keys() -> None:
    with scripted(ScriptedEngine(), api_keys=("first", "sécond")) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic first"},
            {"authorization": "first"},
        ):
            for path in ("/v1/models", "/metrics", "/tokenize", "/nowhere"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "sécond"):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200


def test_bodies_over_the_limit() -> None:
    with scripted(ScriptedEngine(), max_body_bytes=1_000_000) as client:
        declared = client.post("/v1/completions", json={"prompt": "x" * 3_000_000})
        chunks = (b"x" * 100_000 for _ in range(30))
        undeclared = client.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
        for answer in (declared, undeclared):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert client.post("/v1/completions", json={"prompt": "x" * 900_000}).status_code == 200


def test_routes_methods_and_types() -> None:
    with scripted(ScriptedEngine()) as client:
        assert client.get("/v1/nothing").status_code == 404
        wrong = client.get("/v1/completions")
        assert wrong.status_code == 405
        assert "POST" in wrong.headers["allow"]
        assert client.post("/v1/completions", content=b'{"prompt": "x"}').status_code == 415
        json_type = {"content-type": "application/json"}
        for content in (b"{", b"", b"[" * 100_000, b'{"prompt": "\xff"}'):
            answer = client.post("/v1/completions", content=content, headers=json_type)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert client.post("/v1/completions", content=b"[]", headers=json_type).status_code == 400
        surrogate = client.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers=json_type)
        assert surrogate.status_code == 400
        surrogate = client.post(
            "/v1/chat/completions", content=b'{"messages": [{"role": "user", "content": "\\ud800"}]}', headers=json_type
        )
        assert surrogate.status_code == 400
        assert client.post("/detokenize", json={"tokens": [99999]}).json()["error"]["param"] == "tokens"


def test_headers_over_the_limit() -> None:
    with running(ScriptedEngine()) as url:
        with contextlib.suppress(httpx.ReadError, httpx.WriteError):  # closed before all was sent
            assert httpx.get(f"{url}/health", headers={"x-filler": "y" * 200_000}).status_code == 400
        assert httpx.get(f"{url}/health", headers={"x-filler": "y" * 2000}).status_code == 200


def test_other_origins_are_kept_out_unless_asked() -> None:
    asks = {"origin": "http://page.example", "access-control-request-method": "POST"}
    with scripted(ScriptedEngine()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=asks).headers
    with scripted(ScriptedEngine(), cors_origins=("http://page.example",), api_keys=("k",)) as client:
        preflight = client.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        denied = client.get("/v1/models", headers=asks)
        assert (denied.status_code, denied.headers["access-control-allow-origin"]) == (401, "http://page.example")
        other = client.get("/health", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_users_text_is_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flashstep")
    with scripted(ScriptedEngine()) as client:
        client.post("/v1/completions", json={"prompt": "my diary", "temperature": "diary"})
        client.post("/v1/completions", json={"prompt": "my diary"})
    assert "diary" not in caplog.text
    with scripted(ScriptedEngine(), log_requests=True) as client:
        client.post("/v1/completions", json={"prompt": "my diary"})
    assert "my diary" in caplog.text


def test_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr(app_module, "PAGE", page)
    with scripted(ScriptedEngine(), api_keys=("k",)) as client:
        assert client.get("/").json()["error"]["code"] == "no_page"
        page.write_text("<!doctype html><title>x</title>")
        answer = client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src" in answer.headers["content-security-policy"]


def test_a_server_that_was_told_to_end_refuses_new_requests() -> None:
    engine = ScriptedEngine(["a"] * 20, pause_s=0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(engine, ServerSettings(), grace_s=5)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        client_of(url) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.should_exit = True
        rest = list(lines)
    thread.join(10)
    assert not thread.is_alive()
    assert rest[-2:] == ["data: [DONE]", ""], "a running request is finished"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


# -- the process ----------------------------------------------------------------------------------------------------


def test_the_server_imports_no_tensor_library() -> None:
    code = "import sys, flashstep.server.app, flashstep.server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("grace_s", "signals"), [("0.5", [signal.SIGTERM]), ("60", [signal.SIGINT, signal.SIGINT])])
def test_signals_under_load(grace_s: str, signals: list[signal.Signals]) -> None:
    """Clients of requests that outlast the grace period, or a second signal, are told; the process ends in order."""
    options = [
        "--port",
        "0",
        "--grace",
        grace_s,
        "--threads",
        "1",
        "--max-model-len",
        "2048",
        "--kv-cache-memory",
        "128MiB",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "flashstep", "serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        seen = ""
        while "ready" not in seen or "http://" not in seen:
            line = process.stderr.readline()
            assert line, f"the server did not start: {seen}"
            seen += line
        port = re.search(r"http://127\.0\.0\.1:(\d+)", seen)
        assert port, seen
        assert re.search(r"tokens of context .* requests at once", seen)
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
        with client_of(f"http://127.0.0.1:{port[1]}") as client, ThreadPoolExecutor(1) as pool:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                whole = pool.submit(client.post, "/v1/completions", json=body)
                time.sleep(0.2)
                for number in signals:
                    process.send_signal(number)
                    time.sleep(0.3)
                rest = [line for line in lines if line]
            assert whole.result().status_code == 503
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_stopping"
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_server_whose_engine_cannot_be_built_ends_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashstep", "serve", "--port", "0", "--kv-cache-memory", "10", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.search(r"^flashstep: error: kv_cache_memory = 10 bytes: .*one page", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("given", "expected"), [("123", 123), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5kib", 1536)]
)
def test_sizes(given: str, expected: int) -> None:
    assert parse_bytes(given, "--x") == expected


@pytest.mark.parametrize("given", ["", "GiB", "5GB", "much", "1e400", "-1x"])
def test_sizes_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match="--x"):
        parse_bytes(given, "--x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-cache-memory", "5GB"], "--kv-cache-memory 5GB"),
        (["no/such/model"], "no such directory"),
        (["--grace", "-1", "--port", "99999"], "--grace -1.0.*--port 99999"),
        (["--max-num-seqs", "0"], "max_num_seqs = 0"),
        (["--api-key-file", "/dev/null"], "holds no key"),
        (["--request-timeout", "0"], "request timeout"),
    ],
)
def test_options_that_cannot_be(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from flashstep.__main__ import main

    assert main(["serve", "--port", "0", *options]) == 2
    assert re.search(words, capsys.readouterr().err)
