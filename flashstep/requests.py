"""What passes between the engine and whoever asks it for text: requests, deltas, figures, errors.

Plain records without a tensor in them, so that the server imports no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashstep.chat import Piece
from flashstep.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]


class RequestError(ValueError):
    """A request that cannot be served; raised before any work. `param` is the field at fault."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


class QueueFull(RuntimeError):  # noqa: N818 - a state of the engine, not a fault
    """More requests wait than the engine was told to hold; try again after `retry_after_s`."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting, as many as max_queue allows")
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):  # noqa: N818
    """The engine has failed or was shut down; the message says why."""


@dataclass(frozen=True)
class Grammar:
    """What the output must match, character by character. `text` is the schema (JSON), pattern or Lark grammar."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request for text. Token ids in, token ids and text out."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0  # EOS and stop token ids are held back until there are so many
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside each token's own; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    grammar: Grammar | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token by the model's raw logits, and of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


@dataclass
class Usage:
    """Figures of one request, complete when it has ended; they count delivered tokens. Times are in seconds.

    Drafts are counted by place in the block: `drafted[i]` were verified there and `accepted[i]` of them stood.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    completion_tokens: int = 0
    steps: int = 0  # steps that brought tokens
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    preemptions: int = 0
    synthetic: bool = False  # acceptance was made up: figures are for timing, the text is worthless
    queue_s: float = 0.0  # from arrival to the first step
    first_token_s: float = 0.0  # from arrival to the first token
    decode_s: float = 0.0  # from the first token to the last
    step_s: list[float] = field(default_factory=list)  # between consecutive deltas

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decoding step (the first token, which a prompt brings, aside)."""
        return (self.completion_tokens - 1) / (self.steps - 1) if self.steps > 1 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens after the first, over the time they took."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Delta:
    """What one step delivers: token ids, the text that they complete, and the end where there is one.

    `pieces` never hold half a character, nor text that may still become a stop string. The last delta of a request
    has a `finish_reason`; `error` says what went wrong where that is "error" or "abort".
    """

    tokens: list[int]
    pieces: list[Piece]
    accepted: int = 0  # how many of `tokens` were drafts
    drafted: int = 0
    logprobs: list[TokenLogprob] | None = None  # one per token, where asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # in the first delta, where asked for; None for token 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the request
    error: str | None = None
    usage: Usage | None = None  # in the last delta

    @property
    def text(self) -> str:
        """The text of the pieces, special tokens left out."""
        return "".join(piece.text for piece in self.pieces if not piece.special)


@dataclass(frozen=True)
class EngineStats:
    """A reading of the engine's state and of its counters since the start."""

    ready: bool  # loaded, and neither failed nor closing
    failure: str | None  # why the engine stopped, if it has
    last_step_age_s: float  # since the loop last turned; grows while it is stuck
    running: int
    waiting: int
    free_slots: int
    total_slots: int
    free_pages: int  # cached pages that nobody uses are free: they are taken when needed
    total_pages: int
    cached_pages: int
    page_tokens: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted: tuple[int, ...]  # by place in the block
    accepted: tuple[int, ...]
    preemptions: int
    finished: dict[str, int]  # requests by finish reason
    cache_queries: int
    cache_hits: int
    cache_misses: dict[str, int]  # by reason: "no_match", "too_short", "prompt_logprobs", "disabled"
    step_s_sum: float
