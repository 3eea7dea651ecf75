"""What every request passes: the key, the limit of its size, and the counter."""

from __future__ import annotations

import hmac
import os

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lspec.server.errors import ApiError
from lspec.server.metrics import Metrics

_OPEN = {"/health"}


class Gate:
    """Refuses requests without the key or with too long a body; counts all by path and status."""

    def __init__(
        self, app: ASGIApp, *, key: str | None, max_body: int, paths: set[str], metrics: Metrics
    ) -> None:
        """`key` None lets everyone in; `max_body` is in bytes; `paths` are counted by name."""
        self._app = app
        self._key = key
        self._max_body = max_body
        self._paths = paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        status, size = 499, 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_long()
            return message

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if refusal := self._refusal(scope["path"], headers):
                await refusal.response()(scope, receive, note)
            else:
                await self._app(scope, limited, note)
        except Exception:
            status = 500  # sent by those outside
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, status).inc()

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._key is not None and path not in _OPEN and not _has(self._key, headers):
            return ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body:
            return self._too_long()
        return None

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_body} bytes")


def _has(key: str, headers: Headers) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    sent = given.strip(" \t").encode("latin-1")  # as Headers has decoded it
    return scheme.lower() == "bearer" and hmac.compare_digest(sent, os.fsencode(key.strip()))
