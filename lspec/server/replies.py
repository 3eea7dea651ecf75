"""Replies in OpenAI's shape, with llama.cpp's timings beside it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import lspec
from lspec.server.choices import Kind
from lspec.server.wire import Json
from lspec.server.worker import Item
from lspec.stats import Stats


class Reply:
    """One reply, whole or streamed."""

    def __init__(self, kind: Kind, *, model: str, prompts: int, n: int, usage: bool) -> None:
        """`n` choices for each of so many prompts; `usage` puts that into a stream as well."""
        self._kind = kind
        self._prompts, self._n = prompts, n
        self._usage = usage
        self._head = {
            "id": kind.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"lspec-{lspec.__version__}",
        }

    async def whole(self, items: AsyncGenerator[Item, None]) -> Json:
        """Return the reply when all of its choices are there."""
        async with aclosing(items):
            done = [chunk.completion async for _, chunk in items if chunk.completion]
        stats = [completion.stats for completion in done]
        return {
            **self._head,
            "object": self._kind.name,
            "choices": [self._kind.choice(i, completion) for i, completion in enumerate(done)],
            "usage": self._usage_of(stats),
            "timings": timings(stats),
        }

    async def events(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Json, None]:
        """Yield the reply in parts as they come."""
        choices = [self._kind.stream(i) for i in range(self._prompts * self._n)]
        stats: list[Stats] = []
        async with aclosing(items):
            async for index, chunk in items:
                if chunk.completion:
                    stats.append(chunk.completion.stats)
                for choice in choices[index].add(chunk):
                    event = self._event([choice])
                    last = choice["finish_reason"] and len(stats) == len(choices)
                    if last and not self._usage:
                        event["timings"] = timings(stats)
                    yield event
        if self._usage:
            numbers = {"usage": self._usage_of(stats), "timings": timings(stats)}
            yield {**self._event([]), **numbers}

    def _event(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._usage else {}
        return {**self._head, "object": self._kind.event_name, "choices": choices, **usage}

    def _usage_of(self, stats: Sequence[Stats]) -> Json:
        """Count each prompt once, and what the first of its choices has found in the cache."""
        firsts = stats[:: self._n]
        prompt = sum(s.prompt_tokens for s in firsts)
        generated = sum(s.generated_tokens for s in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(s.reused_tokens for s in firsts)},
        }


def timings(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return the sums of generations by the names of llama.cpp's server, and the rounds."""
    reused = sum(s.reused_tokens for s in stats)
    read = sum(s.prompt_tokens for s in stats) - reused
    generated = sum(s.generated_tokens for s in stats)
    return {
        "cache_n": reused,
        # The last token of a prompt is read in the first round.
        **_pace("prompt", read, sum(s.prompt_s for s in stats), timed=max(0, read - len(stats))),
        **_pace("predicted", generated, sum(s.total_s for s in stats), timed=generated),
        "draft_n": sum(s.drafted for s in stats),
        "draft_n_accepted": sum(s.accepted for s in stats),
        "rounds": sum(s.rounds for s in stats),
    }


def _pace(name: str, count: int, seconds: float, *, timed: int) -> dict[str, float | None]:
    """Return a count, its time, and the pace of the tokens that took this time; None without."""
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / timed if timed else None,
        f"{name}_per_second": timed / seconds if timed and seconds else None,
    }
