"""A plug-in for `llm` (llm.datasette.io): the pairs of the catalogue as models `lspec/PAIR`."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import llm
from llm.parts import ReasoningPart, StreamEvent, TextPart
from pydantic import Field

from lspec import catalogue
from lspec.errors import LspecError

if TYPE_CHECKING:
    from lspec.engine import Engine
    from lspec.request import Completion

log = logging.getLogger("lspec")

_LOADING = ("drafter", "n_ctx", "n_threads")  # options that an engine is loaded with


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register all pairs; the default one is also called `lspec`."""
    try:
        known = catalogue.load()
        default = known.pair().name
    except LspecError as error:  # llm has other models, which go on working
        log.warning("no models of lspec: %s", error)
        return
    for name in known.pairs:
        aliases = ["lspec"] if name == default else []
        register(LspecModel(name), LspecAsyncModel(name), aliases=aliases)


class Options(llm.Options):
    """The options of a prompt; what is not given is left to lspec."""

    temperature: float | None = Field(None, description="0 is greedy")
    top_k: int | None = Field(None, description="Keep the k likeliest tokens; 0 is off")
    top_p: float | None = Field(None, description="Keep the likeliest tokens up to this sum")
    min_p: float | None = Field(None, description="Keep what has this part of the best")
    repeat_penalty: float | None = Field(None, description="Divide logits of recent tokens")
    frequency_penalty: float | None = Field(None, description="Lower them for each time")
    presence_penalty: float | None = Field(None, description="Lower them once")
    max_tokens: int | None = Field(None, description="Stop after so many tokens")
    stop: str | list[str] | None = Field(None, description="End before this text")
    seed: int | None = Field(None, description="Same seed, same text, for a fixed gamma")
    gamma: int | Literal["auto"] | None = Field(None, description="Drafted tokens per round")
    drafter: Literal["auto", "model", "ngram", "none"] | None = Field(
        None, description="Who drafts; loads the pair anew if it changes"
    )
    n_ctx: int | None = Field(None, description="Window in tokens; loads the pair anew, too")
    n_threads: int | None = Field(None, description="CPU threads; likewise")


class LspecModel(llm.Model):
    """A pair, pulled when it is first asked for and loaded once for a process."""

    can_stream = True
    supports_schema = True
    Options = Options  # type: ignore[assignment]

    def __init__(self, pair: str) -> None:
        self.model_id = f"lspec/{pair}"
        self._pair = pair

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str | StreamEvent]:
        """Yield thoughts and the answer as they come."""
        with _explained():
            engine = _engines.get(self._pair, prompt.options)
            for chunk in engine.stream_chat(_messages(prompt), **_request(prompt)):
                if chunk.reasoning:
                    yield StreamEvent("reasoning", chunk.reasoning)
                if chunk.answer:
                    yield chunk.answer
                if chunk.completion:
                    _report(response, chunk.completion)


class LspecAsyncModel(llm.AsyncModel):
    """The same pair for asyncio."""

    can_stream = True
    supports_schema = True
    Options = Options  # type: ignore[assignment]

    def __init__(self, pair: str) -> None:
        self.model_id = f"lspec/{pair}"
        self._pair = pair

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,
    ) -> AsyncGenerator[str | StreamEvent, None]:
        """Yield thoughts and the answer as they come."""
        from asyncio import to_thread

        with _explained():
            engine = await to_thread(_engines.get, self._pair, prompt.options)
            answer = engine.astream_chat(_messages(prompt), **_request(prompt))
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    if chunk.reasoning:
                        yield StreamEvent("reasoning", chunk.reasoning)
                    if chunk.answer:
                        yield chunk.answer
                    if chunk.completion:
                        _report(response, chunk.completion)


class _Engines:
    """The loaded pairs of this process, each with the options that it was loaded with."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._loaded: dict[str, tuple[dict[str, Any], Engine]] = {}

    def get(self, pair: str, options: llm.Options) -> Engine:
        """Return the engine of `pair`, loaded anew if `options` ask for other settings."""
        from lspec.cli.models import pull_missing
        from lspec.loading import load

        given = options.model_dump(exclude_none=True)
        wanted = {name: given[name] for name in _LOADING if name in given}
        with self._turn:
            self._close(pair, unless=wanted)
            if pair not in self._loaded:
                pull_missing(pair)
                self._loaded[pair] = (wanted, load(pair, **wanted))
            return self._loaded[pair][1]

    def _close(self, pair: str, unless: dict[str, Any]) -> None:
        settings, engine = self._loaded.get(pair, (unless, None))
        if engine and settings != unless:
            del self._loaded[pair]
            engine.close()

    def close(self) -> None:
        """Free all models."""
        with self._turn:
            while self._loaded:
                self._loaded.popitem()[1][1].close()


_engines = _Engines()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn lspec's errors into llm's, which are shown to the user."""
    try:
        yield
    except LspecError as error:
        raise llm.ModelError(f"{error}. {error.hint}".strip(" .") + ".") from error


def _messages(prompt: llm.Prompt) -> list[dict[str, str]]:
    """Return the whole conversation, system message included; thoughts of a model are left out."""
    messages = []
    for message in prompt.messages:
        parts = [part for part in message.parts if not isinstance(part, ReasoningPart)]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if len(texts) < len(parts):
            raise llm.ModelError("lspec understands text only: no attachments and no tools.")
        messages.append({"role": message.role, "content": "".join(texts)})
    return messages


def _request(prompt: llm.Prompt) -> dict[str, Any]:
    """Return the engine's options for a prompt."""
    given = prompt.options.model_dump(exclude_none=True, exclude=set(_LOADING))
    if prompt.schema:
        schema = {"schema": prompt.schema}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    return given


def _report(response: llm.Response | llm.AsyncResponse, done: Completion) -> None:
    """Tell llm, for its log, what the answer cost."""
    stats = done.stats
    details = {"drafted": stats.drafted, "accepted": stats.accepted}
    response.set_usage(input=stats.prompt_tokens, output=stats.generated_tokens, details=details)
    response.response_json = {
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        "stats": asdict(stats),
    }
