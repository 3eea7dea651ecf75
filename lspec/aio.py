"""The engine's streams for asyncio: one thread plays them all."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lspec.errors import RequestError
from lspec.request import Chunk, Completion, RequestOptions


class Streams:
    """Streams of any event loops, played in the order they come by one thread.

    It begins with the first of them. It is one because OpenMP keeps workers for each thread that
    it was ever called from, and waits less eagerly with more of them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lspec-streams")
        self._plays: int | None = None  # the thread's identifier, once it plays
        self._leave: Callable[[int], bool] = lambda reader: False

    def close(self, *, at_once: bool) -> None:
        """End the thread after its streams; nothing comes after that.

        Those of this thread's own event loop end before their next pass, as "interrupted", since
        nobody could read them while this waits; with `at_once` all do.
        """
        me, before = threading.get_ident(), self._leave
        self._leave = lambda reader: at_once or reader == me or before(reader)
        self._thread.shutdown(wait=me != self._plays)

    async def play(
        self, start: Callable[..., Iterator[Chunk]], subject: Any, options: RequestOptions
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of `start(subject, **options)` as they come; raises what it raises.

        Generation does not wait for the reader. Closing this generator, or cancelling the task
        that reads it, stops generation before the model's next pass; the thread is done with it
        when that returns (unless the closing is cancelled too: then a little later).
        """
        import asyncio  # here, for the sake of those who use none of it

        loop, reader = asyncio.get_running_loop(), threading.get_ident()
        items: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        ended, closed = asyncio.Event(), threading.Event()
        asked = options.get("should_stop")

        def send(call: Callable[..., None], *item: Chunk | BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(call, *item)
            except RuntimeError:  # the loop has been closed: nobody reads any more
                closed.set()

        def work() -> None:
            self._plays = threading.get_ident()
            last = None
            try:
                for chunk in start(subject, **{**options, "should_stop": should_stop}):
                    send(items.put_nowait, chunk)
            except BaseException as error:  # whatever it is, it belongs to the reader
                last = error
            send(items.put_nowait, last)
            send(ended.set)

        def should_stop() -> bool:
            wanted = asked is not None and asked()  # which may close the engine
            return wanted or closed.is_set() or self._leave(reader)

        try:
            played = self._thread.submit(work)
        except RuntimeError:
            raise RequestError("this engine has been closed", hint="Load it again.") from None
        try:
            while isinstance(item := await items.get(), Chunk):
                yield item
        finally:
            closed.set()
            if not played.cancel():  # it has begun
                await ended.wait()
        if item is not None:
            raise item


async def last(chunks: AsyncIterator[Chunk]) -> Completion:
    """Return the completion that comes with the last chunk."""
    completion = None
    async for chunk in chunks:
        completion = chunk.completion
    assert completion is not None
    return completion
