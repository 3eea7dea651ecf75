"""The choices of a reply: what chats and text completions do in their own ways."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Protocol

from lspec.llama import Vocab
from lspec.request import Chunk, Completion
from lspec.server.formats import Call
from lspec.server.logprobs import (
    LogprobStream,
    Placed,
    chat_logprobs,
    placed,
    text_logprobs,
)
from lspec.server.tools import ContentStream, Offer
from lspec.server.wire import Json


class ChoiceStream(Protocol):
    """A choice that is streamed."""

    def add(self, chunk: Chunk) -> Iterator[Json]:
        """Yield what `chunk` brings, as choices of one event each; the last has the reason."""


class Kind(Protocol):
    """A kind of reply."""

    @property
    def name(self) -> str:
        """The `object` of a reply."""

    @property
    def event_name(self) -> str:
        """The `object` of an event of a stream."""

    @property
    def prefix(self) -> str:
        """The beginning of a reply's id."""

    def choice(self, index: int, completion: Completion) -> Json:
        """Return a choice of a whole reply."""

    def stream(self, index: int) -> ChoiceStream:
        """Return a choice that is streamed."""


class Chat:
    """Answers in a chat, with calls of the functions on offer."""

    name, event_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, vocab: Vocab, *, logprobs: bool, offer: Offer | None) -> None:
        self.vocab = vocab
        self.offer = offer
        self._logprobs = logprobs

    def choice(self, index: int, completion: Completion) -> Json:
        """Return a choice of a whole reply."""
        content, calls = completion.answer, list[Call]()
        if self.offer:
            content, calls = self.offer.read(completion)
        message: Json = {"role": "assistant", "content": content}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = list(map(_call, calls))
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(placed(completion, self.vocab)),
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
        }

    def stream(self, index: int) -> ChoiceStream:
        """Return a choice that is streamed."""
        return _ChatStream(self, index)

    def logprobs(self, tokens: Sequence[Placed]) -> Json | None:
        """Return the log-probabilities if they were asked for."""
        return chat_logprobs(tokens, self.vocab) if self._logprobs else None


class _ChatStream:
    def __init__(self, chat: Chat, index: int) -> None:
        self._chat = chat
        self._index = index
        self._content = ContentStream(chat.offer) if chat.offer else None
        self._logprobs = LogprobStream(chat.vocab)
        self._begun = False

    def add(self, chunk: Chunk) -> Iterator[Json]:
        if not self._begun:
            self._begun = True
            yield self._choice({"role": "assistant", "content": ""})
        text, calls = self._content.add(chunk) if self._content else (chunk.answer, [])
        tokens = self._logprobs.add(chunk)
        parts = {"reasoning_content": chunk.reasoning, "content": text}
        deltas = [{name: part} for name, part in parts.items() if part]
        if tokens and not deltas:
            deltas = [{"content": ""}]
        for i, delta in enumerate(deltas):
            yield self._choice(delta, () if i else tokens)
        for i, call in enumerate(calls):
            yield self._choice({"tool_calls": [{"index": i, **_call(call)}]})
        if chunk.completion:
            reason = "tool_calls" if calls else chunk.completion.finish_reason
            yield self._choice({}, reason=reason)

    def _choice(
        self, delta: Json, tokens: Sequence[Placed] = (), reason: str | None = None
    ) -> Json:
        logprobs = self._chat.logprobs(tokens) if tokens else None
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


class Text:
    """Continuations of texts."""

    name, event_name, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, vocab: Vocab, *, logprobs: bool) -> None:
        self.vocab = vocab
        self._logprobs = logprobs

    def choice(self, index: int, completion: Completion) -> Json:
        """Return a choice of a whole reply."""
        tokens = placed(completion, self.vocab)
        return self.part(index, completion.text, tokens, completion.finish_reason)

    def stream(self, index: int) -> ChoiceStream:
        """Return a choice that is streamed."""
        return _TextStream(self, index)

    def part(self, index: int, text: str, tokens: Sequence[Placed], reason: str | None) -> Json:
        """Return a part of a choice, or the whole of it."""
        logprobs = text_logprobs(tokens, self.vocab) if self._logprobs else None
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


class _TextStream:
    def __init__(self, kind: Text, index: int) -> None:
        self._kind = kind
        self._index = index
        self._logprobs = LogprobStream(kind.vocab)

    def add(self, chunk: Chunk) -> Iterator[Json]:
        tokens = self._logprobs.add(chunk)
        reason = chunk.completion.finish_reason if chunk.completion else None
        if chunk.text or tokens or reason:
            yield self._kind.part(self._index, chunk.text, tokens, reason)


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
