"""The server over the bundled model as clients see it: the openai client, and raw HTTP."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serving import NOT_THINKING, TOOLS, USER, check_response, client_of, events, joined, running, wait_until

from flashstep.async_engine import start
from flashstep.chat.tokens import DSML
from flashstep.settings import EngineConfig


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
