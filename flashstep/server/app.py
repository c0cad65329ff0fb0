"""Routes and the layers around them. From outside in: status counts and the last net for exceptions, CORS, host
names, API keys, the limit on bodies, the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashstep.chat import ChatError, TokenizerError
from flashstep.params import InvalidSamplingParams
from flashstep.requests import EngineDead, QueueFull, RequestError
from flashstep.server.chat import chat_job, render
from flashstep.server.completions import completion_job, decode, encode
from flashstep.server.errors import ApiError, translate
from flashstep.server.generation import Generation, Job, check
from flashstep.server.interface import ServerSettings, Serving, ServingEngine
from flashstep.server.logprobs import token_label
from flashstep.server.metrics import Metrics
from flashstep.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)

log = logging.getLogger("flashstep.server")

PAGE = Path(__file__).with_name("page.html")
OPEN_PATHS = ("/", "/health")  # a probe and the page have no key; the page asks for one
_PAGE_POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
_FORESEEN = (
    ApiError,
    HTTPException,
    RequestError,
    ChatError,
    TokenizerError,
    InvalidSamplingParams,
    QueueFull,
    EngineDead,
)

B = TypeVar("B", bound=Body)


def create_app(engine: ServingEngine, settings: ServerSettings) -> Starlette:
    """The ASGI application in front of `engine`; `app.state.serving` is what it shares."""
    serving = Serving(engine, settings, Metrics(engine.stats))
    layers = [Middleware(_Edge, serving=serving)]
    if settings.cors_origins:
        layers.append(
            Middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if settings.allowed_hosts:
        layers.append(Middleware(_Hosts, names=settings.allowed_hosts))
    if settings.api_keys:
        layers.append(Middleware(_ApiKeys, keys=settings.api_keys))
    layers.append(Middleware(_BodyLimit, limit=settings.max_body_bytes))
    app = Starlette(
        routes=_ROUTES,
        middleware=layers,
        exception_handlers=dict.fromkeys(_FORESEEN, _refuse),
    )
    app.state.serving = serving
    return app


# -- routes ---------------------------------------------------------------------------------------------------------


async def _completions(request: Request) -> Response:
    return await _generate(request, CompletionBody, completion_job)


async def _chat_completions(request: Request) -> Response:
    return await _generate(request, ChatBody, chat_job)


async def _generate(request: Request, body_type: type[B], make_job: Callable[[B, Serving], Awaitable[Job]]) -> Response:
    serving: Serving = request.app.state.serving
    serving.check_available()
    job = await make_job(await _parse(request, body_type), serving)
    await check(serving.engine, job)
    return Generation(serving, job)


async def _models(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    return JSONResponse({"object": "list", "data": [_model(serving, name) for name in serving.model_names]})


async def _one_model(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    return JSONResponse(_model(serving, serving.model(request.path_params["name"])))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "flashstep",
        "root": serving.engine.model_name,
        "max_model_len": serving.engine.max_model_len,
    }


async def _health(request: Request) -> Response:
    state, why = request.app.state.serving.condition()
    return JSONResponse({"status": state, "reason": why or None}, 200 if state == "ok" else 503)


async def _metrics(request: Request) -> Response:
    return Response(request.app.state.serving.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _tokenize(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    tokenizer = serving.engine.tokenizer
    raw = await _read(request)
    # Two shapes under one path, as in vLLM: the one with a prompt is a text.
    body: TokenizeBody | TokenizeChatBody
    if _has_key(raw, "messages"):
        body = _validated(raw, TokenizeChatBody)
        tokens, _ = await asyncio.to_thread(render, body, tokenizer)
    else:
        body = _validated(raw, TokenizeBody)
        tokens = await asyncio.to_thread(encode, tokenizer, body.prompt, "prompt")
        if body.add_special_tokens:
            tokens = [tokenizer.bos_id, *tokens]
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": serving.engine.max_model_len,
            "tokens": tokens,
            "token_strs": [token_label(tokenizer, token) for token in tokens] if body.return_token_strs else None,
        }
    )


async def _detokenize(request: Request) -> Response:
    body = await _parse(request, DetokenizeBody)
    tokenizer = request.app.state.serving.engine.tokenizer
    return JSONResponse({"prompt": await asyncio.to_thread(decode, tokenizer, body.tokens, "tokens")})


async def _page(request: Request) -> Response:
    if not PAGE.exists():
        raise ApiError(404, "this build has no page; the API is under /v1, its state under /health", code="no_page")
    return FileResponse(PAGE, headers={"Content-Security-Policy": _PAGE_POLICY, "X-Frame-Options": "DENY"})


_ROUTES = [
    Route("/v1/completions", _completions, methods=["POST"]),
    Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
    Route("/v1/models", _models, methods=["GET"]),
    Route("/v1/models/{name:path}", _one_model, methods=["GET"]),
    Route("/health", _health, methods=["GET"]),
    Route("/metrics", _metrics, methods=["GET"]),
    Route("/tokenize", _tokenize, methods=["POST"]),
    Route("/detokenize", _detokenize, methods=["POST"]),
    Route("/", _page, methods=["GET"]),
]
_PATHS = {route.path for route in _ROUTES}


async def _parse(request: Request, body_type: type[B]) -> B:
    return _validated(await _read(request), body_type)


async def _read(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Also a protection: a page of another origin can send any other type without asking first.
        raise ApiError(415, f"content type {kind or 'missing'}, wanted application/json", code="not_json")
    raw = await request.body()
    if request.app.state.serving.settings.log_requests:
        log.info("%s %r", request.url.path, raw.decode(errors="replace"))  # quoted: one request, one line
    return raw


def _has_key(raw: bytes, key: str) -> bool:
    try:
        body = json.loads(raw)
    except ValueError:  # reading it by its model says what is wrong
        return False
    return isinstance(body, dict) and key in body


def _validated(raw: bytes, body_type: type[B]) -> B:
    try:
        return body_type.model_validate_json(raw)
    except ValueError as error:  # pydantic's own
        raise translate(error) from None


async def _refuse(request: Request, error: Exception) -> Response:
    return translate(error).response()


# -- layers ---------------------------------------------------------------------------------------------------------


class _Edge:
    """Counts statuses, and answers exceptions that nobody foresaw without showing them."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            refusal = translate(error)
            if status == 0:
                await refusal.response()(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self._serving.metrics.count_http(path, status or 499)


class _Hosts:
    """Refuses requests for other host names: a web page whose name was pointed at this address shall not use it."""

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
            if name not in self._names:
                refusal = ApiError(
                    403,
                    f"host {name!r} is not served here, only {', '.join(sorted(self._names))}; --allowed-host adds one",
                    code="host_not_allowed",
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _ApiKeys:
    """Lets requests with one of the keys pass. Every key is compared in full, whichever fits."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, token = given.partition(b" ")
            fits = [hmac.compare_digest(key, token.strip()) for key in self._keys]
            if scheme.lower() != b"bearer" or not any(fits):
                missing = "wrong" if given else "missing"
                refusal = ApiError(
                    401,
                    f"API key {missing}; send one of this server's keys as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BodyLimit:
    """413 for bodies over the limit, by their declared length or by what has come.

    Most clients read no answer before they have sent everything, and lose it if the connection is closed on them: a
    few times the limit is received and thrown away first.
    """

    PATIENCE = 4  # times the limit
    PATIENCE_S = 10

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", b"0")) > self._limit:  # the HTTP parser takes digits only
            if b"expect" not in headers:  # else the client waits for a word before it sends
                await self._drain(receive)
            await self._refusal().response()(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                if message.get("more_body"):
                    await self._drain(receive)
                raise self._refusal()
            return message

        await self._app(scope, limited, send)

    async def _drain(self, receive: Receive) -> None:
        received = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.PATIENCE_S):
                while received <= self.PATIENCE * self._limit:
                    message = await receive()
                    received += len(message.get("body", b""))
                    if not message.get("more_body"):  # the end, or the client has gone
                        return

    def _refusal(self) -> ApiError:
        # What the client may still send is not read, so the connection cannot be used again.
        return ApiError(
            413,
            f"the body is larger than {self._limit} bytes, the limit of this server",
            code="body_too_large",
            headers={"Connection": "close"},
        )
