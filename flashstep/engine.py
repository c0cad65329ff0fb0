"""Requests in, tokens and text out: one request at a time over the step, with its stopping rules and figures.

Owns when a request ends (EOS, stop string, token limit, end of context), judged token by token inside an accepted
block, and what is counted. Knows no kernel.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flashstep.chat import Piece, StopMatcher, StreamingDetokenizer
from flashstep.executor import Request, Step
from flashstep.loading import LoadedModel
from flashstep.params import SamplingParams
from flashstep.settings import Rule
from flashstep.state import State

FinishReason = Literal["stop", "length"]


class PromptError(ValueError):
    """A prompt that cannot be served; raised before any work."""


@dataclass
class Stats:
    """Figures of one request. Times are seconds of a monotonic clock, drafts are counted by place in the block."""

    prompt_tokens: int
    drafted: list[int]  # drafts that were verified at each place
    accepted: list[int]  # of these, how many stood
    completion_tokens: int = 0
    steps: int = 0  # steps that brought tokens, the first token's included
    synthetic: bool = False
    first_token_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last
    step_s: list[float] = field(default_factory=list)  # of every step after the first token

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decoding step (the first token, which a prompt brings, aside)."""
        return sum(self.accepted) / (self.steps - 1) + 1 if self.steps > 1 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens after the first, over the time they took."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Delta:
    """What one step delivers: token ids, the text they complete, and the reason where the request ends."""

    tokens: list[int]
    pieces: list[Piece]
    accepted: int  # how many of `tokens` were drafts
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        """The text of the pieces, special tokens left out."""
        return "".join(piece.text for piece in self.pieces if not piece.special)


class Engine:
    """Generates for one request at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_speculative_tokens: int | None = None,
        rule: Rule = "standard",
        synthetic_accepted: float | None = None,
        max_model_len: int | None = None,
        rows_per_request: int = 512,
    ) -> None:
        """`num_speculative_tokens` None is the block size; `max_model_len` None is the model's own limit.

        Raises ValueError for values outside what the model was trained for.
        """
        config = loaded.config
        block = config.dspark_block_size
        limit = config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= limit:
            raise ValueError(f"max_model_len = {max_model_len}: expected 2..{limit} (max_position_embeddings)")
        self.loaded = loaded
        page_tokens = 128
        self.state = State(
            config,
            num_pages=-(-self.max_model_len // page_tokens),
            page_tokens=page_tokens,
            rows_per_request=rows_per_request,
            dtype=loaded.model.num.dtype,
            device=loaded.model.device,
        )
        self.step = Step(
            loaded.model,
            loaded.draft,
            self.state,
            num_speculative_tokens=block if num_speculative_tokens is None else num_speculative_tokens,
            rule=rule,
            synthetic_accepted=synthetic_accepted,
        )

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> tuple[Stats, Iterator[Delta]]:
        """Figures that fill up as the returned iterator, which yields one `Delta` per step, is consumed.

        The request ends at EOS (kept in ids and counts, not in the text), at a stop string (the token that completes
        it is the last one), or after `max_tokens`. Raises `PromptError` before any work, `SamplingError` where the
        model's logits are not finite.
        """
        vocab, limit = self.loaded.config.vocab_size, self.max_model_len
        if not prompt:
            raise PromptError("the prompt has no tokens: give at least one (a begin token will do)")
        outside = [token for token in prompt if not 0 <= token < vocab]
        if outside:
            raise PromptError(f"prompt token {outside[0]}: expected ids in 0..{vocab - 1}")
        if len(prompt) >= limit:
            raise PromptError(f"the prompt has {len(prompt)} tokens: expected fewer than max_model_len = {limit}")
        if max_tokens < 1:
            raise PromptError(f"max_tokens = {max_tokens}: expected at least 1")
        drafts = self.step.num_speculative_tokens
        stats = Stats(len(prompt), [0] * drafts, [0] * drafts, synthetic=self.step.rule == "synthetic")
        max_tokens = min(max_tokens, limit - len(prompt))
        return stats, self._deltas(list(prompt), params, max_tokens, stop, ignore_eos, stats)

    def _deltas(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        stop: Sequence[str],
        ignore_eos: bool,
        stats: Stats,
    ) -> Iterator[Delta]:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        detokenizer, stops = StreamingDetokenizer(self.loaded.tokenizer), StopMatcher(stop)
        slot = self.state.acquire()
        request = Request(slot, prompt, params, seed, self.loaded.config.vocab_size)
        started = last = time.perf_counter()
        try:
            while True:
                result = self.step([request])[0]
                if result.error is not None:
                    raise result.error
                if not result.tokens:
                    continue
                now = time.perf_counter()
                if stats.steps:
                    stats.step_s.append(now - last)
                    stats.decode_s += now - last
                else:
                    stats.first_token_s = now - started
                last = now
                stats.steps += 1
                for place in range(result.drafted):
                    stats.drafted[place] += 1
                    stats.accepted[place] += place < result.accepted
                tokens: list[int] = []
                pieces: list[Piece] = []
                reason: FinishReason | None = None
                for token in result.tokens:
                    tokens.append(token)
                    stats.completion_tokens += 1
                    if token == self.loaded.config.eos_token_id and not ignore_eos:
                        pieces += stops.push(detokenizer.finish())
                        reason = "stop"
                    else:
                        pieces += stops.push(detokenizer.push(token))
                        if stops.matched is not None:
                            reason = "stop"
                        elif stats.completion_tokens == max_tokens:
                            pieces += stops.push(detokenizer.finish())
                            reason = "length"
                    if reason:
                        pieces += stops.finish()
                        break
                yield Delta(tokens, pieces, min(result.accepted, len(tokens)), reason)
                if reason:
                    return
        finally:
            self.state.release(slot)
