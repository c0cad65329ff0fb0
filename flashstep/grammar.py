"""What a request may write, token by token: grammars, compiled by llguidance, and a minimum length.

Owns the way from a user's `Grammar` to the executor's `Constraint`: compiling, refusing what cannot be compiled, masks
behind any prefix of a drafted block. Leaves the end of a request to the engine, which also looks at `failure` after
each step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from flashstep.chat import Tokenizer
from flashstep.executor import Constraint
from flashstep.requests import Grammar, GrammarKind, RequestError

T = TypeVar("T")

# llguidance walks a chain of rules or references by recursion, and the process ends where the stack does: on the usual
# 8 MiB, 1,600 schemas that refer to each other are enough. The worst found takes 740 bytes of stack per byte of text
# (1.9.1, Lark rules with names of a letter or two); these leave five times that. Stack is address space, not memory.
_TEXT_BYTES = 1 << 17
_STACK_BYTES = 1 << 29

# Whitespace between JSON tokens is bounded: a model that likes to indent would otherwise do so to its last token.
# Room for a line break and ten levels of four spaces. A schema's own "x-guidance" comes after it.
_JSON_WHITESPACE = r"[ \n\r\t]{1,41}"

_PARAM = {"json_schema": "response_format", "json_object": "response_format", "regex": "grammar", "lark": "grammar"}


class Fallible(Constraint, Protocol):
    """A constraint that can run into the limits of its own machinery."""

    @property
    def failure(self) -> str | None:
        """Why the text can no longer be held to the constraint; None while all is well."""


class GrammarCompiler:
    """Turns grammars into constraints over a model's vocabulary. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, cached: int = 64) -> None:
        """`vocab_size` is the model's: ids that pad it are never allowed. `cached`: compiled grammars that are kept."""
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size = {vocab_size}: expected at least the tokenizer's {tokenizer.vocab_size}")
        self._vocab_size, self._eos = vocab_size, tokenizer.eos_id
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=vocab_size)
        self._limits = LLParserLimits(verbose_errors=False)  # the parser's state is no help to whoever wrote a schema
        self._matcher = lru_cache(maxsize=cached)(self._compile)

    def check(self, grammar: Grammar) -> None:
        """Compile and keep `grammar`. Raises RequestError, with the reason, for one that cannot be followed."""
        self._matcher(*_key(grammar))

    def constraint(self, grammar: Grammar) -> TokenGrammar:
        """`grammar` at the start of its text. Raises as `check`."""
        return TokenGrammar(self._matcher(*_key(grammar)), self._vocab_size, self._eos)

    def _compile(self, kind: GrammarKind, text: str) -> LLMatcher:
        """A matcher at the start, to be copied: its masks and its lexer's first states are computed once."""
        param = _PARAM[kind]
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(param, f"holds an unpaired surrogate at character {error.start}") from error
        if size > _TEXT_BYTES:
            raise RequestError(param, f"{size} bytes long, expected at most {_TEXT_BYTES}")
        if kind == "lark":
            source = LLMatcher.grammar_from_lark(text)
        elif kind == "regex":
            source = LLMatcher.grammar_from_regex(text)
        else:
            source = LLMatcher.grammar_from_json_schema(
                _schema(text, param), defaults={"whitespace_pattern": _JSON_WHITESPACE}
            )

        matcher = _on_deep_stack(lambda: self._start(source))
        if matcher.is_error():
            raise RequestError(param, _explain(matcher))
        return matcher

    def _start(self, source: str) -> LLMatcher:
        """A matcher of `source` that has computed its first mask, or that has failed."""
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            return matcher
        allowed = _unpack(matcher.compute_bitmask(), self._vocab_size)
        allowed[self._eos] = False
        if allowed.any() and not matcher.is_error():
            # Some lexemes cannot be taken back behind a draft, and llguidance says so when it is asked to.
            trial = matcher.deep_copy()
            if trial.consume_token(int(allowed.argmax())) and not trial.rollback(1):
                return trial
        return matcher


def _key(grammar: Grammar) -> tuple[GrammarKind, str]:
    return grammar.kind, '{"type": "object"}' if grammar.kind == "json_object" else grammar.text


def _schema(text: str, param: str) -> str:
    """`text`, having made sure that it is JSON: llguidance pastes it into JSON of its own and counts columns there."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        schema = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(param, f"the schema is not valid JSON: {error}") from error
    if isinstance(schema, bool):  # options can only be put into an object
        return "{}" if schema else '{"not": {}}'
    if not isinstance(schema, dict):
        raise RequestError(param, f"the schema is a {type(schema).__name__}, expected a JSON object")
    return text


def _explain(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, without its traces."""
    reason = matcher.get_error()
    for trace in ("<state>", "<backtrace>", "<non-verbose/>"):
        reason = reason.partition(trace)[0]
    reason = reason.strip()
    if reason in ("", "NoExtension", "NoExtensionBias"):
        return "nothing can match it"
    return reason


def _unpack(bits: bytes, count: int) -> npt.NDArray[np.bool_]:
    """[count] bool: little-endian bits, one per token."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count, bitorder="little").astype(np.bool_)


_stack_size = threading.Lock()


@contextmanager
def _deep_stacks() -> Iterator[None]:
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread with room for deep recursion; the size goes for threads that start meanwhile, too."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        with _deep_stacks():
            result = thread.submit(work)
        return result.result()


class _Vocabulary:
    """The tokenizer as llguidance reads it.

    Given to it token by token rather than as its file, because it takes the file's word for what is special, and the
    release flags <think> and ｜DSML｜ as ordinary tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.specials.values())
        self.tokens = [self._bytes(token) for token in range(tokenizer.vocab_size)]

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except ValueError:  # an id that the tokenizer leaves out; llguidance never allows a token without bytes
            return b""

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode())


