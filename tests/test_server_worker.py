"""The worker and the event stream by themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lspec.errors import DecodeError
from lspec.request import Chunk, Completion
from lspec.server.errors import ApiError
from lspec.server.metrics import Metrics
from lspec.server.stream import EventStream
from lspec.server.worker import Job, Worker
from lspec.stats import Tally

Make = Callable[[Callable[[], bool]], list[Iterator[Chunk]]]


def new_worker(queue: int = 3) -> Worker:
    thread = ThreadPoolExecutor(1, thread_name_prefix="lspec-play")
    return Worker(Metrics(), queue=queue, thread=thread)


def last(reason: Any = "stop") -> Chunk:
    stats = Tally().stats(generated_tokens=3)
    return Chunk((), completion=Completion("", (), reason, stats, 0))


def play(*makes: Make) -> list[list[Any]]:
    """Play jobs one after the other; return their items, and what they raised."""

    async def run(worker: Worker) -> list[list[Any]]:
        found: list[list[Any]] = []
        for make in makes:
            items: list[Any] = []
            try:
                async for item in worker.play(await worker.prepare(make)):
                    items.append(item)
            except Exception as error:
                items.append(error)
            found.append(items)
        assert worker.waiting == 0
        return found

    worker = new_worker()
    try:
        return asyncio.run(run(worker))
    finally:
        worker.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("lspec-")]


def test_streams_are_prepared_and_played_in_threads_of_their_own() -> None:
    threads: list[str] = []

    def stream() -> Iterator[Chunk]:
        threads.append(threading.current_thread().name)
        yield last()

    def make(should_stop: Callable[[], bool]) -> list[Iterator[Chunk]]:
        threads.append(threading.current_thread().name)
        return [stream(), stream()]

    (items,) = play(make)
    assert [number for number, _ in items] == [0, 1]
    assert threads == ["lspec-prepare_0", "lspec-play_0", "lspec-play_0"]


def test_jobs_are_played_in_the_order_they_came() -> None:
    played: list[int] = []

    def stream(number: int) -> Iterator[Chunk]:
        played.append(number)
        yield last()

    async def consume(worker: Worker, number: int) -> None:
        job = Job([stream(number)], threading.Event())
        async for _ in worker.play(job):
            pass

    async def run(worker: Worker) -> None:
        await asyncio.gather(*(consume(worker, number) for number in range(6)))

    worker = new_worker(queue=5)
    asyncio.run(run(worker))
    worker.close()
    assert played == list(range(6))


def test_a_failed_job_raises_and_the_next_is_played() -> None:
    def fail() -> Iterator[Chunk]:
        yield Chunk(())
        raise DecodeError("llama.cpp failed")

    failed, played = play(lambda _: [fail()], lambda _: [iter_of(last())])
    assert [type(item) for item in failed] == [tuple, DecodeError]
    assert len(played) == 1


def test_what_cannot_be_prepared_takes_no_place() -> None:
    def refuse(should_stop: Callable[[], bool]) -> list[Iterator[Chunk]]:
        raise ValueError("no")

    for items in play(*[refuse] * 5):
        assert [type(item) for item in items] == [ValueError]


def test_an_interrupted_job_is_an_error() -> None:
    ((error,),) = play(lambda _: [iter_of(last("interrupted"))])
    assert isinstance(error, ApiError)
    assert error.status_code == 503


def test_leaving_stops_the_job_and_nothing_more_is_played() -> None:
    played = []

    def endless(should_stop: Callable[[], bool]) -> Iterator[Chunk]:
        while not should_stop():
            played.append(1)
            yield Chunk(())

    async def leave(worker: Worker) -> None:
        job = await worker.prepare(lambda should_stop: [endless(should_stop)])
        items = worker.play(job)
        await anext(items)
        await items.aclose()
        async for _ in worker.play(await worker.prepare(lambda _: [iter_of(last())])):
            pass

    worker = new_worker()
    asyncio.run(leave(worker))
    worker.close()
    assert played


def iter_of(*chunks: Chunk) -> Iterator[Chunk]:
    yield from chunks


def sent(error: Exception) -> tuple[bytes, Exception | None]:
    """Return the body of an event stream that fails in the middle, and what it raised."""
    body: list[bytes] = []

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {"n": 1}
        raise error

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        body.append(message.get("body", b""))

    async def run() -> Exception | None:
        try:
            await EventStream(events())({}, receive, send)
        except Exception as raised:
            return raised
        return None

    raised = asyncio.run(run())
    return b"".join(body), raised


def test_hang_up_ends_a_stream_that_never_waits() -> None:
    async def events() -> AsyncGenerator[dict[str, Any], None]:
        while True:
            yield {"n": 1}

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    asyncio.run(EventStream(events())({}, receive, send))


def test_an_error_in_mid_stream_is_an_event() -> None:
    body, raised = sent(DecodeError("llama.cpp failed"))
    assert body.startswith(b'data: {"n":1}\n\ndata: {"error":{"message":"llama.cpp failed"')
    assert b"[DONE]" not in body
    assert raised is None


def test_a_fault_is_told_to_the_log_and_not_to_the_client() -> None:
    fault = RuntimeError("secret detail")
    body, raised = sent(fault)
    assert b"secret" not in body
    assert b'"type":"server_error"' in body
    assert raised is fault


@pytest.mark.parametrize("queue", [0, 2])
def test_no_more_than_the_queue_and_one_are_let_in(queue: int) -> None:
    async def run(worker: Worker) -> None:
        begun = threading.Event()

        def wait(should_stop: Callable[[], bool]) -> Iterator[Chunk]:
            begun.set()
            while not should_stop():
                pass
            yield last("interrupted")

        async def ask() -> None:
            async for _ in worker.play(await worker.prepare(lambda stop: [wait(stop)])):
                pass

        tasks = [asyncio.create_task(ask())]
        await asyncio.to_thread(begun.wait)
        for waiting in range(1, queue + 1):
            tasks.append(asyncio.create_task(ask()))
            while worker.waiting < waiting:
                await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await ask()
        assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while worker._taken:
            await asyncio.sleep(0)

    worker = new_worker(queue)
    asyncio.run(run(worker))
    worker.close()
