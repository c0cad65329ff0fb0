"""Grammars: whatever the model says, the text matches; masks are those of the text alone, whatever was drafted."""

from __future__ import annotations

import json
import re
import string
import subprocess
import sys
import threading
from collections.abc import Sequence

import jsonschema
import pytest
import torch

from flashstep.chat import Tokenizer
from flashstep.executor import Constraint, Request, Step
from flashstep.grammar import GrammarCompiler, MinTokens, TokenGrammar, both
from flashstep.loading import BUNDLED_MODEL, LoadedModel, load
from flashstep.params import SamplingParams
from flashstep.requests import Grammar, RequestError
from flashstep.stages.accept import reference as sampling
from flashstep.state import State

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
EOS = TOKENIZER.eos_id
VOCAB = TOKENIZER.vocab_size + 24  # a model pads its vocabulary
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
SPECIAL = sorted(TOKENIZER.specials.values())

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v", "sub"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, object]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {c: {"type": "boolean"} for c in "abcd"}, "required": ["c"]},
    "enum": {"enum": ["red", "green", "grün", 7, None, {"deep": [1, 2]}]},
    "const": {"const": {"a": [True, "x\ny"]}},
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "maximum": 120},
        "minItems": 2,
        "maxItems": 5,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "string", "maxLength": 3}],
        "items": False,
        "minItems": 2,
    },
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 17.25},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "length": {"type": "string", "minLength": 5, "maxLength": 9},
    "format": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}},
        "required": ["day"],
        "additionalProperties": False,
    },
    "any": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "nested": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
}
REGEXES = [r"(red|green|blue){2,5}", r"\d{4}-\d\d-\d\d", r"[^a-z]{3,30}!", r"(ab?)*c", r"[äöü€😀]{2,6}x?"]
LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,4}/
"""


def json_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def tokens_of(characters: str) -> list[int]:
    return [TOKENIZER.encode(c)[0] for c in characters]


CLOSING = torch.zeros(VOCAB)
CLOSING[[*tokens_of('"}])'), EOS]] = 12.0  # free text has no end by itself


def random_logits(seed: int, stream: int, first: int, rows: int) -> torch.Tensor:
    """[rows, VOCAB]: a model without a mind. From token 30 on it would like to close what is open."""
    found = []
    for position in range(first, first + rows):
        draws = torch.Generator().manual_seed((seed * 2 + stream) * 10_000 + position)
        found.append(2 * torch.randn(VOCAB, generator=draws) + CLOSING * (position >= 30))
    return torch.stack(found)


def write(constraint: Constraint, seed: int, *, drafts: int = 4, limit: int = 300, temperature: float = 1.0,
          rule: str = "standard") -> list[int]:  # fmt: skip
    """Tokens up to EOS from random p, with blocks drafted from another random q of which every second is unmasked."""
    params = SamplingParams(temperature=temperature)
    seeds, text = torch.tensor([seed]), []
    while EOS not in text:
        assert len(text) < limit, TOKENIZER.decode(text)
        start = torch.tensor([len(text)])
        block, q = [], torch.zeros(1, drafts, VOCAB, dtype=torch.float64)
        for i in range(drafts):
            allowed = constraint.allowed(block)[-1:] if (seed + len(text)) % 2 else None
            q[:, i], token = sampling.draft_tokens(
                random_logits(seed, 1, len(text) + i, 1), params, seeds=seeds, starts=start, positions=start + i,
                allowed=allowed,
            )  # fmt: skip
            block.append(int(token))
        rows = constraint.allowed(block)
        assert rows.shape == (drafts + 1, VOCAB)
        assert rows.dtype == torch.bool
        p = sampling.probabilities(random_logits(seed, 0, len(text), drafts + 1), params, allowed=rows)
        ids = torch.tensor([block], dtype=torch.int64).reshape(1, drafts)
        if temperature == 0:
            accepted = sampling.accept_greedy(target_probs=p[None], draft_ids=ids)
        else:
            accepted = sampling.accept(
                target_probs=p[None], draft_probs=q, draft_ids=ids, seeds=seeds, positions=start, rule=rule
            )  # fmt: skip
        new = accepted.tokens[0, : int(accepted.num_accepted[0]) + 1].tolist()
        constraint.advance(new)
        text += new
    return text[: text.index(EOS)]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()  # strict: no half characters


# -- whatever the model says, the text matches ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_tokens_make_json_that_its_schema_accepts(name):
    grammar, texts = json_schema(SCHEMAS[name]), set()
    judge = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    for seed in range(8):
        constraint = COMPILER.constraint(grammar)
        text = text_of(write(constraint, seed, rule="block" if seed % 4 > 1 else "standard"))
        judge.validate(json.loads(text))
        assert constraint.failure is None
        texts.add(text)
    assert len(texts) > (1 if name in ("enum", "const") else 4), "the texts are too much alike to test anything"


def test_json_object_is_any_object():
    for seed in range(6):
        assert isinstance(json.loads(text_of(write(COMPILER.constraint(Grammar("json_object", "")), seed))), dict)


@pytest.mark.parametrize("pattern", REGEXES)
def test_random_tokens_make_text_that_its_pattern_matches_from_end_to_end(pattern):
    texts = [text_of(write(COMPILER.constraint(Grammar("regex", pattern)), seed)) for seed in range(12)]
    assert [t for t in texts if not re.fullmatch(pattern, t)] == []
    assert len(set(texts)) > 3


def test_random_tokens_make_sentences_of_a_lark_grammar():
    for seed in range(24):
        text = text_of(write(COMPILER.constraint(Grammar("lark", LARK)), seed, limit=2000))
        assert set(text) <= set(string.digits + "+-*/()")
        assert re.search(r"[0-9]{5}", text) is None
        compile(re.sub(r"[0-9]+", "1", text), "sum", "eval")


def test_greedy_text_is_the_same_with_and_without_drafts():
    for name, schema in SCHEMAS.items():
        for seed in range(3):
            texts = [
                write(COMPILER.constraint(json_schema(schema)), seed, drafts=k, temperature=0.0) for k in (0, 1, 5)
            ]
            assert texts[0] == texts[1] == texts[2], name


def test_json_strings_hold_any_character_but_no_special_token():
    constraint = COMPILER.constraint(json_schema({"type": "string"}))
    inside = TOKENIZER.encode('"Grüße, 世界 😀 </think><｜end▁of▁sentence｜> ')
    rows = constraint.allowed(inside)
    assert all(row[token] for row, token in zip(rows, inside, strict=False)), "text that spells a special token is text"
    constraint.advance(inside)
    assert not constraint.allowed([])[0, SPECIAL].any()
    assert not rows[:, SPECIAL].any()
    assert not rows[:, TOKENIZER.vocab_size :].any(), "ids that pad the vocabulary"
    constraint.advance(TOKENIZER.encode('"'))
    assert constraint.allowed([])[0].nonzero().flatten().tolist() == [EOS]


def test_a_character_may_be_split_over_tokens_and_blocks():
    constraint = COMPILER.constraint(Grammar("regex", "[é😀]{2}"))
    tokens = TOKENIZER.encode("😀é")
    assert len(tokens) > 3, "the characters are single tokens: nothing is split"
    for token in tokens:
        assert constraint.allowed([])[0, token]
        assert not constraint.allowed([])[0, EOS]
        constraint.advance([token])
    assert constraint.allowed([])[0].nonzero().flatten().tolist() == [EOS]


def test_a_lark_grammar_may_ask_for_special_tokens_by_id():
    end = TOKENIZER.special_id("</think>")
    constraint = COMPILER.constraint(Grammar("lark", f'start: /(.|\\n)*/ <[{end}]> "yes"'))
    thought = TOKENIZER.encode("Is it? </think> no.\n")
    rows = constraint.allowed([*thought, end, *TOKENIZER.encode("yes"), EOS])
    assert rows[len(thought), end]
    assert not rows[len(thought), EOS]
    assert not rows[len(thought) + 1, end]
    assert rows[-2].nonzero().flatten().tolist() == [EOS]


# -- drafts leave no trace --------------------------------------------------------------------------------------------


def fresh_row(grammar: Grammar, text: Sequence[int]) -> torch.Tensor:
    constraint = COMPILER.constraint(grammar)
    constraint.advance(text)
    return constraint.allowed([])[0]


GRAMMARS = {
    **{name: json_schema(schema) for name, schema in SCHEMAS.items()},
    **{pattern: Grammar("regex", pattern) for pattern in REGEXES},
    "lark": Grammar("lark", LARK),
    "lark, lazy": Grammar("lark", 'start: a "!" b\na[suffix=";"]: /[a-z;]{0,20}/\nb: /[0-9]{3}/'),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_the_text_alone(name):
    """Right drafts, wrong drafts, the same block asked for piece by piece, twice, and cut short."""
    grammar = GRAMMARS[name]
    truth = [*write(COMPILER.constraint(grammar), 5), EOS][:60]
    expected = [fresh_row(grammar, truth[:i]) for i in range(len(truth) + 1)]
    constraint, done, draws = COMPILER.constraint(grammar), 0, torch.Generator().manual_seed(0)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=draws))

    while done < len(truth):
        right = truth[done : done + draw(7)]
        block = right + [draw(VOCAB) for _ in range(draw(3))]
        for i in range(draw(len(block) + 1)):
            constraint.allowed(block[:i])
        rows = constraint.allowed(block)
        assert rows.any(dim=-1).all(), "an empty row ends the request"
        for i in range(len(right) + 1):
            assert torch.equal(rows[i], expected[done + i]), (name, done, i)
        stay = min(draw(len(right) + 2), len(truth) - done)
        constraint.advance(truth[done : done + stay])
        done += stay
    if truth[-1] == EOS:
        assert constraint.allowed([EOS, 5]).nonzero()[:, 1].tolist() == [EOS] * 3
    assert constraint.failure is None


def test_rows_behind_a_wrong_draft_are_never_empty_and_the_state_survives():
    constraint = COMPILER.constraint(Grammar("regex", "abcd"))
    a, z = tokens_of("az")
    first = constraint.allowed([])
    for block in ([z], [z, z, z], [a, z, a], [EOS, a], [VOCAB - 1, a], SPECIAL):
        rows = constraint.allowed(block)
        assert rows.any(dim=-1).all()
        assert torch.equal(rows[:1], first)
    constraint.advance(TOKENIZER.encode("abcd"))
    assert constraint.allowed([])[0].nonzero().flatten().tolist() == [EOS]
    constraint.advance([EOS])
    assert constraint.failure is None


def test_a_complete_grammar_may_still_go_on_where_it_can():
    constraint = COMPILER.constraint(Grammar("regex", "a+"))
    a = tokens_of("a")[0]
    rows = constraint.allowed([a, EOS, a])
    assert [bool(row[EOS]) for row in rows] == [False, True, True, True]
    assert [bool(row[a]) for row in rows] == [True, True, False, False]


def test_each_request_has_its_own_state():
    grammar = Grammar("regex", "a{3}")
    one, two = COMPILER.constraint(grammar), COMPILER.constraint(grammar)
    one.advance(TOKENIZER.encode("aaa"))
    assert one.allowed([])[0].nonzero().flatten().tolist() == [EOS]
    assert not two.allowed([])[0, EOS]


def test_json_whitespace_is_bounded():
    constraint = COMPILER.constraint(json_schema({"type": "array", "items": {"type": "integer"}}))
    space = tokens_of(" ")[0]
    constraint.advance(tokens_of("["))
    spaces = 0
    while constraint.allowed([])[0, space]:
        constraint.advance([space])
        spaces += 1
    assert spaces == 41
    guidance = {"whitespace_pattern": None, "whitespace_flexible": False}
    chosen = COMPILER.constraint(json_schema({"type": "array", "x-guidance": guidance}))
    chosen.advance(tokens_of("["))
    assert not chosen.allowed([])[0, space], "a schema's own choice comes first"


# -- what cannot be followed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "response_format: the schema is not valid JSON"),
        ("json_schema", '{"maximum": NaN}', "response_format: the schema is not valid JSON: NaN"),
        ("json_schema", "[1]", "response_format: the schema is a list, expected a JSON object"),
        ("json_schema", "[" * 60_000, "response_format: the schema is not valid JSON"),
        ("json_schema", '{"type": "objct"}', "response_format: Invalid type: objct"),
        ("json_schema", '{"$ref": "#/nowhere"}', "response_format: Pointer '/nowhere' does not exist"),
        ("json_schema", '{"$ref": "http://localhost:9/x"}', "does not fetch resources"),
        ("json_schema", '{"$ref": "#"}', "response_format: nothing can match it"),
        ("json_schema", "false", "response_format: "),
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "response_format: "),
        ("regex", "(", "unclosed group"),
        ("regex", r"[^\s\S]", "grammar: nothing can match it"),
        ("regex", "\ud800", "grammar: holds an unpaired surrogate at character 0"),
        ("regex", "a" * 140_000, "grammar: 140000 bytes long, expected at most 131072"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", 'start: "a', "lexer error"),
        ("lark", "", "grammar: Empty grammar"),
        ("lark", "a: b", "no start rule"),
        ("lark", "start: a\na[max_tokens=3]: /.*/", "grammar: rollback not supported with max_tokens"),
        ("lark", 'start: a\na[stop=";"]: /.*/', "grammar: rollback not supported with max_tokens=... or stop=..."),
        ("lark", "start: " + "(" * 60_000, "too deeply nested"),
        ("lark", "start: " + " ".join(f'"{i}"' for i in range(30_000)), "grammar: "),
    ],
)
def test_a_faulty_grammar_is_refused_with_the_reason(kind, text, message):
    for compiler_call in (COMPILER.check, COMPILER.constraint):
        with pytest.raises(RequestError) as caught:
            compiler_call(Grammar(kind, text))
        assert message in str(caught.value)
        assert "<state>" not in str(caught.value)
        assert "<backtrace>" not in str(caught.value)
        assert caught.value.param == ("response_format" if kind.startswith("json") else "grammar")


def test_true_is_a_schema():
    json.loads(text_of(write(COMPILER.constraint(Grammar("json_schema", "true")), 3)))


DEEP = """
from flashstep.grammar import GrammarCompiler, _TEXT_BYTES
from flashstep.chat import Tokenizer
from flashstep.loading import BUNDLED_MODEL
from flashstep.requests import Grammar, RequestError
import itertools, string

