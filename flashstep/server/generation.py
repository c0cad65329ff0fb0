"""Runs the engine requests behind one HTTP request: deltas of all choices, deadline, a client that leaves, SSE.

Streamed or not, a `Job` sees the same deltas in the same order, so both answers hold the same numbers. Status and
headers are sent with the first delta: until then a refusal, a failure or the deadline still gets a status of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from flashstep.requests import Delta, GenerationRequest, RequestError
from flashstep.server.errors import ApiError, bad_request, translate, unavailable
from flashstep.server.interface import Serving, ServingEngine

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that hold events back would undo the point of streaming
]
_DONE = b"data: [DONE]\n\n"


class Job(Protocol):
    """One answer in the making: takes deltas, gives a stream's chunks, and the whole at the end."""

    stream: bool
    include_usage: bool

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """One for each choice."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """The engine's names of a request's fields -> the client's, where they differ."""

    def push(self, index: int, delta: Delta) -> dict[str, Any]:
        """Take a delta of choice `index`; the chunk that a stream sends for it."""

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, with the usage."""

    def result(self) -> dict[str, Any]:
        """The answer that is not streamed."""


async def check(engine: ServingEngine, job: Job) -> None:
    """Raise what the engine has against a job, under the names that the client knows, before anything is sent."""
    try:
        if job.requests[0].grammar is not None:
            await asyncio.to_thread(engine.check, job.requests[0])  # compiles it, which may take a while
        for request in job.requests:
            engine.check(request)
    except RequestError as error:
        problem = str(error).removeprefix(f"{error.param}: ")
        raise bad_request(job.field_names.get(error.param, error.param), problem) from error


class Generation(Response):
    """The response of a job. Sending it runs the job; when the client has gone, the job is cancelled."""

    def __init__(self, serving: Serving, job: Job) -> None:
        """`job` has been checked."""
        super().__init__()
        self._serving, self._job = serving, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send what it gives, until it is complete or nobody listens."""
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._run(scope, receive, send))
            watch = group.create_task(_cancel_when_gone(receive, work))
            work.add_done_callback(lambda _: watch.cancel())

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, streams = self._job, False
        try:
            async with (
                asyncio.timeout(self._serving.settings.request_timeout_s),
                aclosing(_deltas(self._serving.engine, job.requests)) as deltas,
            ):
                async for index, delta in deltas:
                    if delta.usage is not None:
                        self._serving.metrics.observe(delta.usage)
                    self._raise_for(delta)
                    chunk = job.push(index, delta)
                    if job.stream:
                        if not streams:
                            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                            streams = True
                        await send(_body(_event(chunk)))
                if job.stream and job.include_usage:
                    await send(_body(_event(job.usage_chunk())))
            if job.stream:
                await send(_body(_DONE, last=True))
            else:
                await JSONResponse(job.result())(scope, receive, send)
        except Exception as error:
            refusal = translate(error)
            if streams:
                await send(_body(_event(refusal.body()) + _DONE, last=True))
            else:
                await refusal.response()(scope, receive, send)

    def _raise_for(self, delta: Delta) -> None:
        """Raise where a request ended unfinished: 500 if it alone failed, 503 if the engine did or was stopped."""
        if delta.finish_reason not in ("error", "abort"):
            return
        reason = delta.error or "the engine could not finish the request"
        state, _ = self._serving.condition()
        if state in ("failed", "stopping"):
            raise unavailable(reason, f"engine_{state}")
        raise ApiError(500, reason, code="engine_error")


async def _deltas(
    engine: ServingEngine, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all requests as they come, each with the index of its request. Closing it ends them all."""
    arrived: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, deltas: AsyncIterator[Delta]) -> None:
        try:
            async for delta in deltas:
                arrived.put_nowait((index, delta))
            arrived.put_nowait(None)
        except Exception as error:  # handed to whoever reads, and raised there
            arrived.put_nowait(error)
        finally:
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()

    pumps = [asyncio.create_task(pump(index, engine.generate(request))) for index, request in enumerate(requests)]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _cancel_when_gone(receive: Receive, work: asyncio.Task[None]) -> None:
    """Cancel `work` when the client has closed its connection; the body has been read by now."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _body(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}
