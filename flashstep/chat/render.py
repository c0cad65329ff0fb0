"""Messages to a prompt, byte for byte in the model's chat format (``docs/model.md``, section 12).

Owns the order and spelling of everything in a prompt and the checks of what a request may ask for. Rendering is pure:
the same messages give the same pieces, so a later turn finds the pages of an earlier one. The template's markers are
special pieces; whatever a client sent is text, also where it spells a marker.

Where section 12 leaves room, the released encoder decides: neighbouring user and tool messages are one user turn, its
blocks joined by two newlines, a result whose id no call has sorts as the first call; the assistant's header closes a
user turn, so a second assistant message in a row, or one right behind the first system message, has none; a call
without arguments has an empty line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from flashstep.chat.tokens import ASSISTANT, BEGIN, DSML, END, END_THINK, SYSTEM, THINK, USER, Piece

EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = 75
MAX_EFFORT = 100


class ChatError(ValueError):
    """A request that cannot be rendered. ``param`` is the path of the offending parameter, as the client spells it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered prompt; ``thinking`` says whether it ends inside ``<think>``, which the output's parser must know."""

    pieces: tuple[Piece, ...]
    thinking: bool

    @property
    def text(self) -> str:
        """The prompt as one string, for people to read: it no longer tells markers from look-alikes."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class _Message:
    """A checked message. ``blocks`` are the text parts; ``calls`` are (id, name, arguments) of an assistant."""

    role: str
    blocks: tuple[str, ...]
    reasoning: str = ""
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    call_id: str = ""

    @property
    def content(self) -> str:
        return "\n\n".join(self.blocks)


def thinking_budget(effort: object) -> int | None:
    """Budget 1..100 that a ``reasoning_effort`` stands for, None for "none": no thinking. Raises ChatError."""
    if effort is None:
        return DEFAULT_EFFORT
    if effort == "none":
        return None
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if type(effort) is int and 1 <= effort <= MAX_EFFORT:  # a bool is an int, and means something else
        return effort
    raise ChatError(
        "reasoning_effort",
        f"{effort!r} is not an effort; wanted one of none, {', '.join(EFFORTS)} or an integer 1..{MAX_EFFORT}",
    )


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = True,
    reasoning_effort: object = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_schema: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Render OpenAI-style messages up to and with the header of the assistant's next turn.

    An effort never switches thinking on where ``thinking`` is off; "none" switches it off. ``tools`` are in OpenAI
    form, ``response_schema`` is the JSON schema itself. ``developer`` is another name of ``system``.
    Raises ChatError, naming the parameter, before anything is rendered.
    """
    budget = thinking_budget(reasoning_effort)  # checked even where it is not used
    if not thinking:
        budget = None
    schemas = _tool_schemas(tools or ())
    checked = _checked_messages(messages)
    # Without a system message of its own, a conversation still needs one to declare tools or a schema in.
    if checked[0].role != "system" and (schemas or response_schema is not None):
        checked.insert(0, _Message("system", ("",)))
    pieces = [Piece(BEGIN, special=True)]
    if budget is not None or checked[0].role == "system":
        pieces.append(Piece(SYSTEM, special=True))
    if budget is not None:
        line = f"Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        pieces.append(Piece(line))
    if checked[0].role == "system":
        pieces += _system_body(checked.pop(0), schemas, response_schema)
    pieces += _turns(checked, thinking=budget is not None, keep_reasoning=budget is not None and bool(schemas))
    pieces += _header(budget is not None)
    return ChatPrompt(tuple(piece for piece in pieces if piece.text), budget is not None)


def _turns(messages: Sequence[_Message], *, thinking: bool, keep_reasoning: bool) -> Iterator[Piece]:
    """The turns behind the first system message, each user turn followed by a header if the assistant's comes next.

    A prompt ends in a turn that the assistant is to answer, so every past turn lies before the last user message,
    and its reasoning is kept only where tools are declared; a dropped one looks as if it had not thought.
    """
    call_order: dict[str, int] = {}
    start = 0
    while start < len(messages):
        end = start + 1
        message = messages[start]
        if message.role == "assistant":
            yield from _assistant_body(message, keep_reasoning)
            if message.calls:
                call_order = {call_id: rank for rank, (call_id, _, _) in enumerate(message.calls) if call_id}
        elif message.role == "system":
            yield Piece(SYSTEM, special=True)
            yield Piece(message.content)
        else:
            while end < len(messages) and messages[end].role in ("user", "tool"):
                end += 1
            yield Piece(USER, special=True)
            yield Piece("\n\n".join(_user_blocks(messages[start:end], call_order)))
        if message.role != "assistant" and end < len(messages) and messages[end].role == "assistant":
            yield from _header(thinking and keep_reasoning)
        start = end


def _header(thinks: bool) -> list[Piece]:
    return [Piece(ASSISTANT, special=True), Piece(THINK if thinks else END_THINK, special=True)]


