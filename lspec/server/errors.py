"""Errors as a client sees them: a status, and OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from lspec.arguments import as_options
from lspec.errors import ContextOverflowError, LspecError, RequestError
from lspec.server.wire import Json, json_response

_LONGEST = 1000  # characters of a message, which may repeat what was sent

log = logging.getLogger("lspec.server")


class ApiError(HTTPException):
    """A refusal or a failure; `param` is the field of the request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        told = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        super().__init__(status, told, dict(headers or {}))
        self.param = param
        self.code = code

    @property
    def body(self) -> Json:
        """The error object."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """Return the reply that says so."""
        return json_response(self.body, self.status_code, self.headers)


def unsupported(param: str, message: str) -> ApiError:
    """Return the refusal of a field, or of its value."""
    return ApiError(400, f"{param}: {message}", param=param)


def shutting_down() -> ApiError:
    """Return what a client hears whose request is not finished when the server stops."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def explain(error: Exception) -> ApiError:
    """Return what a client may know of `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflowError | RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextOverflowError) else None
        hint = f". {as_options(error.hint)}" if error.hint else ""
        return ApiError(400, f"{error}{hint}", code=code)
    if isinstance(error, LspecError):
        log.error("%s", error)
        return ApiError(500, str(error))
    return ApiError(500, "the server failed; its log says why")


def install(app: FastAPI, paths: Iterable[str]) -> None:
    """Make every error of `app` leave in OpenAI's shape; an unknown address names `paths`."""

    async def reply(request: Request, error: Exception) -> Response:
        return explain(error).response()

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if isinstance(error, ApiError):
            return error.response()
        what = f"{error.detail}: {request.method} {request.url.path}"
        if error.status_code == 404:
            what += f"; there are {', '.join(paths)}"
        if error.status_code == 405 and error.headers:
            what += f"; it takes {error.headers.get('Allow')}"
        return ApiError(error.status_code, what, headers=error.headers).response()

    app.add_exception_handler(LspecError, reply)
    app.add_exception_handler(Exception, reply)
    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(StarletteHTTPException, http)


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the first complaint about a body, with the place of what it is about."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if not isinstance(error.body, dict):
        return ApiError(400, "the body must be a JSON object, of Content-Type application/json")
    place = _place(first, error.body)
    if first["type"] == "extra_forbidden":
        return unsupported(place, "this field is not supported")
    message = first["msg"].removeprefix("Value error, ").removeprefix(f"{place} ")
    return unsupported(place, message) if place else ApiError(400, message)


def _place(error: Mapping[str, Any], body: Any) -> str:
    """Return where in `body` the error is, as in `messages[0].content`."""
    place, value = "", body
    for key in error["loc"][1:]:
        if isinstance(value, dict) and (key in value or error["type"] == "missing"):
            place, value = f"{place}.{key}", value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            place, value = f"{place}[{key}]", value[key]
        else:
            break  # the rest names the alternatives of a type
    return place.lstrip(".")