def names(alphabet):
    return ("".join(n) for k in (1, 2, 3, 4) for n in itertools.product(alphabet, repeat=k))

def chain(kind, alphabet, start, link, end):
    text, size, every = [start], len(start), names(alphabet)
    here = next(every)
    while size < _TEXT_BYTES - 80:
        there = next(every)
        text.append(link.replace("THERE", there).replace("HERE", here))
        size += len(text[-1])
        here = there
    return Grammar(kind, "".join(text) + end.replace("HERE", here))

compiler = GrammarCompiler(Tokenizer.load(BUNDLED_MODEL), 1024)
low, high = string.ascii_lowercase, string.ascii_uppercase
schema = '{"$ref":"#/$defs/a","$defs":{'
last = '"HERE":{"type":"string"}}}'
ref = '{"$ref":"#/$defs/THERE"}'
for grammar in [
    chain("lark", low, "start:a", "\\nHERE:THERE", '\\nHERE:"x"'),
    chain("lark", low, "start:a", '\\nHERE:(THERE|"y")*', '\\nHERE:"x"'),
    chain("lark", high, "start:A", "\\nHERE:THERE", '\\nHERE:"x"'),
    chain("lark", high, "start:A", '\\nHERE:(THERE|"y")"z"', '\\nHERE:"x"'),
    *(
        chain("json_schema", low, schema, '"HERE":' + form.replace("REF", ref) + ",", last)
        for form in (
            'REF', '{"items":REF}', '{"type":"array","minItems":1,"items":REF}', '{"prefixItems":[REF]}',
            '{"properties":{"x":REF}}', '{"type":"object","properties":{"x":REF},"required":["x"]}',
            '{"additionalProperties":REF}', '{"patternProperties":{"x":REF}}', '{"anyOf":[REF]}', '{"allOf":[REF]}',
            '{"oneOf":[REF]}',
        )
    ),
]:
    assert _TEXT_BYTES * 0.99 < len(grammar.text) <= _TEXT_BYTES
    try:
        constraint = compiler.constraint(grammar)
        constraint.advance(constraint.allowed([]).nonzero()[:1, 1].tolist())
        constraint.allowed([])
        print("compiled", flush=True)
    except RequestError as error:
        print("refused", str(error)[:60].splitlines()[0], flush=True)
