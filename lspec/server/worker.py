"""The thread that plays the engine, and the queue in front of it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from lspec.request import Chunk
from lspec.server.errors import ApiError, shutting_down
from lspec.server.metrics import Metrics

_MOST_PATIENCE_S = 60  # that a client is asked for where the queue is full

Streams = Sequence[Iterator[Chunk]]
Item = tuple[int, Chunk]  # the number of a stream, and what it brought


@dataclass(frozen=True, slots=True)
class Job:
    """The checked generations of one request, to be played one after the other."""

    streams: Streams
    stop: threading.Event  # read before every pass


class Worker:
    """Plays jobs in the order they come, one at a time, in one thread.

    Another thread prepares them (templates, tokens, grammars), so that a request is refused at
    once while another one is played. The methods belong to the event loop's thread.
    """

    def __init__(self, metrics: Metrics, *, queue: int, thread: ThreadPoolExecutor) -> None:
        """At most `queue` jobs wait behind the one that `thread` plays, which is ended with this.

        It should be the one in which the engine was loaded; see lspec.cli.loading.
        """
        self._metrics = metrics
        self._places = queue + 1
        self._taken = 0  # places of jobs that wait or are played
        self._turn = asyncio.Lock()  # wakes those who wait in their order
        self._played: Job | None = None
        self._mean_s = 1.0  # of the latest jobs
        self.stopping = False
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="lspec-prepare")
        self._playing = thread
        metrics.watch("queue_requests", "Requests that wait for their turn", lambda: self.waiting)
        metrics.watch("running_requests", "Requests that are played", lambda: bool(self._played))

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
        return self._taken - bool(self._played)

    async def prepare(self, make: Callable[[Callable[[], bool]], Streams]) -> Job:
        """Return what `make(should_stop)` makes, outside the event loop; see `play`."""
        self._require_place()
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        return Job(await loop.run_in_executor(self._preparing, make, stop.is_set), stop)

    async def play(self, job: Job) -> AsyncGenerator[Item, None]:
        """Yield what the job's streams bring, as it comes.

        Closing this generator, or cancelling its task, stops the job before the next pass and
        frees its place, also while it waits. Raises ApiError where there is no place.
        """
        asked = perf_counter()
        await self._take_turn()
        self._played = job
        outbox: asyncio.Queue[Item | None] = asyncio.Queue()
        done = self._start(job, outbox)
        first = True
        try:
            while item := await outbox.get():
                if first:
                    self._metrics.first_token_s.observe(perf_counter() - asked)
                    first = False
                completion = item[1].completion
                if completion and completion.finish_reason == "interrupted":
                    raise shutting_down()  # whoever hangs up has left this loop
                yield item
            await done
            self._metrics.request_s.observe(perf_counter() - asked)
        finally:
            job.stop.set()

    def stop(self) -> None:
        """Refuse new jobs, and end those that are here before the next pass."""
        self.stopping = True
        if self._played:
            self._played.stop.set()

    def close(self) -> None:
        """Stop, and wait for both threads to end."""
        self.stop()
        for pool in (self._preparing, self._playing):
            pool.shutdown(wait=True, cancel_futures=True)

    def _require_place(self) -> None:
        if self.stopping:
            raise shutting_down()
        if self._taken == self._places:
            seconds = min(max(1, math.ceil(self._mean_s)), _MOST_PATIENCE_S)
            raise ApiError(
                503,
                f"the queue is full: {self._places} requests are here already",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )

    async def _take_turn(self) -> None:
        self._require_place()
        self._taken += 1
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._taken -= 1
            raise
        if self.stopping:
            self._give_back()
            raise shutting_down()

    def _give_back(self) -> None:
        self._played = None
        self._taken -= 1
        self._turn.release()

    def _start(self, job: Job, outbox: asyncio.Queue[Item | None]) -> asyncio.Future[None]:
        """Let the other thread play the job; its turn ends when the thread is done."""
        loop = asyncio.get_running_loop()
        started = perf_counter()

        def put(item: Item | None) -> None:
            loop.call_soon_threadsafe(outbox.put_nowait, item)

        def finish(done: asyncio.Future[None]) -> None:
            self._mean_s += (perf_counter() - started - self._mean_s) / 4
            self._give_back()
            if not done.cancelled():
                done.exception()  # was raised where it was awaited, if anyone still listens

        done = loop.run_in_executor(self._playing, self._run, job, put)
        done.add_done_callback(finish)
        return done

    def _run(self, job: Job, put: Callable[[Item | None], None]) -> None:
        try:
            for number, stream in enumerate(job.streams):
                with closing(cast("Generator[Chunk, None, None]", stream)) as chunks:
                    for chunk in chunks:
                        if chunk.completion:
                            self._metrics.count(chunk.completion.stats)
                        put((number, chunk))
        finally:
            put(None)
