"""The engine: many requests over the step. Requests in, deltas out; one call of `Engine.step` per model step.

Owns admission, the choice of rows for each step, preemption, the prefix cache's rules, and when a request ends
(judged token by token inside an accepted block). Knows no kernel and no thread: `AsyncEngine` turns its loop.

A step serves every decoding request first, each with its drafts; what is left of the token budget goes to prompts in
order of arrival, in chunks. When pages run out, the youngest running request gives its own back and waits; it keeps
its text and its drafts, so that it goes on as if nothing had happened.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashstep.chat import Piece, StopMatcher, StreamingDetokenizer
from flashstep.executor import Request, StepResult
from flashstep.grammar import Fallible, GrammarCompiler, MinTokens, both
from flashstep.loading import LoadedModel
from flashstep.pace import LEAST_ROWS, StepTimes
from flashstep.pages import OutOfPages, page_keys
from flashstep.requests import (
    Delta,
    EngineDead,
    EngineStats,
    FinishReason,
    GenerationRequest,
    QueueFull,
    RequestError,
    TokenLogprob,
    Usage,
)
from flashstep.settings import EngineConfig
from flashstep.stages.accept import reference as sampling

log = logging.getLogger("flashstep.engine")

OnDelta = Callable[[Delta], None]


@dataclass(eq=False)
class _Live:
    """A request inside the engine."""

    number: int  # by arrival
    asked: GenerationRequest
    request: Request
    on_delta: OnDelta
    constraint: Fallible | None
    max_tokens: int
    detokenizer: StreamingDetokenizer
    stops: StopMatcher
    usage: Usage
    arrived_s: float
    last_s: float = 0.0
    last_turn: int = -1  # of the engine, in which this request ran
    keys: list[bytes] = field(default_factory=list)  # of the complete pages of the text
    published: list[int] = field(default_factory=list)  # pages that this request made findable
    saved_pages: int = 0  # complete pages that are saved or were found
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def decoding(self) -> bool:
        """Whether only the last token waits to be computed."""
        return self.request.waiting == 1 and self.usage.steps > 0


class Engine:
    """Serves requests over one model; not thread-safe."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        """Allocate everything. Raises ValueError for settings that the model or the memory does not allow."""
        self.loaded = loaded
        self.config = config = config or EngineConfig()
        model = loaded.config
        block = model.dspark_block_size
        drafts = block if config.num_speculative_tokens is None else config.num_speculative_tokens
        limit = model.max_position_embeddings
        wanted = limit if config.max_model_len is None else config.max_model_len
        if wanted > limit:
            raise ValueError(f"max_model_len = {wanted}: expected at most {limit} (max_position_embeddings)")
        rows = loaded.usual_rows if config.max_num_batched_tokens is None else config.max_num_batched_tokens
        if rows <= drafts:
            raise ValueError(
                f"max_num_batched_tokens = {rows}: expected at least {drafts + 1}, the rows of one request with "
                f"{drafts} drafts"
            )
        # Kernels may take fewer rows at once than the setting allows; prompts then come in smaller chunks.
        self.max_rows = rows = rows if loaded.max_rows is None else min(rows, loaded.max_rows)
        ring_rows = rows if loaded.ring_rows is None else min(rows, loaded.ring_rows)
        state_type = loaded.state_type
        dtype = loaded.model.num.dtype
        page_bytes = state_type.page_bytes(
            model, config.page_tokens, keep_windows=config.enable_prefix_caching, dtype=dtype
        )
        slot_bytes = state_type.slot_bytes(model, config.page_tokens, ring_rows, dtype=dtype)
        num_pages = (config.kv_cache_memory - config.max_num_seqs * slot_bytes) // page_bytes
        if num_pages * config.page_tokens < 2:
            raise ValueError(
                f"kv_cache_memory = {config.kv_cache_memory:,} bytes: expected at least "
                f"{config.max_num_seqs * slot_bytes + page_bytes:,}: windows and open groups of {config.max_num_seqs} "
                f"requests (max_num_seqs) at {slot_bytes:,} each, and one page of {config.page_tokens} tokens"
            )
        if config.max_model_len is not None and num_pages * config.page_tokens < config.max_model_len:
            raise ValueError(
                f"kv_cache_memory = {config.kv_cache_memory:,} bytes hold {num_pages * config.page_tokens:,} tokens of "
                f"context: expected at least max_model_len = {config.max_model_len:,}; raise the one or lower the other"
            )
        # More pages than every slot can fill serve the prefix cache; far more would only cost memory.
        num_pages = min(num_pages, 2 * config.max_num_seqs * -(-wanted // config.page_tokens))
        self.max_model_len = min(wanted, num_pages * config.page_tokens)
        self.state = state_type(
            model,
            num_slots=config.max_num_seqs,
            num_pages=num_pages,
            page_tokens=config.page_tokens,
            rows_per_request=ring_rows,
            chunk_rows=rows,
            max_model_len=self.max_model_len,
            keep_windows=config.enable_prefix_caching,
            dtype=dtype,
            device=loaded.model.device,
        )
        self.core = loaded.step(
            self.state,
            num_speculative_tokens=drafts,
            rule=config.rule,
            synthetic_accepted=config.synthetic_accepted,
        )
        self._grammars = GrammarCompiler(loaded.tokenizer, model.vocab_size)
        self._numbers = itertools.count()
        self._waiting: list[_Live] = []  # in the order in which they will be taken in
        self._running: list[_Live] = []  # in order of arrival
        self._failure: str | None = None
        self._turned_s = time.monotonic()
        self._turns = 0
        self._finished: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._drafted, self._accepted = [0] * drafts, [0] * drafts
        self._step_s = 0.0
        self._times = StepTimes()

    def capacity(self) -> str:
        """How much fits, in words."""
        tokens = self.state.pool.num_pages * self.state.page_tokens
        return (
            f"{tokens:,} tokens of context in {self.state.pool.num_pages:,} pages of {self.state.page_tokens}: "
            f"{tokens / self.max_model_len:.1f} requests of {self.max_model_len:,} tokens (max_model_len), "
            f"{self.config.max_num_seqs} requests at once (max_num_seqs)"
        )

    # -- taking in and letting go ---------------------------------------------------------------------------------

    def check(self, asked: GenerationRequest) -> None:
        """Raise `RequestError` for what can never be served, `QueueFull` and `EngineDead` for what cannot be now."""
        vocab, limit = self.loaded.config.vocab_size, self.max_model_len
        if not asked.prompt:
            raise RequestError("prompt", "it has no tokens: give at least one (a begin token will do)")
        outside = [token for token in asked.prompt if not 0 <= token < vocab]
        if outside:
            raise RequestError("prompt", f"token id {outside[0]}: expected ids in 0..{vocab - 1}")
        if len(asked.prompt) >= limit:
            raise RequestError(
                "prompt", f"{len(asked.prompt)} tokens: expected fewer than {limit} (max_model_len); shorten it"
            )
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise RequestError("max_tokens", f"found {asked.max_tokens}, expected at least 1")
        if asked.max_tokens is not None and len(asked.prompt) + asked.max_tokens > limit:
            raise RequestError(
                "max_tokens",
                f"{asked.max_tokens} behind a prompt of {len(asked.prompt)} tokens: expected at most "
                f"{limit - len(asked.prompt)}, so that both fit in {limit} (max_model_len)",
            )
        most = limit - len(asked.prompt) if asked.max_tokens is None else asked.max_tokens
        if not 0 <= asked.min_tokens <= most:
            raise RequestError("min_tokens", f"found {asked.min_tokens}, expected 0..{most} (max_tokens)")
        banned = [token for token in (*asked.params.logit_bias, *asked.stop_token_ids) if not 0 <= token < vocab]
        if banned:
            raise RequestError("logit_bias, stop_token_ids", f"token id {banned[0]}: expected ids in 0..{vocab - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(asked, name)
            if count is not None and not 0 <= count <= vocab:
                raise RequestError(name, f"found {count}, expected 0..{vocab}")
        if "" in asked.stop:
            raise RequestError("stop", "an empty string is no stop string; leave it out")
        if asked.grammar is not None:
            self._grammars.check(asked.grammar)
        if self._failure is not None:
            raise EngineDead(self._failure)
        places = self.state.free_slots if self._can_start() else 0
        if len(self._waiting) >= self.config.max_queue + places:
            raise QueueFull(len(self._waiting), self._retry_after_s())

    def submit(self, asked: GenerationRequest, on_delta: OnDelta) -> int:
        """Queue a request and return its number; its deltas go to `on_delta` during later steps. Raises as `check`."""
        self.check(asked)
        number = next(self._numbers)
        seed = secrets.randbits(63) if asked.params.seed is None else asked.params.seed
        constraint = self._constraint(asked)
        request = Request(
            -1,
            list(asked.prompt),
            asked.params,
            seed,
            self.loaded.config.vocab_size,
            constraint,
            asked.prompt_logprobs is not None,
            asked.logprobs is not None,
        )
        drafts = self.core.num_speculative_tokens
        live = _Live(
            number,
            asked,
            request,
            on_delta,
            constraint,
            self.max_model_len - len(asked.prompt) if asked.max_tokens is None else asked.max_tokens,
            StreamingDetokenizer(self.loaded.tokenizer),
            StopMatcher(asked.stop),
            Usage(
                prompt_tokens=len(asked.prompt),
                drafted=[0] * drafts,
                accepted=[0] * drafts,
                synthetic=self.core.rule == "synthetic",
            ),
            time.monotonic(),
            prompt_logprobs=None if asked.prompt_logprobs is None else [None],
        )
        self._waiting.append(live)
        return number

    def abort(self, number: int, reason: str = "aborted") -> None:
        """End a request at once, wherever it is; unknown numbers (it may have ended) are ignored."""
        for live in (*self._running, *self._waiting):
            if live.number == number:
                self._end(live, [], [], "abort", error=reason)
                return

    def fail(self, reason: str) -> None:
        """Stop for good: every request ends with `reason`."""
        self._failure = reason
        for live in (*self._running, *self._waiting):
            self._end(live, [], [], "error", error=reason)

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._running or self._waiting)

    def stats(self) -> EngineStats:
        """State and counters."""
        pool = self.state.pool
        return EngineStats(
            ready=self._failure is None,
            failure=self._failure,
            last_step_age_s=time.monotonic() - self._turned_s,
            running=len(self._running),
            waiting=len(self._waiting),
            free_slots=self.state.free_slots,
            total_slots=self.config.max_num_seqs,
            free_pages=pool.available,
            total_pages=pool.num_pages,
            cached_pages=pool.cached,
            page_tokens=self.state.page_tokens,
            steps=self._turns,
            prompt_tokens=self._totals["prompt"],
            cached_tokens=self._totals["cached"],
            completion_tokens=self._totals["completion"],
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            preemptions=self._totals["preemptions"],
            finished=dict(self._finished),
            cache_queries=self._totals["cache_queries"],
            cache_hits=self._totals["cache_hits"],
            cache_misses=dict(self._misses),
            step_s_sum=self._step_s,
        )

    def run(self, asked: GenerationRequest) -> Iterator[Delta]:
        """Serve one request here and now, beside whatever else runs. Closing the iterator aborts the request."""
        deltas: list[Delta] = []
        number = self.submit(asked, deltas.append)
        try:
            while True:
                self.step()
                for delta in deltas:
                    yield delta
                    if delta.finish_reason is not None:
                        return
                deltas.clear()
        finally:
            self.abort(number)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one model step and hand out its deltas; False where there was nothing to run."""
        started = self._turned_s = time.monotonic()
        work = self._schedule()
        if not work:
            return False
        rows = sum(self._rows_of(live, limit) for live, limit in work)
        results = self.core([live.request for live, _ in work], [limit for _, limit in work])
        now = self._turned_s = time.monotonic()
        self._turns += 1
        self._step_s += now - started
        self._times.note(rows, now - started)
        for (live, _), result in zip(work, results, strict=True):
            live.last_turn = self._turns
            try:
                self._deliver(live, result, now)
            except Exception as error:  # a fault in one request's rows or text is not its neighbours'
                if not isinstance(error, sampling.SamplingError):
                    log.exception("request %d ended by a fault", live.number)
                # What led here may be in the caches already: nobody else shall start from them.
                self.state.pool.withdraw({*live.published, *self.state.pages(live.request.slot)})
                self._end(live, [], [], "error", error=f"the request cannot go on: {error}")
        return True

    def _schedule(self) -> list[tuple[_Live, int]]:
        """Who runs in this step, and how many of their waiting tokens. Takes pages, preempts and admits."""
        budget = self.max_rows
        work: list[tuple[_Live, int]] = []
        # Prompts advance beside any number of decoding requests, which then take turns.
        prompts = any(not live.decoding for live in self._running) or (self._waiting and self._can_start())
        kept = LEAST_ROWS if prompts and budget >= LEAST_ROWS + 1 + self.core.num_speculative_tokens else 0
        # Where the budget is too small for all, those that have waited longest come first.
        for live in sorted((live for live in self._running if live.decoding), key=lambda live: live.last_turn):
            rows = 1 + live.request.num_drafts
            if rows <= budget - kept and self._reserve(live, rows):
                work.append((live, 1))
                budget -= rows
        if work:
            if self._turns % self.config.prefill_schedule_interval:
                return self._still_running(work)
            decoding = self.max_rows - budget
            if math.isfinite(self.config.decode_slowdown):
                budget = min(budget, self._times.extra_rows(decoding, self.config.decode_slowdown))
        for live in [live for live in self._running if not live.decoding]:
            budget -= self._add_prompt(live, budget, work)
        while budget > 0 and self._waiting and self._can_start():
            live = self._waiting.pop(0)
            self._start(live)
            budget -= self._add_prompt(live, budget, work)
        return self._still_running(work)

    @staticmethod
    def _rows_of(live: _Live, limit: int) -> int:
        """Rows that `limit` waiting tokens of a request are in a step, drafts included."""
        return limit + (live.request.num_drafts if limit == live.request.waiting else 0)

    def _still_running(self, work: list[tuple[_Live, int]]) -> list[tuple[_Live, int]]:
        return [(live, limit) for live, limit in work if live.request.slot >= 0]  # some may have been preempted

    def _add_prompt(self, live: _Live, budget: int, work: list[tuple[_Live, int]]) -> int:
        """Add a chunk of a prompt to `work`; returns its rows."""
        request = live.request
        if request.slot < 0 or budget <= 0:
            return 0
        limit = min(request.waiting, budget)
        if self._rows_of(live, limit) > budget:  # a resumed request ends its prompt with its drafts
            limit = request.waiting - 1
        rows = self._rows_of(live, limit)
        if limit <= 0 or not self._reserve(live, rows):
            return 0
        work.append((live, limit))
        return rows

    def _reserve(self, live: _Live, rows: int) -> bool:
        """Pages for `rows` more rows, taken from younger requests if need be; False where `live` itself had to go."""
        request = live.request
        while request.slot >= 0:
            try:
                self.state.reserve(request.slot, request.computed + rows)
                return True
            except OutOfPages:
                self._preempt(self._running[-1])
        return False

    def _can_start(self) -> bool:
        """Whether the next waiting request can be taken in: a slot, and pages for all that it would compute."""
        if not self.state.free_slots:
            return False
        head = next(iter(self._waiting), None)  # read from other threads too, while this one takes requests in
        if head is None or not self._running:
            return True
        request = head.request
        rows = len(request.tokens) + request.num_drafts + 1
        return self.state.free_pages >= -(-rows // self.state.page_tokens)

    def _start(self, live: _Live) -> None:
        """Give a waiting request a slot, and what the prefix cache has of its text."""
        request = live.request
        request.slot = self.state.acquire()
        # Running requests stay in order of arrival: the last one is the youngest.
        self._running.append(live)
        self._running.sort(key=lambda each: each.number)
        if live.usage.preemptions == 0:
            live.usage.queue_s = time.monotonic() - live.arrived_s
        cached = self._attach_cached(live)
        if live.usage.preemptions == 0:
            live.usage.cached_tokens = cached
            self._totals["prompt"] += live.usage.prompt_tokens
            self._totals["cached"] += cached

    def _preempt(self, live: _Live) -> None:
        """Take slot and pages from a running request, which waits at its place in the order of arrival."""
        request = live.request
        self.state.release(request.slot)
        request.slot, request.computed = -1, 0
        live.saved_pages = 0
        if live.prompt_logprobs is not None and live.usage.steps == 0:
            live.prompt_logprobs = [None]  # the prompt will be computed from its start
        live.usage.preemptions += 1
        self._totals["preemptions"] += 1
        self._running.remove(live)
        self._waiting.insert(sum(other.number < live.number for other in self._waiting), live)

    # -- the prefix cache -----------------------------------------------------------------------------------------

    def _attach_cached(self, live: _Live) -> int:
        """Start `live` behind the pages that the cache has of its text; returns the tokens that they cover."""
        request = live.request
        self._totals["cache_queries"] += 1
        usable = (len(request.tokens) - 1) // self.state.page_tokens  # at least one token is left to compute
        if not self.config.enable_prefix_caching:
            miss = "disabled"
        elif live.prompt_logprobs is not None:
            miss = "prompt_logprobs"  # every row of the prompt has to be computed
        elif usable == 0:
            miss = "too_short"
        else:
            live.keys = page_keys(request.tokens, self.state.page_tokens, live.keys)
            pages = self.state.pool.find(live.keys[:usable])
            miss = "" if pages else "no_match"
        if miss:
            self._misses[miss] += 1
            return 0
        border = len(pages) * self.state.page_tokens
        back = min(border, self.loaded.config.engram_max_ngram_size - 1)
        tokens = torch.tensor(request.tokens[border - back : border], device=self.state.device)
        self.state.attach(request.slot, pages, self.loaded.model.token_map[tokens])
        request.computed = border
        live.saved_pages = len(pages)
        self._totals["cache_hits"] += 1
        return border

    def _publish(self, live: _Live) -> None:
        """Save and publish the pages that are complete and hold delivered text alone."""
        if not self.config.enable_prefix_caching:
            return
        request, size = live.request, self.state.page_tokens
        complete = min(request.computed, len(request.tokens)) // size
        if complete <= live.saved_pages:
            return
        live.keys = page_keys(request.tokens[: complete * size], size, live.keys)
        pages = self.state.pages(request.slot)
        for number in range(live.saved_pages, complete):
            if self.state.pool.publish(pages[number], live.keys[number]):
                self.state.save_windows(request.slot, number)
                live.published.append(pages[number])
        live.saved_pages = complete

    # -- delivering -----------------------------------------------------------------------------------------------

    def _deliver(self, live: _Live, result: StepResult, now: float) -> None:
        """Turn what a step brought into a delta; end the request where it ends."""
        if result.error is not None:
            raise result.error
        if result.prompt_logits is not None:
            self._note_prompt_logprobs(live, result.prompt_logits)
        if not result.tokens:
            self._publish(live)
            return
        usage = live.usage
        tokens: list[int] = []
        pieces: list[Piece] = []
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        for token in result.tokens:
            tokens.append(token)
            usage.completion_tokens += 1
            eos = token == self.loaded.config.eos_token_id and not live.asked.ignore_eos
            if eos or token in live.asked.stop_token_ids:
                reason, stop_reason = "stop", None if eos else token
            else:
                pieces += live.stops.push(live.detokenizer.push(token))
                if live.stops.matched is not None:
                    reason, stop_reason = "stop", live.stops.matched
                elif usage.completion_tokens == live.max_tokens:
                    reason = "length"
            if reason is not None:
                break
        # Drafts behind a cut were neither accepted nor rejected by what was delivered: they count nowhere.
        accepted = min(result.accepted, len(tokens))
        drafted = result.drafted if len(tokens) > result.accepted else len(tokens)
        self._count_step(live, len(tokens), accepted, drafted, now)
        if reason is not None:
            if live.stops.matched is None:
                pieces += live.stops.finish() + live.detokenizer.finish()
            # The rest of the block was never said: it must not be cached either.
            del live.request.tokens[len(live.request.tokens) - len(result.tokens) + len(tokens) :]
        self._publish(live)
        failure = None if live.constraint is None else live.constraint.failure
        # What stopped at a stop string or token of the user's is complete; the constraint may have seen more than it.
        if failure is not None and (reason is None or (reason == "stop" and stop_reason is None)):
            self._end(live, tokens, pieces, "error", error=f"the grammar cannot be followed: {failure}")
            return
        logprobs = self._logprobs(live, result.logits[: len(tokens)], tokens)
        if reason is not None:
            self._end(
                live,
                tokens,
                pieces,
                reason,
                stop_reason=stop_reason,
                logprobs=logprobs,
                accepted=accepted,
                drafted=drafted,
            )
            return
        live.on_delta(Delta(tokens, pieces, accepted, drafted, logprobs, self._take_prompt_logprobs(live)))

    def _count_step(self, live: _Live, delivered: int, accepted: int, drafted: int, now: float) -> None:
        usage = live.usage
        if usage.steps:
            usage.step_s.append(now - live.last_s)
            usage.decode_s += now - live.last_s
        else:
            usage.first_token_s = now - live.arrived_s
        live.last_s = now
        usage.steps += 1
        self._totals["completion"] += delivered
        for counts in (usage.drafted, self._drafted):
            for place in range(drafted):
                counts[place] += 1
        for counts in (usage.accepted, self._accepted):
            for place in range(accepted):
                counts[place] += 1

    def _end(
        self,
        live: _Live,
        tokens: list[int],
        pieces: list[Piece],
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
        logprobs: list[TokenLogprob] | None = None,
        accepted: int = 0,
        drafted: int = 0,
    ) -> None:
        """Free everything a request holds and hand out its last delta."""
        if live.request.slot >= 0:
            self.state.release(live.request.slot)
            live.request.slot = -1
            self._running.remove(live)
        else:
            self._waiting.remove(live)
        self._finished[reason] += 1
        live.on_delta(
            Delta(
                tokens,
                pieces,
                accepted,
                drafted,
                logprobs,
                self._take_prompt_logprobs(live),
                reason,
                stop_reason,
                error,
                live.usage,
            )
        )

    # -- log-probabilities and constraints ------------------------------------------------------------------------

    def _logprobs(self, live: _Live, logits: Tensor, tokens: list[int]) -> list[TokenLogprob] | None:
        if live.asked.logprobs is None:
            return None
        return _token_logprobs(logits, tokens, live.asked.logprobs)

    def _note_prompt_logprobs(self, live: _Live, logits: Tensor) -> None:
        """Rows of the prompt predict the token behind each of them; the first token of all is predicted by none."""
        assert live.prompt_logprobs is not None
        assert live.asked.prompt_logprobs is not None
        done = len(live.prompt_logprobs)
        tokens = list(live.asked.prompt[done : done + len(logits)])
        live.prompt_logprobs += _token_logprobs(logits[: len(tokens)], tokens, live.asked.prompt_logprobs)

    def _take_prompt_logprobs(self, live: _Live) -> list[TokenLogprob | None] | None:
        return live.prompt_logprobs if live.usage.steps <= 1 else None

    def _constraint(self, asked: GenerationRequest) -> Fallible | None:
        grammar = None if asked.grammar is None else self._grammars.constraint(asked.grammar)
        if asked.min_tokens == 0:
            return grammar
        ends = {self.loaded.config.eos_token_id, *asked.stop_token_ids}
        least = MinTokens(ends, self.loaded.config.vocab_size, asked.min_tokens)
        return least if grammar is None else both(grammar, least)

    def _retry_after_s(self) -> float:
        """A guess at when a place in the queue is free: the mean time that an answer takes from a slot."""
        answers = max(1, sum(self._finished.values()))
        return max(1.0, self._step_s / answers)


def _token_logprobs(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    found = sampling.token_logprobs(logits, torch.tensor(tokens, dtype=torch.int64), top=top)
    rows = zip(tokens, found.token.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [TokenLogprob(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in rows]
