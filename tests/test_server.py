"""The server as clients see it: the openai client against the bundled model, raw HTTP against a scripted engine."""

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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from flashstep.async_engine import start
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
from flashstep.settings import EngineConfig

NOT_THINKING = {"chat_template_kwargs": {"thinking": False}}
USER = [{"role": "user", "content": "Write a function that adds two numbers."}]


# -- what runs the servers ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(engine: Any, *, grace_s: float = 1.0, **settings: Any) -> Iterator[str]:
    """A server in a thread on a loopback port; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(engine, ServerSettings(**settings), grace_s=grace_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def wait_until(holds: Callable[[], Any], what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"did not happen within {seconds} s: {what}"
        time.sleep(0.01)


def check_usage(usage: dict[str, Any]) -> None:
    dspark = usage["dspark"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert dspark["accepted"] == sum(dspark["accepted_per_position"])
    assert dspark["drafted"] == sum(dspark["drafted_per_position"])
    pairs = zip(dspark["accepted_per_position"], dspark["drafted_per_position"], strict=True)
    assert all(accepted <= drafted for accepted, drafted in pairs)
    assert dspark["steps"] <= max(usage["completion_tokens"], 1)


def check_response(response: httpx.Response) -> None:
    """What holds for every JSON answer: usage that adds up, errors in OpenAI's shape, no trace."""
    if "json" not in response.headers.get("content-type", ""):
        return
    body = json.loads(response.read())
    assert "Traceback" not in response.text
    if response.status_code >= 400 and "status" not in body:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"]
    if "usage" in body:
        check_usage(body["usage"])


def client_of(url: str, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, event_hooks={"response": [check_response]}, **options)


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, framing checked; the usage event last."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}, "dspark_details": True}
    with client.stream("POST", path, json=asked) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    frames = raw.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    found = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    if "error" not in found[-1]:
        assert found[-1]["choices"] == []
        check_usage(found[-1]["usage"])
        assert all(event["usage"] is None for event in found[:-1])
        assert {event["id"] for event in found} == {found[0]["id"]}
        tokens = sum(len(event["choices"][0]["dspark"]["tokens"]) for event in found[:-1])
        assert tokens >= found[-1]["usage"]["completion_tokens"]  # max_tokens 0 runs one token that does not count
    return found


def joined(found: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Messages of a chat stream by choice, as a client puts them together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in found:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"finish_reason": None, "logprobs": []})
            assert whole["finish_reason"] is None, "nothing follows the last event of a choice"
            whole["finish_reason"] = choice["finish_reason"]
            whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            for name in ("role", "content", "reasoning_content"):
                if name in choice["delta"]:
                    whole[name] = whole.get(name, "") + choice["delta"][name]
            for call in choice["delta"].get("tool_calls", ()):
                calls = whole.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return choices


# -- the bundled model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Any:
    return start(None, EngineConfig(max_num_seqs=4, kv_cache_memory=64 << 20, max_model_len=2048, max_queue=64))


@pytest.fixture(scope="module")
def url(engine: Any) -> Iterator[str]:
    wait_until(lambda: engine.stats().ready, "the model is loaded", 60)
    with running(engine, served_model_names=("tiny", "other-name")) as found:
        yield found


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    hooks = httpx.Client(timeout=60, event_hooks={"response": [check_response]})
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, http_client=hooks) as client:
        yield client


