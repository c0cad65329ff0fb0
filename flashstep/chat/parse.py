"""The model's output as it streams: stop strings, and reasoning, content and tool calls told apart.

Owns the reading of the markers that ``render`` writes. Markers are recognised by token id: ``</think>`` and
``｜DSML｜`` are special tokens in the release, so only a special piece can be part of a marker, and the same
characters spelled by ordinary tokens are text that the user sees. For sources that have text alone, the parser can be
told to read the spelling instead; then text that spells a marker is one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from flashstep.chat.tokens import DSML, END_THINK, THINK, Piece


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A stretch of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A stretch of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call's name is known; ``index`` counts the calls of this output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the call's arguments; all fragments together are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete. A call that the output leaves open never gets this event, nor a closing brace."""

    index: int


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd


class _State(Enum):
    """Where the parser stands: in text, between calls, between a call's arguments, or in an argument's value."""

    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()
    ARGUMENTS = auto()
    VALUE = auto()


class _Hole(Enum):
    """What a pattern leaves open: a name (up to the literal behind it, on one line) or whitespace."""

    NAME = auto()
    GAP = auto()


_NAME, _GAP = _Hole.NAME, _Hole.GAP

# Damaged output must not be withheld for ever, nor scanned again and again: a hole that grows past these is no marker.
_MAX_NAME_CHARS = 1024
_MAX_GAP_CHARS = 64

# While they wait in the buffer, special tokens are single characters that decoding UTF-8 can never yield.
_SYMBOLS = {END_THINK: "\ud800", DSML: "\ud801"}
_SPELLINGS = str.maketrans({symbol: name for name, symbol in _SYMBOLS.items()})


@dataclass(frozen=True, slots=True)
class _Marker:
    """A marker's pattern, literals and holes, and the parser's method that acts on it and takes its names."""

    pattern: tuple[str | _Hole, ...]
    act: Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Match:
    """How a pattern fits: ``end`` is where the text goes on, None where the text ends inside the pattern."""

    end: int | None
    names: list[str]


