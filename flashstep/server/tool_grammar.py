"""What an output must match, as llguidance grammars: a constrained answer, a block of tool calls, or either.

A grammar covers the whole output, so with thinking on it begins with free text up to `</think>`. Markers are special
tokens and are written by id (`<[9]>`); ordinary text can never spell one, which is what ends free text.

Calls follow the tool's schema this far: required parameters are there, optional ones may be, each at most once, in the
order of the schema. A string parameter is raw text up to its closing tag, held to `enum` and `const` only (`pattern`,
`format` and lengths are enforced inside JSON values alone); any other value is JSON that its schema allows, as far as
llguidance knows the keywords. Further parameters are possible where `additionalProperties` itself says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flashstep.chat import Tokenizer
from flashstep.chat.tokens import DSML, END_THINK
from flashstep.requests import Grammar
from flashstep.server.errors import bad_request
from flashstep.server.protocol import ResponseFormat, StructuredOutputs

_MAX_REF_DEPTH = 16
_MAX_BRANCHES = 256
_JSON_TYPES = ["object", "array", "number", "boolean", "null"]  # all that is no string
# The spacing in which the chat format writes values; unknown keywords are passed over rather than refused.
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}


def answer_grammar(structured: StructuredOutputs | None, response_format: ResponseFormat | None) -> Grammar | None:
    """The one constraint on an answer that a request names, if any."""
    found: list[tuple[str, Grammar]] = []
    if response_format is not None and response_format.json_schema is not None:
        found.append(("response_format", Grammar("json_schema", json.dumps(response_format.json_schema.schema_))))
    elif response_format is not None and response_format.type == "json_object":
        found.append(("response_format", Grammar("json_object", "")))
    if structured is not None:
        if structured.json_ is not None:
            schema = structured.json_ if isinstance(structured.json_, dict) else _parsed(structured.json_)
            found.append(("structured_outputs.json", Grammar("json_schema", json.dumps(schema))))
        if structured.regex is not None:
            found.append(("structured_outputs.regex", Grammar("regex", structured.regex)))
        if structured.choice is not None:
            choices = " | ".join(json.dumps(choice) for choice in structured.choice)
            found.append(("structured_outputs.choice", Grammar("lark", f"start: {choices}\n")))
        if structured.grammar is not None:
            found.append(("structured_outputs.grammar", Grammar("lark", structured.grammar)))
        if structured.json_object:
            found.append(("structured_outputs.json_object", Grammar("json_object", "")))
    if len(found) > 1:
        raise bad_request(found[1][0], f"only one constraint at a time, and {found[0][0]} is another")
    return found[0][1] if found else None


def output_grammar(
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    answer: Grammar | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    must_call: bool = False,
    one_call: bool = False,
) -> Grammar | None:
    """The grammar of an output: thinking, then `answer` (None: any text) or calls of `tools`; calls if `must_call`.

    Nothing to constrain gives None. `one_call` forbids a second call in the block.
    """
    if not tools:
        if answer is None or not thinking:
            return answer
        lines = ["start: thinking answer", *_answer_rule(answer)]
    else:
        block = ["block", *([] if must_call else ["answer"])]
        if answer is None and not must_call:
            # Words may come before the calls. Lexemes are greedy, so the words and the opener have to be one.
            block[0] = "OPENER rest"
        lines = [f"start: {'thinking ' if thinking else ''}({' | '.join(block)})"]
        if not must_call:
            lines += _answer_rule(answer) if answer is not None else ["answer: ANY_TEXT", r"OPENER: /(?s:.*)\n\n</"]
        lines += _CallRules(tokenizer, one_call=one_call).lines(tools)
    if thinking:
        lines.append(f"thinking: ANY_TEXT {_token(tokenizer, END_THINK)}")
    lines.append("ANY_TEXT: /(?s:.*)/")
    return Grammar("lark", "\n".join(lines) + "\n")


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise bad_request("structured_outputs.json", f"not JSON: {error}") from error


def _answer_rule(answer: Grammar) -> list[str]:
    match answer.kind:
        case "json_object":
            return ['answer: %json {"type": "object"}']
        case "json_schema":
            return [f"answer: %json {answer.text}"]
        case "regex":
            # A pattern stands between slashes there, on one line.
            pattern = re.sub(r"\\.|/|\n", lambda hit: {"/": r"\/", "\n": r"\n"}.get(hit[0], hit[0]), answer.text)
            return ["answer: ANSWER", f"ANSWER: /{pattern}/"]
        case "lark":
            return ["answer: %lark {", answer.text, "}"]


class _CallRules:
    """Rules of one block of calls; `i` numbers the tools and `k` a tool's parameters."""

    def __init__(self, tokenizer: Tokenizer, *, one_call: bool) -> None:
        self._dsml = _token(tokenizer, DSML)
        self._repeat = "" if one_call else "+"

    def lines(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """All rules, from `block` (with the two newlines before it) and `rest` (behind its first `<`) downwards."""
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        lines = [
            r'block: "\n\n<" rest',
            rf'rest: {self._dsml} " calls>\n" ({calls}){self._repeat} "</" {self._dsml} " calls>"',
            r"STRING_VALUE: /(?s:.*)<\//",  # with the closing tag's first characters, as OPENER
        ]
        for i, tool in enumerate(tools):
            lines += self._call(i, tool["function"])
        return lines

    def _call(self, i: int, function: Mapping[str, Any]) -> Iterator[str]:
        """One call: `none_k` stands before parameter k while there was none yet, `some_k` when there was."""
        where = f"tools[{i}].function.parameters"
        root = function.get("parameters") or {}
        schema = _resolved(root, root, where)
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            raise bad_request(where, "properties has to be an object, and required a list")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise bad_request(f"{where}.required", f"not among the properties: {', '.join(map(str, unknown))}")
        opener = json.dumps(f' invoke name="{function["name"]}">\n')
        yield f'call_{i}: "<" {self._dsml} {opener} none_{i}_0 "</" {self._dsml} " invoke>\\n"'
        for k, (name, parameter) in enumerate(properties.items()):
            for state in ("none", "some"):
                skip = "" if name in required else f" | {state}_{i}_{k + 1}"
                yield f"{state}_{i}_{k}: parameter_{i}_{k} some_{i}_{k + 1}{skip}"
            yield from self._parameter(f"parameter_{i}_{k}", _name_literal(name, where), parameter, root, where)
        further = schema.get("additionalProperties")
        last = len(properties)
        if further is True or (isinstance(further, Mapping) and further):
            yield rf'none_{i}_{last}: "\n" | further_{i}+'
            yield f"some_{i}_{last}: further_{i}*"
            value = further if isinstance(further, Mapping) else {}
            yield from self._parameter(f"further_{i}", r'/[^"<>\n]{1,64}/', value, root, where)
        else:
            yield rf'none_{i}_{last}: "\n"'  # a call without parameters has an empty line
            yield f'some_{i}_{last}: ""'

    def _parameter(self, rule: str, name: str, schema: Any, root: Mapping[str, Any], where: str) -> Iterator[str]:
        values = " | ".join(dict.fromkeys(_values(schema, root, where)))
        opener = rf'"<" {self._dsml} " parameter name=\"" {name} "\" string="'
        yield rf'{rule}: {opener} ({values}) {self._dsml} " parameter>\n"'


def _values(schema: Any, root: Mapping[str, Any], where: str) -> Iterator[str]:
    """Ways to write a value, each from the quote of `string="..."` to the closing tag's `</`."""
    todo, num_seen = [schema], 0
    while todo:
        one = todo.pop(0)
        num_seen += 1
        if num_seen > _MAX_BRANCHES:
            raise bad_request(where, f"a parameter has more than {_MAX_BRANCHES} alternatives, or refers to itself")
        if one is True:
            one = {}
        if not isinstance(one, Mapping):
            raise bad_request(where, f"every property needs a schema, found {one!r}")
        inner = _resolved(one, root, where)
        branches = inner.get("anyOf") or inner.get("oneOf")
        types = inner.get("type", ["string", *_JSON_TYPES])
        types = list(types) if isinstance(types, list) else [types]
        if isinstance(branches, list):
            todo = [*branches, *todo]
        elif "const" in inner or "enum" in inner:
            allowed = [inner["const"]] if "const" in inner else inner["enum"]
            if not isinstance(allowed, list) or not allowed:
                raise bad_request(where, f"enum is {allowed!r}, wanted a list of values")
            for text in (value for value in allowed if isinstance(value, str)):
                yield rf'"\"true\">" {json.dumps(text + "</")}'
            others = [value for value in allowed if not isinstance(value, str)]
            if others:
                yield _json_value({"enum": others}, root)
        else:
            if "string" in types:
                yield r'"\"true\">" STRING_VALUE'
            others = [name for name in types if name != "string"]
            if others:
                yield _json_value({**inner, "type": others if len(others) > 1 else others[0]}, root)


def _json_value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return rf'"\"false\">" %json {json.dumps({**definitions, **schema, "x-guidance": _GUIDANCE})} "</"'


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The schema that a local `$ref` leads to."""
    for _ in range(_MAX_REF_DEPTH):
        ref = schema.get("$ref")
        if ref is None:
            return schema
        parts = ref.removeprefix("#/").split("/") if isinstance(ref, str) and ref.startswith("#/") else []
        found: Any = root
        for part in parts:
            found = found.get(part) if isinstance(found, Mapping) else None
        if not parts or parts[0] not in ("$defs", "definitions") or not isinstance(found, Mapping):
            raise bad_request(where, f"$ref {ref!r} found, wanted one into #/$defs/ of the same parameters")
        schema = found
    raise bad_request(where, "a $ref refers to itself")


def _name_literal(name: str, where: str) -> str:
    if not name or any(char in name for char in '"\n'):
        raise bad_request(
            f"{where}.properties", f"{name!r} cannot be written as a parameter's name in the model's format"
        )
    return json.dumps(name)


def _token(tokenizer: Tokenizer, name: str) -> str:
    return f"<[{tokenizer.special_id(name)}]>"
