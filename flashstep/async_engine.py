"""The engine on a thread of its own, behind an asyncio face.

Owns the loop that turns the engine, the hand-over between threads, loading in the background, and shutdown. The
engine itself is only ever touched by its thread; other threads leave notes in an inbox that is emptied between steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from flashstep.chat import Tokenizer
from flashstep.config import ModelConfig
from flashstep.engine import Engine
from flashstep.loading import BUNDLED_MODEL, LoadedModel
from flashstep.loading import load as load_reference
from flashstep.ranks.launch import Ranks
from flashstep.requests import Delta, EngineDead, EngineStats, GenerationRequest
from flashstep.settings import EngineConfig

log = logging.getLogger("flashstep.engine")

_STARTING = EngineStats(
    ready=False,
    failure=None,
    last_step_age_s=0.0,
    running=0,
    waiting=0,
    free_slots=0,
    total_slots=0,
    free_pages=0,
    total_pages=0,
    cached_pages=0,
    page_tokens=0,
    steps=0,
    prompt_tokens=0,
    cached_tokens=0,
    completion_tokens=0,
    drafted=(),
    accepted=(),
    preemptions=0,
    finished={},
    cache_queries=0,
    cache_hits=0,
    cache_misses={},
    step_s_sum=0.0,
)


def start(
    path: Path | None,
    config: EngineConfig,
    *,
    load: Callable[[], LoadedModel] | None = None,
    model_name: str | None = None,
    ranks: Ranks | None = None,
) -> AsyncEngine:
    """An engine for the model directory `path` (None: the bundled model), which loads in the background.

    Configuration and tokenizer are read at once, so that what is wrong with them is raised here. load: how the model
    gets onto its device (None: for the reference on the CPU). With `ranks` the engine runs over all of them, and ends
    when they fail.
    """
    path = BUNDLED_MODEL if path is None else path
    model = ModelConfig.from_file(path)
    tokenizer = Tokenizer.load(path)
    name = model_name or ("flashstep-tiny" if path == BUNDLED_MODEL else path.resolve().name)

    def build() -> Engine:
        if ranks is not None:
            return ranks.engine(config)
        return Engine(load() if load is not None else load_reference(path), config)

    engine = AsyncEngine(build, tokenizer, model, name, config)
    if ranks is not None:
        ranks.on_failure(engine.fail)
    return engine


class AsyncEngine:
    """Serves requests from any number of tasks of one event loop."""

    def __init__(
        self,
        build: Callable[[], Engine],
        tokenizer: Tokenizer,
        model: ModelConfig,
        model_name: str,
        config: EngineConfig,
    ) -> None:
        """Start the thread, which calls `build` first."""
        self.tokenizer, self.model_name = tokenizer, model_name
        self.vocab_size = model.vocab_size
        limit = model.max_position_embeddings
        self._asked_len = limit if config.max_model_len is None else min(limit, config.max_model_len)
        self._build = build
        self._engine: Engine | None = None
        self._failure: str | None = None
        self._build_error: BaseException | None = None
        self._on_build_error: list[Callable[[BaseException], None]] = []
        self._closing: float | None = None  # when requests that still run are cut off
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="flashstep-engine", daemon=True)
        self._thread.start()

    # -- asked from the event loop --------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._asked_len if self._engine is None else self._engine.max_model_len

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestError`, `QueueFull` or `EngineDead` where `request` cannot be taken."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        if self._closing is not None:
            raise EngineDead("the server is shutting down")
        if self._engine is None:
            raise EngineDead("the model is still loading; try again in a moment")
        self._engine.check(request)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one request, until one has a `finish_reason`. Raises as `check`.

        Closing the iterator, or cancelling the task that waits for it, ends the request within a step.
        """
        self.check(request)
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        number: list[int] = []
        gone = False

        def hand_over(delta: Delta | Exception) -> None:
            # The event loop may have ended while the engine was in a step.
            if not loop.is_closed():
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        def submit(engine: Engine) -> None:
            if gone:
                return
            try:
                number.append(engine.submit(request, hand_over))
            except Exception as error:  # it is this request's answer, whatever it is
                hand_over(error)

        self._post(submit)
        try:
            while True:
                delta = await deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            gone = True
            self._post(lambda engine: engine.abort(number[0], "the client has left") if number else None)

    def stats(self) -> EngineStats:
        """State and counters; readable at any time, also while a step runs."""
        if self._engine is None:
            return replace(_STARTING, failure=self._failure)
        found = self._engine.stats()
        failure = self._failure or found.failure
        idle = found.running + found.waiting == 0
        return replace(
            found,
            failure=failure,
            ready=failure is None and self._closing is None,
            last_step_age_s=0.0 if idle else found.last_step_age_s,
        )

    def on_build_error(self, call: Callable[[BaseException], None]) -> None:
        """Have `call` called where the engine cannot be built, from its thread; at once where that is known already."""
        with self._wake:
            self._on_build_error.append(call)
            error = self._build_error
        if error is not None:
            call(error)

    def fail(self, error: Exception) -> None:
        """End every request with `error`, and take no more; from any thread, for what the engine cannot notice."""

        def note(engine: Engine) -> None:
            if not self._stopped.is_set() and self._failure is None:  # else it has ended by itself already
                raise error

        self._post(note)

    async def shutdown(self, grace_s: float) -> None:
        """Take no more requests, let those that run finish for `grace_s` seconds, cut off the rest, stop the loop."""
        with self._wake:
            self._closing = time.monotonic() + grace_s
            self._wake.notify()
        if self._engine is None:  # still loading: nobody has been served, and the thread ends with the process
            return
        # The thread may be in a long step or still loading: it cannot be interrupted, only waited for.
        await asyncio.to_thread(self._stopped.wait, grace_s + 30)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _post(self, note: Callable[[Engine], None]) -> None:
        with self._wake:
            self._inbox.append(note)
            self._wake.notify()
            if self._stopped.is_set():  # nobody else will read it
                self._refuse_rest()

    def _loop(self) -> None:
        try:
            engine = self._build()
            self._engine = engine
            log.info("ready: %s", engine.capacity())
            while self._turn(engine):
                pass
        except BaseException as error:  # whatever it was (a panic of an extension, too), nobody may wait for ever
            usual = self._engine is None and isinstance(error, (ValueError, OSError))  # what a user can cause
            log.error("the engine has failed: %s", error, exc_info=None if usual else error)
            self._failure = f"the engine has failed: {type(error).__name__}: {error}"
            if self._engine is not None:
                self._engine.fail(self._failure)
                return
            with self._wake:
                self._build_error = error
                waiting = list(self._on_build_error)
            for call in waiting:
                call(error)
        finally:
            with self._wake:
                self._stopped.set()
                self._refuse_rest()

    def _turn(self, engine: Engine) -> bool:
        """Read the inbox, run one step; False when the loop is to end."""
        with self._wake:
            while not self._inbox and not engine.busy and self._closing is None:
                self._wake.wait()
        while self._inbox:
            self._inbox.popleft()(engine)
        if self._closing is not None and (not engine.busy or time.monotonic() >= self._closing):
            engine.fail("the server is shutting down")
            return False
        engine.step()
        return True

    def _refuse_rest(self) -> None:
        """Answer requests that are in the inbox or still come: the engine refuses them with the reason."""
        if self._engine is None:
            return
        while self._inbox:
            self._inbox.popleft()(self._engine)
