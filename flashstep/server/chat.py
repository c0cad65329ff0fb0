"""/v1/chat/completions: messages to engine requests, deltas to reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any

from flashstep.chat import (
    ContentText,
    Event,
    OutputParser,
    ReasoningText,
    Tokenizer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    render_chat,
)
from flashstep.chat.tokens import DSML, END_THINK
from flashstep.requests import Delta, GenerationRequest, Grammar
from flashstep.server.errors import bad_request
from flashstep.server.interface import Serving
from flashstep.server.logprobs import chat_logprobs
from flashstep.server.protocol import ChatBody, ChatInput, NamedToolChoice
from flashstep.server.tool_grammar import answer_grammar, output_grammar
from flashstep.server.usage import StepDetails, UsageSum

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def render(body: ChatInput, tokenizer: Tokenizer, schema: dict[str, Any] | None = None) -> tuple[list[int], bool]:
    """Ids of the prompt, and whether it ends inside thinking. Raises ChatError and TokenizerError."""
    for index, tool in enumerate(body.tools):
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if tool.get("type", "function") != "function":
            raise bad_request(f"tools[{index}].type", f"{tool['type']!r} found, wanted 'function'")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            raise bad_request(
                f"tools[{index}].function.name", "wanted 1 to 64 letters, digits, dots, dashes, underscores"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(f"tools[{index}].function.parameters", "wanted a JSON schema, an object")
    prompt = render_chat(
        body.messages,
        thinking=body.thinks(),
        reasoning_effort=body.effort(),
        tools=body.tools,
        response_schema=schema,
    )
    try:
        return tokenizer.encode_prompt(prompt.pieces), prompt.thinking
    except UnicodeEncodeError as error:
        raise bad_request("messages", "a text holds half a character (an unpaired surrogate)") from error


async def chat_job(body: ChatBody, serving: Serving) -> ChatJob:
    """The job that answers `body`. Raises ApiError, ChatError, TokenizerError and what SamplingParams raise."""
    model = serving.model(body.model)
    tokenizer = serving.engine.tokenizer
    schema = body.response_format.json_schema if body.response_format is not None else None
    # Long conversations take a while to encode; streams of others go on meanwhile.
    prompt, thinking = await asyncio.to_thread(render, body, tokenizer, schema.schema_ if schema is not None else None)
    return ChatJob(body, model, prompt, thinking, tokenizer)


class ChatJob:
    """The choices of one conversation."""

    def __init__(self, body: ChatBody, model: str, prompt: list[int], thinking: bool, tokenizer: Tokenizer) -> None:
        self.stream, self.include_usage = body.stream, body.stream_options.include_usage
        constraint = next((name for name in ("response_format", "structured_outputs") if getattr(body, name)), "tools")
        self.field_names = {
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "grammar": constraint,
            "response_format": constraint,
        }
        self._body, self._tokenizer = body, tokenizer
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        calls = bool(body.tools) and body.tool_choice != "none"
        # With "none" the tools stay declared, which keeps the prompt and its cached pages, but no call can begin.
        banned = (tokenizer.special_id(DSML),) if body.tools and not calls else ()
        grammar = _grammar(body, tokenizer, thinking)
        self.requests = [
            GenerationRequest(
                prompt=tuple(prompt),
                params=body.sampling_params(choice, banned),
                max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
                min_tokens=body.min_tokens,
                stop=body.stops(),
                stop_token_ids=frozenset(body.stop_token_ids),
                ignore_eos=body.ignore_eos,
                logprobs=body.top_logprobs if body.logprobs else None,
                grammar=grammar,
            )
            for choice in range(body.n)
        ]
        self._choices = [_Choice(tokenizer, thinking=thinking, tools=calls) for _ in self.requests]
        self._usage = UsageSum()

    def push(self, index: int, delta: Delta) -> dict[str, Any]:
        """Take a delta of choice `index`; the chunk that a stream sends for it."""
        choice = self._choices[index]
        message = choice.push(delta)
        logprobs = None
        if self._body.logprobs:
            entries = chat_logprobs(self._tokenizer, delta.logprobs or ())
            if not self.stream:
                choice.logprobs += entries
            logprobs = {"content": entries, "refusal": None}
        if delta.finish_reason is not None:
            assert delta.usage is not None, "the last delta of a request carries its usage"
            self._usage.add(0, delta.usage, choice.reasoning_tokens)
        shown = {
            "index": index,
            "delta": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.dspark_details:
            shown["dspark"] = choice.steps.push(delta)
        return self._chunk([shown]) | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, with the usage."""
        return self._chunk([]) | {"usage": self._usage.as_dict()}

    def result(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": self._usage.as_dict()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": choices}