def assert_idle(engine: Any) -> None:
    def idle() -> bool:
        stats = engine.stats()
        return stats.running == stats.waiting == 0 and stats.free_slots == stats.total_slots

    wait_until(idle, "slots and queue are free")
    assert engine.stats().free_pages == engine.stats().total_pages


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny", "other-name"]
    assert api.models.retrieve("other-name").model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError) as caught:
        api.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_completion_streamed_equals_whole(api: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def add(", "max_tokens": 40, "logprobs": 2, "seed": 5}
    whole = api.completions.create(temperature=temperature, **asked)
    assert whole.usage is not None
    chunks = list(
        api.completions.create(temperature=temperature, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    streamed = chunks[-1].usage.model_dump()
    streamed["prompt_tokens_details"] = whole.usage.model_dump()["prompt_tokens_details"]  # the second may be cached
    assert streamed == whole.usage.model_dump()
    assert whole.usage.completion_tokens == 40
    # One event per step.
    assert len(chunks) - 1 == whole.usage.model_dump()["dspark"]["steps"] < 40
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 40
    assert "".join(logprobs.tokens) == whole.choices[0].text
    for token, at, top in zip(logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True):
        assert whole.choices[0].text.startswith(token, at)
        assert token in top


def test_chat_streamed_equals_whole(http: httpx.Client) -> None:
    asked = {"messages": USER, "max_tokens": 48, "temperature": 0, "logprobs": True, "top_logprobs": 3} | NOT_THINKING
    whole = http.post("/v1/chat/completions", json=asked).json()
    found = events(http, "/v1/chat/completions", asked)
    streamed = joined(found)[0]
    choice = whole["choices"][0]
    assert streamed["role"] == "assistant"
    assert streamed["content"] == choice["message"]["content"] != ""
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert len(streamed["logprobs"]) == whole["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in streamed["logprobs"])
    assert bytes(b for entry in streamed["logprobs"] for b in entry["bytes"]).decode() == streamed["content"]
    assert found[-1]["usage"]["dspark"] == whole["usage"]["dspark"]
    steps = [event["choices"][0]["dspark"] for event in found[:-1]]
    assert sum(step["accepted"] for step in steps) == whole["usage"]["dspark"]["accepted"]
    assert len(steps) == whole["usage"]["dspark"]["steps"]
    assert "".join(text for step in steps for text in step["texts"]) == streamed["content"]
    assert all(len(step["texts"]) == len(step["tokens"]) for step in steps)


def test_thinking_is_told_apart(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=12, temperature=0, reasoning_effort="medium"
    )
    message = answer.choices[0].message.model_dump()
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 12


def test_choices_have_seeds_of_their_own(http: httpx.Client) -> None:
    asked = {"prompt": ["def f(", "class A"], "max_tokens": 12, "temperature": 1.0, "seed": 7}
    several = http.post("/v1/completions", json=asked | {"n": 2}).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in several["choices"]]
    alone = [
        http.post("/v1/completions", json=asked | {"prompt": prompt, "seed": seed}).json()["choices"][0]["text"]
        for prompt in asked["prompt"]
        for seed in (7, 8)
    ]
    assert texts == alone
    assert len(set(texts)) == 4
    found = events(http, "/v1/completions", asked | {"n": 2})
    streamed = dict.fromkeys(range(4), "")
    for event in found[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == texts
    assert several["usage"]["completion_tokens"] == found[-1]["usage"]["completion_tokens"] == 48
    prompts = [http.post("/tokenize", json={"prompt": prompt}).json()["count"] for prompt in asked["prompt"]]
    assert several["usage"]["prompt_tokens"] == sum(prompts)  # a prompt counts once


def test_stop_and_limits(http: httpx.Client) -> None:
    asked = {"prompt": "def add(a, b):\n", "max_tokens": 30, "temperature": 0}
    free = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    stop = free[12:15]
    for body in (asked | {"stop": stop}, asked | {"stop": ["no such text", stop]}):
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == free[: free.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert (
        "".join(e["choices"][0]["text"] for e in events(http, "/v1/completions", asked | {"stop": stop})[:-1])
        == choice["text"]
    )
    ids = http.post("/tokenize", json={"prompt": free, "add_special_tokens": False}).json()["tokens"]
    banned = http.post("/v1/completions", json=asked | {"logit_bias": {str(ids[0]): -100}}).json()["choices"][0]["text"]
    assert not banned.startswith(http.post("/detokenize", json={"tokens": ids[:1]}).json()["prompt"])


def test_scoring_as_lm_eval_does(http: httpx.Client) -> None:
    """Echo with log-probabilities, by token ids, several prompts at once, with one token to drop or none at all."""
    texts = ["The function returns", "import os\nimport sys"]
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    asked = {"prompt": ids, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    one = http.post("/v1/completions", json=asked | {"max_tokens": 1}).json()
    none = http.post("/v1/completions", json=asked | {"max_tokens": 0}).json()
    for prompt, text, with_one, with_none in zip(ids, texts, one["choices"], none["choices"], strict=True):
        scores = with_one["logprobs"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(prompt) + 1
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert all(value < 0 for value in scores["token_logprobs"][1:])
        assert {name: values[:-1] for name, values in scores.items()} == with_none["logprobs"]
        assert with_none["text"].endswith(text)
        assert with_one["text"].startswith(with_none["text"])
        for token, logprob, top in zip(
            *(scores[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == logprob <= max(top.values())
    assert none["usage"]["completion_tokens"] == 0
    assert one["usage"]["completion_tokens"] == 2
    # As text: the begin token is scored with the others and has no characters.
    text = http.post("/v1/completions", json=asked | {"prompt": texts[0], "max_tokens": 0}).json()["choices"][0]
    assert text["text"] == texts[0]
    assert text["logprobs"]["token_logprobs"] == none["choices"][0]["logprobs"]["token_logprobs"]
    assert text["logprobs"]["text_offset"][:2] == [0, 0]
    found = events(http, "/v1/completions", asked | {"max_tokens": 0, "prompt": texts[0]})
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == texts[0]


class Verdict(BaseModel):
    grade: int
    passed: bool


def test_json_schema(api: openai.OpenAI, http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"grade": {"type": "integer", "minimum": 0, "maximum": 9}, "color": {"enum": ["red", "blue"]}},
        "required": ["grade", "color"],
        "additionalProperties": False,
    }
    for extra in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        answer = api.chat.completions.create(
            model="tiny",
            messages=USER,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}},
            extra_body=NOT_THINKING,
            **extra,
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
    body = {"messages": USER, "max_tokens": 40, "structured_outputs": {"choice": ["yes", "no"]}} | NOT_THINKING
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] in ("yes", "no")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    body = {"prompt": "x = ", "max_tokens": 60, "response_format": wanted}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert json.loads(text)["ok"] in (True, False)
    body = {"prompt": "Date: ", "max_tokens": 40, "structured_outputs": {"regex": r"20\d\d/[01]\d"}}
    assert re.fullmatch(r"20\d\d/[01]\d", http.post("/v1/completions", json=body).json()["choices"][0]["text"])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "parameters": {
                "type": "object",
                "properties": {
                    "color": {"type": "string", "enum": ["red", "blue"]},
                    "level": {"type": "integer", "minimum": 0, "maximum": 9},
                    "slow": {"type": "boolean"},
                },
                "required": ["color", "level"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_light"}}])
def test_forced_tool_calls(api: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 150,
        "temperature": 1.0,
        "extra_body": NOT_THINKING,
    }
    for seed in range(1, 3):
        answer = api.chat.completions.create(seed=seed, **asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        function = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), function.get("parameters", {"maxProperties": 0}))
    if choice != "required":
        assert call.function.name == "set_light"
    with api.chat.completions.stream(seed=2, **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_no_call_where_none_is_wanted(http: httpx.Client) -> None:
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "none", "max_tokens": 30, "temperature": 1} | NOT_THINKING
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert DSML not in message["content"]


def test_a_stream_that_is_closed_ends_the_request(api: openai.OpenAI, engine: Any) -> None:
    stream = api.completions.create(
        model="tiny", prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert engine.stats().running == 1
    stream.close()
    assert_idle(engine)


def test_clients_that_leave_without_streaming_free_their_places(url: str, engine: Any) -> None:
    """More clients than slots, so that some are still queued when they go."""
    before = engine.stats().finished.get("abort", 0)
    body = json.dumps({"prompt": "y", "max_tokens": 1900, "ignore_eos": True}).encode()
    port = int(url.rpartition(":")[2])
    sockets = []
    for _ in range(7):
        sock = socket.create_connection(("127.0.0.1", port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        sockets.append(sock)
    wait_until(lambda: engine.stats().running == 4 and engine.stats().waiting == 3, "four run and three wait")
    for sock in sockets:
        sock.close()
    assert_idle(engine)
    assert engine.stats().finished["abort"] == before + 7


def test_many_clients_at_once_get_what_they_get_alone(http: httpx.Client, url: str, engine: Any) -> None:
    bodies = [
        {"prompt": f"# part {n % 4}\ndef f{n}(", "max_tokens": 6 + n, "temperature": (n % 2) * 0.9, "seed": n}
        for n in range(9)
    ]
    alone = [http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]

    def ask(body: dict[str, Any]) -> str:
        with client_of(url) as client:
            if body["seed"] % 3 == 0:
                return client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return "".join(e["choices"][0]["text"] for e in events(client, "/v1/completions", body)[:-1])

    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(ask, bodies)) == alone
    assert_idle(engine)


def test_tokenize(http: httpx.Client, api: openai.OpenAI) -> None:
    text = "naïve </think> 数\n"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert found["tokens"][1:] == plain
    assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": USER, "chat_template_kwargs": {"thinking": False}}).json()
    answer = api.chat.completions.create(model="tiny", messages=USER, max_tokens=1, extra_body=NOT_THINKING)
    assert answer.usage.prompt_tokens == chat["count"]


def test_metrics(http: httpx.Client, engine: Any) -> None:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 8})
    http.get("/nothing/here")
    assert_idle(engine)
    values = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    stats = engine.stats()
    assert values["flashstep_completion_tokens_total"] == stats.completion_tokens > 0
    assert values["flashstep_steps_total"] == stats.steps
    assert values['flashstep_drafted_tokens_total{position="1"}'] == stats.drafted[0]
    assert values['flashstep_accepted_tokens_total{position="1"}'] == stats.accepted[0] > 0
    assert values['flashstep_requests_finished_total{reason="length"}'] == stats.finished["length"]
    assert values['flashstep_http_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert values['flashstep_http_requests_total{path="other",status="404"}'] >= 1
    assert values["flashstep_requests_running"] == values["flashstep_requests_waiting"] == 0
    assert values["flashstep_ready"] == 1
    assert values["flashstep_time_to_first_token_seconds_count"] > 0
    assert values["process_open_fds"] > 0
    documented = re.findall(r"flashstep_\w+", sys.modules["flashstep.server.metrics"].__doc__)
    assert [name for name in documented if not any(known.startswith(name) for known in values)] == []


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": 3}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [99999]}),
        ("prompt", {"prompt": "x" * 9000}),
        ("max_tokens", {"prompt": "x", "max_tokens": 99999}),
        ("max_tokens", {"prompt": "x", "max_tokens": 0}),
        ("max_tokens", {"prompt": "x", "max_tokens": "5"}),
        ("min_tokens", {"prompt": "x", "max_tokens": 2, "min_tokens": 3}),
        ("temperature", {"prompt": "x", "temperature": -1}),
        ("temperature", {"prompt": "x", "temperature": "hot"}),
        ("top_p", {"prompt": "x", "top_p": 0}),
        ("top_k", {"prompt": "x", "top_k": -2}),
        ("top_k", {"prompt": "x", "top_k": True}),
        ("min_p", {"prompt": "x", "min_p": 2}),
        ("seed", {"prompt": "x", "seed": 1 << 63}),
        ("repetition_penalty", {"prompt": "x", "repetition_penalty": 0}),
        ("presence_penalty", {"prompt": "x", "presence_penalty": 3}),
        ("logit_bias", {"prompt": "x", "logit_bias": {"word": 1}}),
        ("logit_bias", {"prompt": "x", "logit_bias": {"5": float("nan")}}),
        ("logit_bias", {"prompt": "x", "logit_bias": {"99999": 1}}),
        ("n", {"prompt": "x", "n": 0}),
        ("n", {"prompt": "x", "n": 129}),
        ("best_of", {"prompt": "x", "best_of": 2}),
        ("suffix", {"prompt": "x", "suffix": "y"}),
        ("logprobs", {"prompt": "x", "logprobs": 21}),
        ("stop", {"prompt": "x", "stop": ""}),
        ("stop", {"prompt": "x", "stop": ["a", 1]}),
        ("logits_processors", {"prompt": "x", "logits_processors": ["f"]}),
        ("guided_json", {"prompt": "x", "guided_json": {"type": "object"}}),
        ("structured_outputs", {"prompt": "x", "structured_outputs": {"regex": "("}}),
        ("structured_outputs", {"prompt": "x", "structured_outputs": {"json": {"type": "thing"}}}),
        ("structured_outputs.json", {"prompt": "x", "structured_outputs": {"json": "{"}}),
        ("response_format", {"prompt": "x", "response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
        ),
        ("stream_options.include_usage", {"prompt": "x", "stream_options": {"include_usage": "yes"}}),
    ],
)
def test_a_bad_completion_names_the_parameter(http: httpx.Client, param: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param in error["param"]
    assert param in error["message"]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages[0]", {"messages": ["x"]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 9000}]}),
        ("reasoning_effort", {"reasoning_effort": "huge"}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}),
        ("tool_choice.function.name", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
        ),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("audio", {"audio": {"voice": "x"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_a_bad_chat_names_the_parameter(http: httpx.Client, param: str, body: dict[str, Any]) -> None:
    if param.partition(".")[0].partition("[")[0] != "messages":
        body = {"messages": USER} | body
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert param in error["message"]


def test_unknown_and_null_fields_are_ignored(http: httpx.Client) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "user": "u",
        "store": True,
        "stop": None,
        "n": None,
        "suffix": "",
        "top_k": -1,
    }
    assert http.post("/v1/completions", json=body).status_code == 200


# -- a scripted engine ----------------------------------------------------------------------------------------------

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