def _user_blocks(turn: Sequence[_Message], call_order: Mapping[str, int]) -> Iterator[str]:
    """Blocks of one user turn; results change places among themselves until they stand in the order of the calls."""
    results = iter(
        sorted(
            (message for message in turn if message.role == "tool"),
            key=lambda message: call_order.get(message.call_id, 0),
        )
    )
    for message in turn:
        if message.role == "tool":
            yield f"<tool_result>{next(results).content}</tool_result>"
        else:
            yield from message.blocks


def _system_body(
    message: _Message, schemas: Sequence[str], response_schema: Mapping[str, Any] | None
) -> Iterator[Piece]:
    yield Piece(message.content)
    if schemas:
        before, after = _tools_prompt()
        yield Piece("\n\n")
        yield from before
        yield Piece("\n".join(schemas))
        yield from after
    if response_schema is not None:
        yield Piece(
            "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
            + _json(response_schema)
        )


def _assistant_body(message: _Message, keep_reasoning: bool) -> Iterator[Piece]:
    if keep_reasoning:
        yield Piece(message.reasoning)
        yield Piece(END_THINK, special=True)
    yield Piece(message.content)
    if message.calls:
        yield from _template(f"\n\n<{DSML} calls>\n")
        for _, name, arguments in message.calls:
            yield from _template(f'<{DSML} invoke name="')
            yield Piece(f'{name}">\n')
            for position, (key, value) in enumerate(arguments.items()):
                is_string = isinstance(value, str)
                separator = "\n" if position else ""
                yield from _template(f'{separator}<{DSML} parameter name="')
                yield Piece(f'{key}" string="{"true" if is_string else "false"}">')
                yield Piece(value if is_string else _json(value))
                yield from _template(f"</{DSML} parameter>")
            yield from _template(f"\n</{DSML} invoke>\n")
        yield from _template(f"</{DSML} calls>")
    yield Piece(END, special=True)


@cache
def _tools_prompt() -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The declaration's own text around the schemas, its markers special as they are in the calls it describes."""
    text = resources.files("flashstep").joinpath("prompts", "tools.txt").read_text(encoding="utf-8")
    before, after = text.split("{tool_schemas}")
    return tuple(_template(before)), tuple(_template(after))


def _template(text: str) -> Iterator[Piece]:
    """Pieces of text that we wrote: its markers are special tokens. Never for anything that a client sent."""
    while text:
        at, marker = min(
            ((text.find(marker), marker) for marker in (DSML, THINK, END_THINK) if marker in text),
            default=(len(text), ""),
        )
        yield Piece(text[:at])
        yield Piece(marker, special=True)
        text = text[at + len(marker) :]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_schemas(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    schemas = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"tools[{index}]",
                'not a function tool; wanted {"type": "function", "function": {"name": ..., "parameters": ...}}',
            )
        schemas.append(_json(function))
    return schemas


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[_Message]:
    if not messages:
        raise ChatError("messages", "empty; wanted at least one message to answer")
    checked = [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if checked[-1].role == "assistant":
        raise ChatError(
            f"messages[{len(checked) - 1}]",
            "the last message is the assistant's, so there is nothing to answer; end with a user, tool or system "
            "message (continuing an assistant message is not supported)",
        )
    return checked


def _checked(message: Mapping[str, Any], where: str) -> _Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise ChatError(f"{where}.role", f"{role!r} is not a role; wanted system, developer, user, assistant or tool")
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""
    blocks = _text_blocks(content, f"{where}.content")
    if role == "tool":
        return _Message(role, blocks, call_id=_optional_text(message, "tool_call_id", where))
    if role == "assistant":
        reasoning = _optional_text(message, "reasoning_content", where)
        calls = message.get("tool_calls") or ()
        if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
            raise ChatError(f"{where}.tool_calls", f"{type(calls).__name__} found, wanted a list of calls")
        return _Message(
            role,
            blocks,
            reasoning,
            tuple(_checked_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        )
    return _Message(role, blocks)


def _text_blocks(content: object, where: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise ChatError(where, f"{type(content).__name__} found, wanted a string or a list of text parts")
    blocks = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and "image" in kind:
            raise ChatError(f"{where}[{index}]", "images are not supported, this engine serves text; send text parts")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f"{where}[{index}]", f'part of type {kind!r}, wanted {{"type": "text", "text": ...}}')
        blocks.append(part["text"])
    return tuple(blocks)


def _optional_text(message: Mapping[str, Any], key: str, where: str) -> str:
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{where}.{key}", f"{type(value).__name__} found, wanted a string")
    return value


def _checked_call(call: object, where: str) -> tuple[str, str, dict[str, Any]]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(where, 'wanted {"id": ..., "function": {"name": ..., "arguments": ...}}')
    return (
        _optional_text(call, "id", where),
        function["name"],
        _arguments(function.get("arguments", "")),
    )


def _arguments(given: object) -> dict[str, Any]:
    """A call's arguments as an object; clients send it as JSON, some of them encoded twice.

    What is no JSON object is history that a model once wrote: it is kept as one argument of that name rather than
    refused, as the released encoder does.
    """
    parsed = given
    for _ in range(2):
        if isinstance(parsed, str):
            try:
                parsed = json.loads(parsed)
            except (ValueError, RecursionError):
                break
    if isinstance(parsed, dict):
        return parsed
    return {"arguments": given} if given else {}