"""


def test_the_deepest_chains_that_fit_into_a_request_do_not_end_the_process():
    run = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, f"exit status {run.returncode} after {run.stdout}{run.stderr}"
    outcomes = run.stdout.splitlines()
    assert len(outcomes) == 15
    assert not any("unknown" in outcome or "not exist" in outcome for outcome in outcomes), "a chain is broken"


def test_compiled_grammars_are_kept_and_failed_ones_are_not():
    compiler = GrammarCompiler(TOKENIZER, VOCAB, cached=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.constraint(Grammar("regex", text))
    info = compiler._matcher.cache_info()
    assert (info.hits, info.misses, info.currsize) == (2, 4, 2)
    for _ in range(2):
        with pytest.raises(RequestError):
            compiler.check(Grammar("regex", "("))
    assert compiler._matcher.cache_info().currsize == 2


def test_threads_share_a_compiler():
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = text_of(write(COMPILER.constraint(Grammar("regex", f"[0-9]{{3}}x{i % 3}")), i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(re.fullmatch(rf"[0-9]{{3}}x{i % 3}", results[i]) for i in range(8))
    assert threading.stack_size() == 0, "the size for deep recursion stayed behind"


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ValueError, match="expected at least the tokenizer's 1024"):
        GrammarCompiler(TOKENIZER, 1000)


# -- limits that show only in the middle of a text --------------------------------------------------------------------


class Brittle:
    """A matcher that gives up on the mask behind `at` tokens, and counts masks."""

    masks = 0

    def __init__(self, real, at: int, count: int = 0) -> None:
        self.real, self.at, self.count, self.broken = real, at, count, False

    def deep_copy(self):
        return Brittle(self.real.deep_copy(), self.at, self.count)

    def compute_bitmask(self):
        Brittle.masks += 1
        self.broken |= self.count == self.at
        return self.real.compute_bitmask()

    def consume_token(self, token):
        return self.consume_tokens([token])

    def consume_tokens(self, tokens):
        assert not self.broken
        self.count += len(tokens)
        return self.real.consume_tokens(tokens)

    def rollback(self, count):
        assert not self.broken
        self.count -= count
        return self.real.rollback(count)

    def is_error(self):
        return self.broken

    def get_error(self):
        return "Too many items\n<state>secret</state>" if self.broken else ""

    def is_accepting(self):
        return self.real.is_accepting()


def brittle(pattern: str, at: int) -> TokenGrammar:
    return TokenGrammar(Brittle(COMPILER._matcher("regex", pattern), at), VOCAB, EOS)


def test_giving_up_ends_the_request_with_a_reason():
    constraint = brittle("[ab]{6}", 2)
    a, b = tokens_of("ab")
    constraint.advance([a])
    assert constraint.allowed([])[0, b]
    assert constraint.failure is None
    constraint.advance([b])
    assert constraint.allowed([a, b]).nonzero()[:, 1].tolist() == [EOS] * 3
    assert constraint.failure == "Too many items"
    constraint.advance([EOS])
    assert constraint.failure == "Too many items"


def test_giving_up_behind_a_draft_that_falls_changes_nothing():
    constraint = brittle("[ab]{6}", 3)
    a, b = tokens_of("ab")
    rows = constraint.allowed([a, b, a, b])
    assert rows[2, a]
    assert rows[3:].nonzero()[:, 1].tolist() == [EOS, EOS]
    assert constraint.failure is None
    constraint.advance([a, a])
    assert constraint.failure is None
    assert constraint.allowed([])[0, a]


def test_giving_up_behind_a_draft_that_stands_is_told():
    constraint = brittle("[ab]{6}", 2)
    a, b = tokens_of("ab")
    constraint.allowed([a, b])
    constraint.advance([a, b, EOS])  # the only token that was left
    assert constraint.failure == "Too many items"


def test_a_step_computes_each_mask_once():
    constraint = brittle("[ab]{60}", -1)
    a, b = tokens_of("ab")
    Brittle.masks = 0
    for _ in range(4):  # drafting asks row by row, verification for all, and the first three stand
        for k in range(6):
            constraint.allowed([a, b, a, b, a][:k])
        constraint.advance([a, b, a, a])
    assert Brittle.masks == 4 * 6


def test_text_that_the_masks_did_not_allow_is_a_failure():
    constraint = COMPILER.constraint(Grammar("regex", "ab"))
    constraint.advance(tokens_of("b"))
    assert "is not allowed by the grammar" in constraint.failure
    assert constraint.allowed([])[0].nonzero().flatten().tolist() == [EOS]
    early = COMPILER.constraint(Grammar("regex", "ab"))
    early.advance([EOS])
    assert early.failure == "the text ended before its grammar did"


# -- a minimum length -------------------------------------------------------------------------------------------------


def test_ends_are_banned_until_enough_is_written():
    stop = tokens_of(";")[0]
    constraint = MinTokens({EOS, stop}, VOCAB, 4)
    rows = constraint.allowed([5, 6, 7, 8, 9])
    assert rows.shape == (6, VOCAB)
    assert rows[:, EOS].tolist() == rows[:, stop].tolist() == [False] * 4 + [True] * 2
    assert rows.sum(dim=-1).tolist() == [VOCAB - 2] * 4 + [VOCAB] * 2
    constraint.advance([5, 6, 7])
    assert constraint.allowed([5])[:, EOS].tolist() == [False, True]
    constraint.advance([5, 6])
    assert constraint.allowed([]).all()


def test_both_hold_and_a_grammar_that_must_end_wins():
    a, stop = tokens_of("a;")
    constraint = both(COMPILER.constraint(Grammar("regex", "a{1,3};?")), MinTokens({EOS, stop}, VOCAB, 5))
    rows = constraint.allowed([a, a, a])
    assert not rows[0, EOS]
    assert not rows[:3, [EOS, stop]].any(), "the minimum holds while the grammar leaves something else"
    assert rows[1, a]
    assert rows[3].nonzero().flatten().tolist() == sorted([EOS, stop]), "nothing satisfies both: the grammar's row"
    constraint.advance([a, a, a, EOS])
    assert constraint.failure is None
    assert both(brittle("a{9}", 0), MinTokens({EOS}, VOCAB, 5)).allowed([])[0].nonzero().flatten().tolist() == [EOS]
    failed = both(brittle("a{9}", 0), MinTokens({EOS}, VOCAB, 5))
    failed.allowed([])
    assert failed.failure == "Too many items"


@pytest.mark.parametrize("least", [0, 20])
def test_random_text_keeps_to_grammar_and_minimum(least):
    for seed in range(10):
        grammar = COMPILER.constraint(Grammar("regex", "[a-z ]{0,60}"))
        tokens = write(both(grammar, MinTokens({EOS}, VOCAB, least)), seed)
        assert re.fullmatch("[a-z ]{0,60}", text_of(tokens))
        assert len(tokens) >= least or len(text_of(tokens)) == 60


# -- on the step ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load()


PROMPTS = ["def area(shape):\n    return ", '{"name": "', "The answer is "]
BOUNDED = {name: SCHEMAS[name] for name in ("enum", "array", "tuple", "pattern", "length", "any")} | {
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["a", "b"]},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "kind", "ok"],
        "additionalProperties": False,
    }
}


def run(bundled: LoadedModel, jobs: list[tuple[str, Constraint]], params: SamplingParams, drafts: int):
    """Texts up to EOS of a batch of prompts with their constraints; how many drafts stood and how many fell."""
    state = State(
        bundled.config,
        num_slots=len(jobs),
        num_pages=len(jobs) * 16,
        page_tokens=32,
        rows_per_request=64,
        dtype=bundled.model.num.dtype,
    )
    step = Step(bundled.model, bundled.draft, state, num_speculative_tokens=drafts)
    requests = []
    for seed, (prompt, constraint) in enumerate(jobs):
        tokens = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
        requests.append(Request(state.acquire(), tokens, params, seed, bundled.config.vocab_size, constraint))
    active, accepted, fallen = list(requests), 0, 0
    while active:
        for result in step(active):
            assert result.error is None, result.error
            accepted, fallen = accepted + result.accepted, fallen + result.drafted - result.accepted
        active = [r for r in active if EOS not in r.tokens[r.prompt_length :] and len(r.tokens) < r.prompt_length + 120]
    texts = []
    for request in requests:
        new = request.tokens[request.prompt_length :]
        assert EOS in new, TOKENIZER.decode(new)
        texts.append(text_of(new[: new.index(EOS)]))
    return texts, accepted, fallen


def test_speculative_greedy_text_under_a_grammar_equals_one_token_a_step(bundled):
    compiler = GrammarCompiler(bundled.tokenizer, bundled.config.vocab_size)
    found = []
    for drafts in (0, 5):
        jobs = [(prompt, compiler.constraint(json_schema(s))) for s in BOUNDED.values() for prompt in PROMPTS]
        found.append(run(bundled, jobs, SamplingParams(temperature=0.0), drafts))
    (plain, _, _), (speculative, accepted, fallen) = found
    assert speculative == plain
    assert accepted > 50, "too few drafts stood to test anything"
    assert fallen > 50, "too few drafts fell to test anything"
    for text, schema in zip(speculative, [s for s in BOUNDED.values() for _ in PROMPTS], strict=True):
        jsonschema.validate(json.loads(text), schema)


def test_sampled_text_on_the_step_matches(bundled):
    compiler = GrammarCompiler(bundled.tokenizer, bundled.config.vocab_size)
    schemas = [s for s in BOUNDED.values() for _ in PROMPTS]
    jobs = [
        (PROMPTS[i % 3], both(compiler.constraint(json_schema(s)), MinTokens({EOS}, bundled.config.vocab_size, 6)))
        for i, s in enumerate(schemas)
    ]
    texts, accepted, fallen = run(bundled, jobs, SamplingParams(temperature=1.3), 5)
    assert accepted > 20
    assert fallen > 20
    for text, schema in zip(texts, schemas, strict=True):
        jsonschema.validate(json.loads(text), schema)
