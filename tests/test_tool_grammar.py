"""Grammars of outputs: what the chat format renders is accepted, token by token, and what the schema forbids is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from flashstep.chat import OutputParser, Piece, Tokenizer, ToolCallArguments, ToolCallStart, render_chat
from flashstep.chat.tokens import ASSISTANT, DSML, END_THINK
from flashstep.loading import BUNDLED_MODEL
from flashstep.requests import Grammar
from flashstep.server.errors import ApiError
from flashstep.server.protocol import ResponseFormat, StructuredOutputs
from flashstep.server.tool_grammar import answer_grammar, output_grammar

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)


class _Vocabulary:
    eos_token_id, bos_token_id = TOKENIZER.eos_id, TOKENIZER.bos_id
    special_token_ids = sorted(TOKENIZER.specials.values())
    tokens = [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return TOKENIZER.encode(text if isinstance(text, str) else text.decode())


LL_TOKENIZER = LLTokenizer(TokenizerWrapper(_Vocabulary()))


def accepts(grammar: Grammar | None, pieces: list[Piece]) -> bool:
    """Whether the grammar takes every token and may end there."""
    assert grammar is not None
    kind = {"lark": LLMatcher.grammar_from_lark, "json_schema": LLMatcher.grammar_from_json_schema}[grammar.kind]
    matcher = LLMatcher(LL_TOKENIZER, kind(grammar.text))
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar.text}"
    ids = TOKENIZER.encode_prompt(pieces)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def rendered(*calls: tuple[str, dict[str, Any]], before: str = "") -> list[Piece]:
    """An assistant turn with these calls, as the chat format writes it."""
    message = {
        "role": "assistant",
        "content": before,
        "tool_calls": [
            {"id": str(n), "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(calls)
        ],
    }
    pieces = list(render_chat([{"role": "user", "content": "x"}, message, {"role": "user", "content": "y"}]).pieces)
    start = max(n for n, piece in enumerate(pieces[:-2]) if piece.text == ASSISTANT)
    turn = pieces[start + 2 :]
    return turn[: next(n for n, piece in enumerate(turn) if piece.special and piece.text not in (DSML,))]


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "unit"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [tool("weather", SCHEMA), tool("stop"), tool("maybe", {"properties": {"a": {"type": "string"}, "b": {}}})]
FORCED = output_grammar(TOKENIZER, thinking=False, tools=TOOLS, must_call=True)


@pytest.mark.parametrize(
    "calls",
    [
        [("weather", {"city": "Paris", "unit": "C"})],
        [("weather", {"city": "", "days": -3, "unit": "F"})],
        [("weather", {"city": 'a </b> "x"\n\n数', "unit": "C", "where": "here"})],
        [("weather", {"city": "a", "unit": "C", "where": {"x": 1.5}})],
        [("weather", {"city": "a", "unit": "C", "where": None, "tags": ["a", "b c"]})],
        [("stop", {})],
        [("maybe", {})],
        [("maybe", {"a": "x"})],
        [("maybe", {"b": [1, {"c": None}]})],
        [("maybe", {"a": "x", "b": "text"})],
        [("stop", {}), ("weather", {"city": "Paris", "unit": "C"}), ("stop", {})],
    ],
)
def test_what_the_chat_format_renders_is_accepted(calls: list[tuple[str, dict[str, Any]]]) -> None:
    pieces = rendered(*calls)
    assert accepts(FORCED, pieces)
    parser = OutputParser(thinking=False, tools=True)
    events = parser.push(pieces) + parser.finish()
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [
        "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == n) for n in range(len(calls))
    ]
    assert list(zip(names, map(json.loads, texts), strict=True)) == calls


@pytest.mark.parametrize(
    "call",
    [
        ("weather", {"city": "Paris"}),  # a required parameter is missing
        ("weather", {"unit": "C", "city": "Paris"}),  # out of order
        ("weather", {"city": "Paris", "unit": "K"}),
        ("weather", {"city": 5, "unit": "C"}),
        ("weather", {"city": "Paris", "days": 1.5, "unit": "C"}),
        ("weather", {"city": "Paris", "unit": "C", "where": {"y": 1}}),
        ("weather", {"city": "Paris", "unit": "C", "more": 1}),
        ("stop", {"now": True}),
        ("other", {}),
    ],
)
def test_what_the_schema_forbids_is_not(call: tuple[str, dict[str, Any]]) -> None:
    assert not accepts(FORCED, rendered(call))


def test_a_forced_call_is_the_whole_output() -> None:
    assert not accepts(FORCED, [Piece("Sure.")])
    assert not accepts(FORCED, rendered(("stop", {}), before="Sure."))
    assert not accepts(FORCED, [*rendered(("stop", {})), Piece("Done.")])
    assert not accepts(FORCED, rendered(("stop", {}))[:-1])
    thinking = output_grammar(TOKENIZER, thinking=True, tools=TOOLS, must_call=True)
    end = Piece(END_THINK, special=True)
    assert accepts(thinking, [Piece("Hm <x>"), end, *rendered(("stop", {}))])
    assert accepts(thinking, [end, *rendered(("stop", {}))])
    assert not accepts(thinking, rendered(("stop", {})))


def test_one_call_only() -> None:
    grammar = output_grammar(TOKENIZER, thinking=False, tools=TOOLS, must_call=True, one_call=True)
    assert accepts(grammar, rendered(("stop", {})))
    assert not accepts(grammar, rendered(("stop", {}), ("stop", {})))


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_may_come(thinking: bool) -> None:
    grammar = output_grammar(TOKENIZER, thinking=thinking, tools=TOOLS, one_call=True)
    start = [Piece("Hm."), Piece(END_THINK, special=True)] if thinking else []
    for text in ("", "No call: 1 < 2", "\n\n<", "</"):
        assert accepts(grammar, [*start, *([Piece(text)] if text else [])])
    assert accepts(grammar, [*start, *rendered(("stop", {}))])
    assert accepts(grammar, [*start, *rendered(("stop", {}), before="Let me see:\n\n<")])
    assert not accepts(grammar, [*start, *rendered(("stop", {}), ("stop", {}))])
    assert not accepts(grammar, [*start, *rendered(("weather", {}))])
    assert not accepts(grammar, [*start, Piece("x"), Piece(DSML, special=True)])


def test_an_answer_or_a_call() -> None:
    answer = Grammar("json_schema", json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}}))
    grammar = output_grammar(TOKENIZER, thinking=False, tools=TOOLS, answer=answer)
    assert accepts(grammar, [Piece('{"ok": true}')])
    assert accepts(grammar, rendered(("stop", {})))
    assert not accepts(grammar, [Piece("Sure.")])
    assert not accepts(grammar, rendered(("stop", {}), before="Sure."))


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar("json_object", ""), '{"a": [1]}', "[1]"),
        (Grammar("json_schema", '{"type": "integer"}'), "17", "x"),
        (Grammar("regex", r"\d+/\w\/[\n/]?"), "12/b/\n", "12"),
        (Grammar("lark", 'start: "a" B+\nB: "b"'), "abb", "a"),
    ],
)
def test_answers_behind_thinking(answer: Grammar, good: str, bad: str) -> None:
    grammar = output_grammar(TOKENIZER, thinking=True, answer=answer)
    end = Piece(END_THINK, special=True)
    assert accepts(grammar, [Piece("so { it"), end, Piece(good)])
    assert not accepts(grammar, [Piece("so"), end, Piece(bad)])
    assert not accepts(grammar, [Piece(good)])
    assert output_grammar(TOKENIZER, thinking=False, answer=answer) is answer


def test_further_parameters_where_the_schema_says_so() -> None:
    open_tool = tool("any", {"type": "object", "additionalProperties": True})
    numbers = tool("sum", {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}})
    grammar = output_grammar(TOKENIZER, thinking=False, tools=[open_tool, numbers], must_call=True)
    assert accepts(grammar, rendered(("any", {})))
    assert accepts(grammar, rendered(("any", {"x": "y", "z": [1]})))
    assert accepts(grammar, rendered(("sum", {"a": 1, "b": 2})))
    assert accepts(grammar, rendered(("sum", {"b": 2})))
    assert not accepts(grammar, rendered(("sum", {"b": "2"})))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"$ref": "#"}}}, r"\$ref '#'"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "itself"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "itself"),
        ({"properties": {"a": {"anyOf": [{"anyOf": [{"type": "null"}] * 20}] * 20}}}, "alternatives"),
        ({"properties": {"a": {"enum": []}}}, "enum"),
        ({"properties": {"a": 5}}, "needs a schema"),
        ({"properties": [1]}, "has to be an object"),
        ({"properties": {'a"': {}}}, "cannot be written"),
        ({"properties": {}, "required": ["b"]}, "not among the properties: b"),
    ],
)
def test_schemas_that_cannot_be_enforced(parameters: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        output_grammar(TOKENIZER, thinking=False, tools=[tool("f", parameters)], must_call=True)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith("tools[0].function.parameters")


def test_one_constraint_at_a_time() -> None:
    assert answer_grammar(None, None) is None
    assert answer_grammar(None, ResponseFormat(type="text")) is None
    assert answer_grammar(StructuredOutputs(regex="a"), ResponseFormat(type="text")) == Grammar("regex", "a")
    with pytest.raises(ApiError, match="only one constraint"):
        answer_grammar(StructuredOutputs(regex="a"), ResponseFormat(type="json_object"))
    choice = answer_grammar(StructuredOutputs(choice=['a"b', "c|d\n"]), None)
    assert accepts(choice, [Piece('a"b')])
    assert accepts(choice, [Piece("c|d\n")])
    assert not accepts(choice, [Piece("c")])