class OutputParser:
    """One state machine over characters: pieces in, events out, at any cut of the output into pieces.

    Thinking ends at ``</think>`` or at a block of calls; after that, ``</think>`` is content. A block begins with its
    opener and the first call's opener together: anything less is content. The two newlines before a block belong to
    it, others do not. Text where a block allows none is content as well: nothing is lost.
    A string argument arrives in fragments; any other value once it is complete: as it stands if it is JSON, else as a
    JSON string of what stands there. Special tokens that no marker needs are dropped.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: bool,
        spelled_markers: bool = False,
        new_call_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        """``thinking``: the prompt ended inside ``<think>``. Without ``tools`` a block of calls is plain content.

        ``spelled_markers``: markers are read from the text, for outputs that exist as text only.
        """
        self._new_call_id = new_call_id
        self._symbols = {name: name for name in _SYMBOLS} if spelled_markers else _SYMBOLS
        self._dsml = dsml = self._symbols[DSML]
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._buffer = ""  # what may still become a marker, and nothing else between two pushes
        self._events: list[Event] = []
        self._num_calls = 0
        self._num_arguments = 0  # of the open call
        self._json_value: list[str] | None = None  # a value that is no string, held until it is complete
        # A tag can begin here; everything else is passed over in one scan.
        self._starts = re.compile(f"[<\\s{self._symbols[END_THINK][0]}]")
        invoke = (f'<{dsml} invoke name="', _NAME, '">')
        block = [
            _Marker((f"\n\n<{dsml} calls>", _GAP, *invoke), self._start_call),
            _Marker((f"<{dsml} calls>", _GAP, *invoke), self._start_call),
        ]
        # A call that was not closed ends where the next one, or the end of the block, stands.
        between_calls = [
            _Marker((_GAP, *invoke), self._start_call),
            _Marker((_GAP, f"</{dsml} calls>"), self._end_calls),
        ]
        self._markers: dict[_State, list[_Marker]] = {
            _State.REASONING: [
                _Marker((self._symbols[END_THINK],), self._end_thinking),
                *(block if tools else []),
            ],
            _State.CONTENT: block if tools else [],
            _State.CALLS: between_calls,
            _State.ARGUMENTS: [
                _Marker((_GAP, f'<{dsml} parameter name="', _NAME, '" string="', _NAME, '">'), self._start_value),
                _Marker((_GAP, f"</{dsml} invoke>"), self._end_call),
                *between_calls,
            ],
            _State.VALUE: [_Marker((f"</{dsml} parameter>",), self._end_value)],
        }

    @property
    def thinking(self) -> bool:
        """Whether the output so far ends in reasoning."""
        return self._state is _State.REASONING

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        """Events of the next pieces, as many as they complete."""
        for piece in pieces:
            if not piece.special:
                self._buffer += piece.text
            elif piece.text == THINK:
                self._buffer += THINK  # no marker in an output, so it is shown
            else:
                self._buffer += self._symbols.get(piece.text, "")
        while self._advance():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """Events of what was held back: text, except for an unfinished tag inside a block of calls."""
        held, self._buffer = self._buffer, ""
        is_tag = self._state in (_State.CALLS, _State.ARGUMENTS) or (self._state is _State.VALUE and self._dsml in held)
        if not is_tag:
            self._emit_text(held)
        if self._json_value is not None:  # cut off, so it stays as unfinished as the object around it
            self._emit(ToolCallArguments(self._num_calls, "".join(self._json_value)))
            self._json_value = None
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self) -> bool:
        """Emit the text before the first marker and act on it; False once only what may become a marker is left."""
        text = self._buffer
        for start in (hit.start() for hit in self._starts.finditer(text)):
            for marker in self._markers[self._state]:
                match = _match(marker.pattern, text, start, self._dsml)
                if match is None:
                    continue
                self._emit_text(text[:start])
                self._buffer = text[start if match.end is None else match.end :]
                if match.end is None:
                    return False
                marker.act(*(name.translate(_SPELLINGS) for name in match.names))
                return True
        self._emit_text(text)
        self._buffer = ""
        return False

    def _emit_text(self, text: str) -> None:
        """Text that turned out to be no marker goes where the state says; symbols become their spelling again."""
        if not text:
            return
        text = text.translate(_SPELLINGS)
        if self._state is _State.REASONING:
            self._emit(ReasoningText(text))
        elif self._state is not _State.VALUE:
            self._emit(ContentText(text))
        elif self._json_value is None:
            self._emit(ToolCallArguments(self._num_calls, _json_string(text)[1:-1]))
        else:
            self._json_value.append(text)

    def _emit(self, event: Event) -> None:
        """Add an event, or lengthen the last one where both are text of the same kind."""
        last = self._events[-1] if self._events else None
        if isinstance(event, ReasoningText | ContentText | ToolCallArguments) and type(last) is type(event):
            self._events[-1] = replace(last, text=last.text + event.text)
        else:
            self._events.append(event)

    def _end_thinking(self) -> None:
        self._state = _State.CONTENT

    def _start_call(self, name: str) -> None:
        if self._state is _State.ARGUMENTS:
            self._end_call()
        self._emit(ToolCallStart(self._num_calls, self._new_call_id(), name))
        self._num_arguments = 0
        self._state = _State.ARGUMENTS

    def _start_value(self, key: str, is_string: str) -> None:
        opening = ", " if self._num_arguments else "{"
        quote = '"' if is_string == "true" else ""
        self._emit(ToolCallArguments(self._num_calls, f"{opening}{_json_string(key)}: {quote}"))
        self._json_value = None if is_string == "true" else []
        self._num_arguments += 1
        self._state = _State.VALUE

    def _end_value(self) -> None:
        if self._json_value is None:
            self._emit(ToolCallArguments(self._num_calls, '"'))
        else:
            text = "".join(self._json_value)
            self._emit(ToolCallArguments(self._num_calls, text if _is_json(text) else _json_string(text)))
            self._json_value = None
        self._state = _State.ARGUMENTS

    def _end_call(self) -> None:
        self._emit(ToolCallArguments(self._num_calls, "}" if self._num_arguments else "{}"))
        self._emit(ToolCallEnd(self._num_calls))
        self._num_calls += 1
        self._state = _State.CALLS

    def _end_calls(self) -> None:
        if self._state is _State.ARGUMENTS:
            self._end_call()
        self._state = _State.CONTENT


def _match(pattern: Sequence[str | _Hole], text: str, start: int, dsml: str) -> _Match | None:
    """Fit a pattern at ``start``; None where no continuation of ``text`` could make it fit.

    A verdict other than "the text ends here" never changes when more text arrives: results do not depend on the cuts.
    """
    at = start
    names: list[str] = []
    for part, behind in zip(pattern, (*pattern[1:], ""), strict=True):
        if part is _Hole.GAP:
            ahead = text[at : at + _MAX_GAP_CHARS + 1]
            gap = len(ahead) - len(ahead.lstrip())
            if gap > _MAX_GAP_CHARS:
                return None
            at += gap
        elif part is _Hole.NAME:
            assert isinstance(behind, str), "a name ends at a literal"
            longest = at + _MAX_NAME_CHARS + len(behind)
            end = text.find(behind, at, longest)
            name = text[at:longest] if end < 0 else text[at:end]
            if "\n" in name or dsml in name or (end < 0 and longest <= len(text)):
                return None
            if end < 0:
                return _Match(None, names)
            names.append(name)
            at = end
        elif text.startswith(part, at):
            at += len(part)
        elif len(text) - at < len(part) and part.startswith(text[at:]):
            return _Match(None, names)
        else:
            return None
    return _Match(at, names)


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether strict JSON: Python also reads NaN and Infinity, which a client's parser refuses."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


class StopMatcher:
    """Stop strings over an output's text, one token at a time.

    The stop whose last character comes first ends the output; of several that end there, the longest is cut off.
    Text is matched as spelled, special tokens and reasoning included; a special token is held and cut as a whole.
    ``matched`` is the stop that was found. ``num_tokens`` counts the tokens pushed: once a stop is found, the last of
    them completed it, and ids and usage end with it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which every text contains."""
        if "" in stops:
            raise ValueError("stop: an empty string is no stop string; leave it out")
        self._stops = tuple(stops)
        self._held: list[Piece] = []
        self.matched: str | None = None
        self.num_tokens = 0

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Take the pieces of one token (none, if it ends inside a character); return what is certainly no stop."""
        assert self.matched is None, "the output ended at the stop; later tokens are not part of it"
        self.num_tokens += 1
        held = [*self._held, *pieces]
        text = "".join(piece.text for piece in held)
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = []
            return _split(held, at)[0]
        free, self._held = _split(held, len(text) - _num_held_chars(text, self._stops))
        return free

    def finish(self) -> list[Piece]:
        """What was held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, []
        return held


def _num_held_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop begins with."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def _split(pieces: Sequence[Piece], num_chars: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces before and behind a place in their text; a special piece that it divides goes behind."""
    before: list[Piece] = []
    for index, piece in enumerate(pieces):
        if len(piece.text) <= num_chars:
            before.append(piece)
            num_chars -= len(piece.text)
            continue
        if num_chars and not piece.special:
            return [*before, Piece(piece.text[:num_chars])], [Piece(piece.text[num_chars:]), *pieces[index + 1 :]]
        return before, list(pieces[index:])
    return before, []