class TokenGrammar:
    """A grammar along one request's text. Behind the end of the grammar only EOS is allowed, and behind EOS only EOS.

    The matcher runs ahead of the text along the drafts last asked about. Drafting asks about growing prefixes and
    verification about all of them, so each row is computed once.

    Where llguidance gives up in the middle of a text, beyond its limits on states and items, the masks allow EOS alone
    and `failure` says so.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, eos: int) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._vocab_size, self._eos = vocab_size, eos
        self._only_eos = torch.zeros(vocab_size, dtype=torch.bool)
        self._only_eos[eos] = True
        self._text: list[int] = []
        self._ahead: list[int] = []  # drafts that the matcher has consumed behind the text
        self._rows: list[Tensor] = []  # masks behind the text and behind each prefix of `_ahead`; may lack the last
        self._ended = False
        self._gave_up: str | None = None  # what llguidance said last, perhaps behind drafts that nobody accepts
        self.failure: str | None = None

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """[len(drafts) + 1, vocab] bool. Behind EOS, and behind a draft that is not allowed, rows hold EOS alone."""
        if not self._ended:
            self._follow(drafts)
        reached = 0 if self._ended else len(self._ahead) + 1
        rows = self._rows[: min(reached, len(drafts) + 1)]
        return torch.stack(rows + [self._only_eos] * (len(drafts) + 1 - len(rows)))

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` have become part of the text; what comes behind EOS is ignored."""
        for token in tokens:
            if self._ended:
                return
            if token == self._eos:
                self._rewind(0)
                self._ended = True
                if self.failure is None and not self._matcher.is_accepting():
                    self.failure = self._gave_up or "the text ended before its grammar did"
                return
            if not self._ahead or self._ahead[0] != token:
                self._rewind(0)
                if not self._consume(token):
                    self._fail(f"token {token} is not allowed by the grammar")
                    return
            self._text.append(self._ahead.pop(0))
            del self._rows[:1]

    def _follow(self, drafts: Sequence[int]) -> None:
        """Take the matcher along `drafts` as far as they are allowed; every state on the way gets its row."""
        same = 0
        while same < min(len(drafts), len(self._ahead)) and drafts[same] == self._ahead[same]:
            same += 1
        if same < len(drafts):
            self._rewind(same)
        while True:
            if len(self._rows) == len(self._ahead):
                self._rows.append(self._mask())
            at = len(self._ahead)
            if at >= len(drafts) or drafts[at] == self._eos or not self._rows[at][drafts[at]]:
                return
            if not self._consume(drafts[at]):
                return

    def _mask(self) -> Tensor:
        """[vocab] bool for the matcher's state; EOS alone where llguidance gives up."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._gave_up = _explain(self._matcher)
            if not self._ahead:
                self._fail(self._gave_up)
            self._renew()
            return self._only_eos
        return torch.from_numpy(_unpack(bits, self._vocab_size))

    def _consume(self, token: int) -> bool:
        if self._matcher.consume_token(token):
            self._ahead.append(token)
            return True
        self._gave_up = _explain(self._matcher)
        self._renew()
        return False

    def _rewind(self, count: int) -> None:
        """Take the matcher back to behind `count` of the drafts that it has consumed."""
        if count < len(self._ahead):
            taken_back = self._matcher.rollback(len(self._ahead) - count)
            del self._ahead[count:], self._rows[count + 1 :]
            if not taken_back:
                self._renew()

    def _renew(self) -> None:
        """A matcher that has failed stays so, even behind drafts that will not stand: put a fresh one in its place."""
        self._matcher = self._start.deep_copy()
        if not self._matcher.consume_tokens(self._text + self._ahead):
            self._fail(_explain(self._matcher))

    def _fail(self, reason: str) -> None:
        self._ended = True
        self.failure = reason


class MinTokens:
    """Bans the tokens that would end a request until `min_tokens` are written."""

    failure: str | None = None

    def __init__(self, eos_ids: Collection[int], vocab_size: int, min_tokens: int) -> None:
        """`eos_ids`: EOS and the request's own stop tokens."""
        self._banned = torch.ones(vocab_size, dtype=torch.bool)
        self._banned[list(eos_ids)] = False
        self._left = min_tokens

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """[len(drafts) + 1, vocab] bool: each draft counts as written."""
        early = torch.arange(len(drafts) + 1) < self._left
        return self._banned | ~early[:, None]

    def advance(self, tokens: Sequence[int]) -> None:
        """Count `tokens`."""
        self._left = max(0, self._left - len(tokens))


class Both:
    """Two constraints at once. Where nothing satisfies both, `first` wins: a grammar that is complete ends the text."""

    def __init__(self, first: Fallible, second: Fallible) -> None:
        self.first, self.second = first, second

    @property
    def failure(self) -> str | None:
        """The failure of either."""
        return self.first.failure or self.second.failure

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """[len(drafts) + 1, vocab] bool."""
        rows = self.first.allowed(drafts)
        common = rows & self.second.allowed(drafts)
        return torch.where(common.any(dim=-1, keepdim=True), common, rows)

    def advance(self, tokens: Sequence[int]) -> None:
        """Tell both."""
        self.first.advance(tokens)
        self.second.advance(tokens)


def both(a: Fallible, b: Fallible) -> Both:
    """`a` and `b` at once; put the grammar first, it wins over a minimum length that it cannot fill."""
    return Both(a, b)
