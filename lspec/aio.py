"""The engine's streams for asyncio: each runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from lspec.request import Chunk, Completion, RequestOptions


async def stream(
    start: Callable[..., Iterator[Chunk]], subject: Any, options: RequestOptions
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of `start(subject, **options)` as they come; raises what it raises.

    Generation does not wait for the reader. Closing this generator, or cancelling the task that
    reads it, stops generation before the model's next pass; the thread has ended when that returns
    (unless the closing is cancelled too: then the thread ends a little later).
    """
    import asyncio  # here, for the sake of those who use none of it

    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
    ended, closed = asyncio.Event(), threading.Event()
    asked = options.get("should_stop")

    def send(call: Callable[..., None], *item: Chunk | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(call, *item)
        except RuntimeError:  # the loop has been closed: nobody reads any more
            closed.set()

    def work() -> None:
        last = None
        try:
            for chunk in start(subject, **{**options, "should_stop": should_stop}):
                send(items.put_nowait, chunk)
        except BaseException as error:  # whatever it is, it belongs to the reader
            last = error
        send(items.put_nowait, last)
        send(ended.set)

    def should_stop() -> bool:
        return closed.is_set() or (asked is not None and asked())

    thread = threading.Thread(target=work, name="lspec stream")
    thread.start()
    try:
        while isinstance(item := await items.get(), Chunk):
            yield item
    finally:
        closed.set()
        await ended.wait()
        thread.join()
    if item is not None:
        raise item


async def last(chunks: AsyncIterator[Chunk]) -> Completion:
    """Return the completion that comes with the last chunk."""
    completion = None
    async for chunk in chunks:
        completion = chunk.completion
    assert completion is not None
    return completion
