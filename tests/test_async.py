from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny

import lspec

PROMPT = "The quick brown fox"
HELLO = [{"role": "user", "content": "Hello"}]
PATIENCE_S = 30  # with a test that fails


@pytest.fixture(scope="session")
def never_ends(models: Path) -> Path:
    return tiny.write_chat_model(models / "never-ends.gguf", seed=5, end_bias=-20)


@pytest.fixture
def engine(never_ends: Path) -> Iterator[lspec.Engine]:
    with lspec.load(target=never_ends, draft=never_ends, gamma=4, n_threads=1) as engine:
        yield engine


def play(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` and see that the engine has one thread for it at most."""

    async def watched() -> None:
        before = threading.active_count()
        await main
        assert threading.active_count() <= before + 1

    asyncio.run(watched())


async def texts(chunks: AsyncIterator[lspec.Chunk]) -> list[str]:
    return [chunk.text async for chunk in chunks]


class Passes:
    """A `should_stop` that counts the model's passes, and calls `at_tenth` before the tenth."""

    def __init__(self, at_tenth: Callable[[], object]) -> None:
        self.n, self._at_tenth = 0, at_tenth

    def __call__(self) -> bool:
        self.n += 1
        if self.n == 10:
            self._at_tenth()
        return False


def test_answers_are_those_of_the_blocking_calls(engine: lspec.Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 1, "reuse": False}
    chat, text = engine.chat(HELLO, **options), engine.generate(PROMPT, **options)
    chunks = [chunk.text for chunk in engine.stream(PROMPT, **options)]
    chat_chunks = [chunk.text for chunk in engine.stream_chat(HELLO, **options)]

    async def main() -> None:
        assert (await engine.achat(HELLO, **options)).tokens == chat.tokens
        assert (await engine.agenerate(PROMPT, **options)).tokens == text.tokens
        assert await texts(engine.astream(PROMPT, **options)) == chunks
        assert await texts(engine.astream_chat(HELLO, **options)) == chat_chunks

    play(main())


def test_callers_wait_for_one_another_and_none_gets_anothers_text(engine: lspec.Engine) -> None:
    prompts = [f"Caller {i}" for i in range(6)]
    options: dict[str, Any] = {"max_tokens": 20, "seed": 1, "reuse": False}
    alone = [engine.generate(prompt, **options).tokens for prompt in prompts]

    async def main() -> None:
        together = await asyncio.gather(*(engine.agenerate(p, **options) for p in prompts))
        assert [done.tokens for done in together] == alone

    play(main())


def test_the_loop_goes_on_while_the_model_runs(engine: lspec.Engine) -> None:
    async def main() -> None:
        turns = 0
        task = asyncio.create_task(engine.agenerate(PROMPT, max_tokens=400))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10

    play(main())


def test_cancelling_a_task_ends_generation_before_the_next_pass(engine: lspec.Engine) -> None:
    async def main() -> None:
        loop, cancelled = asyncio.get_running_loop(), threading.Event()

        def cancel() -> None:
            task.cancel()
            loop.call_soon(cancelled.set)

        def at_tenth() -> None:  # in the thread: the pass goes on when the task has been cancelled
            loop.call_soon_threadsafe(cancel)
            cancelled.wait()

        passes = Passes(at_tenth)
        task = asyncio.create_task(engine.achat(HELLO, should_stop=passes))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert passes.n == 10

    play(main())
    assert engine.generate(PROMPT, max_tokens=3).tokens


def test_closing_a_stream_early_frees_the_engine(engine: lspec.Engine) -> None:
    async def main() -> None:
        async with aclosing(engine.astream(PROMPT)) as chunks:
            async for _ in chunks:
                break
        assert engine.generate(PROMPT, max_tokens=3).tokens

    play(main())


def test_leaving_a_stream_without_closing_it_ends_it_as_well(engine: lspec.Engine) -> None:
    async def main() -> None:
        async for _ in engine.astream(PROMPT):
            break

    asyncio.run(main())
    assert engine.generate(PROMPT, max_tokens=3).tokens


def test_cancelled_while_waiting_for_its_turn(engine: lspec.Engine) -> None:
    whole = engine.generate(PROMPT, temperature=0.0, max_tokens=40, gamma=0)
    chunks = engine.stream(PROMPT, temperature=0.0, max_tokens=40)
    seen = next(chunks).text

    async def main() -> None:
        task = asyncio.create_task(engine.achat(HELLO))
        while threading.active_count() == alone:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    alone = threading.active_count()
    play(main())
    assert seen + "".join(chunk.text for chunk in chunks) == whole.text


def test_told_to_stop_while_waiting_answers_with_nothing(engine: lspec.Engine) -> None:
    stream = engine.stream(PROMPT)
    next(stream)

    async def main() -> None:
        done = await engine.achat(HELLO, should_stop=lambda: True)
        assert (done.text, done.finish_reason, done.stats.rounds) == ("", "interrupted", 0)

    play(main())
    stream.close()  # type: ignore[attr-defined]


def test_own_should_stop_is_heard(engine: lspec.Engine) -> None:
    calls = iter(range(1000))

    async def main() -> None:
        done = await engine.agenerate(PROMPT, should_stop=lambda: next(calls) >= 10)
        assert done.finish_reason == "interrupted"
        assert done.tokens

    play(main())


def test_errors_reach_the_caller_and_leave_the_engine_free(engine: lspec.Engine) -> None:
    def broken() -> bool:
        raise KeyError("broken")

    async def main() -> None:
        with pytest.raises(lspec.RequestError, match="temperature"):
            await engine.achat(HELLO, temperature=-1)
        with pytest.raises(TypeError, match="temprature"):
            await engine.achat(HELLO, temprature=1)  # type: ignore[call-arg]
        with pytest.raises(KeyError, match="broken"):
            await engine.agenerate(PROMPT, should_stop=broken)
        assert (await engine.agenerate(PROMPT, max_tokens=3)).tokens

    play(main())


def test_a_loop_that_closes_with_a_stream_open_stops_the_thread(engine: lspec.Engine) -> None:
    async def main() -> None:
        await anext(chunks)

    loop, chunks = asyncio.new_event_loop(), engine.astream(PROMPT)
    loop.run_until_complete(main())
    loop.close()
    assert engine.generate(PROMPT, max_tokens=3).tokens


def test_tools_reach_the_template(never_ends: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    options: dict[str, Any] = {"max_tokens": 1, "tools": tools}
    with lspec.load(
        target=never_ends, drafter="none", n_threads=1, chat_template="{{ tools | tojson }}"
    ) as engine:
        expected = engine.chat(HELLO, **options).stats.prompt_tokens

        async def main() -> None:
            assert (await engine.achat(HELLO, **options)).stats.prompt_tokens == expected

        play(main())
    assert expected > len(str(tools)) - 5


class Player:
    """A `should_stop` that notes which threads play."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __call__(self) -> bool:
        self.threads.add(threading.get_ident())
        return False


def test_one_thread_plays_all_streams_and_ends_with_the_engine(never_ends: Path) -> None:
    before, player = threading.active_count(), Player()
    with lspec.load(target=never_ends, drafter="none", n_threads=1) as engine:
        assert threading.active_count() == before  # none until it is needed

        async def main() -> None:
            asked = (engine.achat(HELLO, max_tokens=9, should_stop=player) for _ in range(3))
            await asyncio.gather(*asked)

        for _ in range(2):
            play(main())
        assert threading.active_count() == before + 1
    assert len(player.threads) == 1
    assert threading.get_ident() not in player.threads
    assert threading.active_count() == before


def test_streams_are_played_in_the_order_they_come(engine: lspec.Engine) -> None:
    order: list[int] = []

    async def ask(i: int) -> None:
        await engine.agenerate(PROMPT, max_tokens=20 - 5 * i)
        order.append(i)

    async def main() -> None:
        await asyncio.gather(*map(ask, range(4)))

    play(main())
    assert order == [0, 1, 2, 3]


def test_cancelled_in_the_queue_ends_at_once_and_the_others_go_on(engine: lspec.Engine) -> None:
    go_on = threading.Event()

    async def main() -> None:
        held = Passes(partial(go_on.wait, PATIENCE_S))  # in the middle of its text
        async with aclosing(engine.astream(PROMPT, should_stop=held)) as playing:
            await anext(playing)
            passes = Passes(lambda: None)
            waiting = asyncio.create_task(engine.achat(HELLO, should_stop=passes))
            behind = asyncio.create_task(engine.agenerate(PROMPT, max_tokens=3))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert passes.n == 0
            assert not behind.done()
            go_on.set()
            assert (await anext(playing)).completion is None
        assert (await behind).finish_reason == "length"

    play(main())


def test_closing_the_engine_ends_the_streams_of_this_loop_and_hangs_nowhere(
    engine: lspec.Engine,
) -> None:
    go_on = threading.Event()
    held = Passes(partial(go_on.wait, PATIENCE_S))

    async def main() -> None:
        begun = asyncio.Event()

        async def read() -> list[lspec.Chunk]:
            chunks = []
            async for chunk in engine.astream(PROMPT, should_stop=held):
                chunks.append(chunk)
                begun.set()
            return chunks

        playing = asyncio.create_task(read())
        await begun.wait()
        waiting = asyncio.create_task(engine.achat(HELLO))
        await asyncio.sleep(0)
        go_on.set()
        engine.close()
        assert threading.active_count() == before
        last, queued = (await playing)[-1].completion, await waiting
        assert last is not None
        assert (last.finish_reason, queued.finish_reason) == ("interrupted", "interrupted")
        assert last.tokens
        assert not queued.tokens

    before = threading.active_count()
    play(main())


def test_closing_from_another_thread_waits_for_the_streams(engine: lspec.Engine) -> None:
    async def main() -> None:
        async with aclosing(engine.astream(PROMPT, max_tokens=200)) as chunks:
            await anext(chunks)
            queued = asyncio.create_task(engine.achat(HELLO, max_tokens=5))
            await asyncio.sleep(0)
            await asyncio.to_thread(engine.close)
            *_, last = [chunk async for chunk in chunks]
        assert last.completion is not None
        assert last.completion.finish_reason == "length"
        assert (await queued).finish_reason == "length"

    asyncio.run(main())


def test_closing_in_the_middle_of_ones_own_stream_waits_for_nobody(engine: lspec.Engine) -> None:
    stream = engine.stream(PROMPT)
    next(stream)

    async def main() -> None:
        waiting = asyncio.create_task(engine.achat(HELLO))
        await asyncio.sleep(0)
        engine.close()
        assert (await waiting).finish_reason == "interrupted"

    asyncio.run(main())
    stream.close()  # type: ignore[attr-defined]


def test_closing_in_the_middle_of_ones_own_stream_ends_those_of_other_loops(
    engine: lspec.Engine,
) -> None:
    stream, waits, seen = engine.stream(PROMPT), threading.Event(), []
    next(stream)

    def should_stop() -> bool:  # read while it waits for its turn
        waits.set()
        return False

    async def main() -> None:
        seen.append(await engine.achat(HELLO, should_stop=should_stop))

    other = threading.Thread(target=lambda: asyncio.run(main()))
    other.start()
    assert waits.wait(PATIENCE_S)
    engine.close()
    other.join()
    assert seen[0].finish_reason == "interrupted"
    stream.close()  # type: ignore[attr-defined]


def test_closed_engine_says_so(engine: lspec.Engine) -> None:
    engine.close()

    async def main() -> None:
        with pytest.raises(lspec.RequestError, match="closed"):
            await engine.achat(HELLO)
        with pytest.raises(lspec.RequestError, match="closed"):
            await engine.agenerate([65, 66])

    play(main())
