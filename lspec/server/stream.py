"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lspec.errors import LspecError
from lspec.server.errors import ApiError, explain
from lspec.server.wire import Json, encode

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; None if the client went away first, which cancels `work`."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply of server-sent events, which ends with `[DONE]`.

    What fails before the first event is an error with a status of its own; what fails later is an
    event.
    """

    def __init__(self, events: AsyncGenerator[Json, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last of them, or until the client goes away."""
        await while_connected(receive, self._play(send))

    async def _play(self, send: Send) -> None:
        async def body(data: bytes, *, more: bool) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})
            await asyncio.sleep(0)  # so that others go on, and a hang-up is heard

        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await body(_event(first), more=True)
                async for event in events:
                    await body(_event(event), more=True)
            except Exception as error:
                await body(_event(explain(error).body), more=False)
                if not isinstance(error, ApiError | LspecError):
                    raise
            else:
                await body(b"data: [DONE]\n\n", more=False)


def _event(data: Json) -> bytes:
    return b"data: " + encode(data) + b"\n\n"
