"""What the server asks of an engine and what it was told at start; everything that its rooms share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from flashstep.chat import Tokenizer
from flashstep.requests import Delta, EngineStats, GenerationRequest
from flashstep.server.errors import ApiError, unavailable
from flashstep.server.metrics import Metrics

MIB = 1 << 20


class ServingEngine(Protocol):
    """The part of `flashstep.async_engine.AsyncEngine` that serving needs."""

    tokenizer: Tokenizer
    model_name: str
    vocab_size: int

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError, QueueFull or EngineDead where `request` cannot be taken."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas up to one with a finish_reason; closing or cancelling ends the request."""

    def stats(self) -> EngineStats:
        """State and counters."""

    async def shutdown(self, grace_s: float) -> None:
        """Finish or cut off what runs, then stop."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `flashstep serve` was asked for. Every default is the safe one."""

    served_model_names: tuple[str, ...] = ()  # none: the engine's own
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names under which requests may come; none: any name
    max_body_bytes: int = 16 * MIB
    request_timeout_s: float | None = None
    step_deadline_s: float = 60.0  # a step that takes longer is stuck
    log_requests: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            problems.append(f"request timeout {self.request_timeout_s}: expected more than 0 seconds")
        if not self.step_deadline_s > 0:
            problems.append(f"step deadline {self.step_deadline_s}: expected more than 0 seconds")
        if any(not key.strip() for key in self.api_keys):
            problems.append("an API key is empty")
        if problems:
            raise ValueError("server settings: " + "; ".join(problems))


@dataclass
class Serving:
    """The engine, the settings and what changes while the server runs."""

    engine: ServingEngine
    settings: ServerSettings
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False  # set when the process was told to end

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; answers carry the one that was asked for."""
        return self.settings.served_model_names or (self.engine.model_name,)

    def condition(self) -> tuple[str, str]:
        """`ok`, `starting`, `stuck`, `failed` or `stopping`, and why."""
        stats = self.engine.stats()
        if self.closing:
            return "stopping", "the server is shutting down"
        if stats.failure is not None:
            return "failed", stats.failure
        if not stats.ready:
            return "starting", "the model is still loading; try again in a moment"
        if stats.running and stats.last_step_age_s > self.settings.step_deadline_s:
            return "stuck", (
                f"{stats.running} requests are running and no step has ended for {stats.last_step_age_s:.0f} s "
                f"(the deadline is {self.settings.step_deadline_s:.0f} s)"
            )
        return "ok", ""

    def check_available(self) -> None:
        """Raise 503 unless the engine can serve."""
        state, why = self.condition()
        if state != "ok":
            raise unavailable(why, f"engine_{state}")

    def model(self, asked: str | None) -> str:
        """The name that the answer carries. Raises 404 for a model that is not served."""
        names = self.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked!r} is not served here; served: {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return asked
