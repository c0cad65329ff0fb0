"""Every refusal in OpenAI's shape, and the one place where exceptions become statuses.

400 names the parameter at fault; 401 a key; 404 an unknown model or route; 413 a body over the limit; 415 a body that
is not declared to be JSON; 429 a full queue; 500 a fault of ours; 503 an engine that cannot serve now; 504 the
deadline. 422 is not used: OpenAI answers 400 where a body is well-formed and wrong.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from flashstep.chat import ChatError, TokenizerError
from flashstep.params import InvalidSamplingParams
from flashstep.requests import EngineDead, QueueFull, RequestError

log = logging.getLogger("flashstep.server")

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told: status, message, the parameter at fault and a code that programs can compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad_request(param: str | None, problem: str, *, code: str | None = None) -> ApiError:
    """400 with the parameter in the message and in its own field."""
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param, code=code)


def unavailable(reason: str, code: str) -> ApiError:
    """503: the same request may succeed a little later."""
    return ApiError(503, reason, code=code, headers={"Retry-After": "5"})


def translate(error: Exception) -> ApiError:
    """What the client is told about an exception; one that we did not foresee is logged and stays in the log."""
    match error:
        case ApiError():
            return error
        case RequestError() | ChatError():
            return ApiError(400, str(error), param=error.param)
        case InvalidSamplingParams():
            return ApiError(400, "; ".join(error.problems), param=error.problems[0].partition(":")[0])
        case ValidationError():
            return _from_validation(error)
        case TokenizerError():
            return ApiError(400, str(error), code="chat_not_supported")
        case QueueFull():
            wait = str(max(1, math.ceil(error.retry_after_s)))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": wait})
        case EngineDead():
            return unavailable(str(error), "engine_unavailable")
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", code="request_timeout")
        case HTTPException():
            return _from_http(error)
    # The frames, without the exception's message: that may quote what a user sent.
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s in a request\n%s", type(error).__name__, frames)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _from_http(error: HTTPException) -> ApiError:
    """The router's own: unknown routes and methods."""
    messages = {
        404: "no such route; GET /v1/models lists what is served under /v1/completions and /v1/chat/completions",
        405: "this route does not take this method",
    }
    message = messages.get(error.status_code, HTTPStatus(error.status_code).phrase)
    return ApiError(error.status_code, message, headers=error.headers)


def _from_validation(error: ValidationError) -> ApiError:
    """All problems of a body in one message; `param` is the first. The values found are not repeated."""
    problems: dict[str, list[str]] = {}
    for one in error.errors(include_input=False, include_url=False, include_context=False):
        if one["type"] == "json_invalid":
            return ApiError(400, f"the body is not JSON: {one['msg']}", code="invalid_json")
        problems.setdefault(_path(one["loc"]), []).append(one["msg"].removeprefix("Value error, "))
    message = "; ".join(f"{path}: {' or '.join(dict.fromkeys(texts))}" for path, texts in problems.items())
    return ApiError(400, message, param=next(iter(problems)) or None)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location, without the names that it gives to a union's branches."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or "body"