class _Choice:
    """One choice: its message so far."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, tools: bool) -> None:
        self._parser = OutputParser(thinking=thinking, tools=tools)
        self._end_think, self._dsml = tokenizer.specials.get(END_THINK), tokenizer.specials.get(DSML)
        self._counts_reasoning = thinking
        self._role_sent = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._open_calls = 0  # begun and not ended
        self.steps = StepDetails(tokenizer)
        self.reasoning_tokens = 0
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> dict[str, Any]:
        """Take a delta; the `delta` that a stream sends for it."""
        events = self._parser.push(delta.pieces)
        if self._counts_reasoning:
            self._count_reasoning(delta.tokens)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        shown: dict[str, Any] = {} if self._role_sent else {"role": "assistant"}
        self._role_sent = True
        for event in events:
            self._show(event, shown)
        if len(shown.keys() - {"role"}) == 0:  # the step still has an event; it only holds nothing to show yet
            shown["reasoning_content" if self._parser.thinking else "content"] = ""
        if delta.finish_reason is not None:
            # A call that the end cut off is not one to run: its arguments are no JSON yet.
            called = self._calls and not self._open_calls and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else delta.finish_reason
            self.stop_reason = delta.stop_reason
        return shown

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _show(self, event: Event, shown: dict[str, Any]) -> None:
        """Add an event to the message and to what the stream shows of this step."""
        match event:
            case ReasoningText(text):
                self._reasoning.append(text)
                shown["reasoning_content"] = shown.get("reasoning_content", "") + text
            case ContentText(text):
                self._content.append(text)
                shown["content"] = shown.get("content", "") + text
            case ToolCallStart(index, call_id, name):
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                self._calls.append(call)
                self._open_calls += 1
                fresh = {"index": index, **call, "function": {"name": name, "arguments": ""}}
                shown.setdefault("tool_calls", []).append(fresh)
            case ToolCallEnd():
                self._open_calls -= 1
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text
                open_calls = shown.setdefault("tool_calls", [])
                if not open_calls or open_calls[-1]["index"] != index:
                    open_calls.append({"index": index, "function": {"arguments": ""}})
                open_calls[-1]["function"]["arguments"] += text

    def _count_reasoning(self, tokens: list[int]) -> None:
        """Reasoning goes up to and with `</think>`, or up to a block of calls that ended it.

        By tokens, because a stop string may hold the text of `</think>` back for a step.
        """
        end = len(tokens)
        if self._end_think in tokens:
            end = tokens.index(self._end_think) + 1
        elif not self._parser.thinking and self._dsml in tokens:
            end = tokens.index(self._dsml)
        self.reasoning_tokens += end
        self._counts_reasoning = self._parser.thinking and self._end_think not in tokens


def _grammar(body: ChatBody, tokenizer: Tokenizer, thinking: bool) -> Grammar | None:
    """The grammar that the body asks for: by its answer, by a call that has to come, or by calls held to schemas."""
    answer = answer_grammar(body.structured_outputs, body.response_format)
    if body.tool_choice == "none" or not body.tools:
        return output_grammar(tokenizer, thinking=thinking, answer=answer)
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        tools = [tool for tool in body.tools if tool["function"]["name"] == name]
        if not tools:
            raise bad_request("tool_choice.function.name", f"{name!r} is not among the tools")
        return output_grammar(tokenizer, thinking=thinking, tools=tools[:1], must_call=True, one_call=True)
    one_call = not body.parallel_tool_calls
    if body.tool_choice == "required":
        return output_grammar(tokenizer, thinking=thinking, tools=body.tools, must_call=True, one_call=one_call)
    # Free to call or not: only what was asked for is enforced.
    strict = any(tool["function"].get("strict") is True for tool in body.tools)
    if answer is None and not one_call and not strict:
        return None
    return output_grammar(tokenizer, thinking=thinking, answer=answer, tools=body.tools, one_call=one_call)
