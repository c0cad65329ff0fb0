"""Servers and clients that the tests of the server share."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from flashstep.server.interface import ServerSettings
from flashstep.server.serve import Server

NOT_THINKING = {"chat_template_kwargs": {"thinking": False}}
USER = [{"role": "user", "content": "Write a function that adds two numbers."}]
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
