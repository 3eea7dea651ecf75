"""The replies of llama_cpp: dictionaries with its keys, in its order."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from lspec.request import Chunk, Completion
from lspec.round import Source, TokenLogprob

Reply = dict[str, Any]
Piece = Callable[[int], bytes]

_NO_TEXT = (("", Source.TARGET),)


@dataclass(frozen=True, slots=True)
class Head:
    """What a completion and all chunks of its stream have in common."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid4()}")
    created: int = field(default_factory=lambda: int(time()))  # seconds

    def reply(self, text: str, logprobs: Reply | None, finish_reason: str | None) -> Reply:
        """Return a completion, or a chunk of one."""
        choice = {
            "text": text,
            "index": 0,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


class LogprobLists:
    """Log-probabilities in llama_cpp's form: parallel lists, with the place of each token."""

    def __init__(self, piece: Piece, *, start: int) -> None:
        """`piece` gives a token's bytes; `start` is the place of the first one, in characters."""
        self._piece = piece
        self._place = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def of(self, tokens: Iterable[TokenLogprob]) -> Reply:
        """Return the lists for the next `tokens`."""
        lists: Reply = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
        for token in tokens:
            name = self._name(token.token)
            top = {self._name(other): logprob for other, logprob in token.top}
            lists["tokens"].append(name)
            lists["text_offset"].append(self._place)
            lists["token_logprobs"].append(token.logprob)
            lists["top_logprobs"].append({**top, name: token.logprob})
            self._place += len(self._decoder.decode(self._piece(token.token)))
        return lists

    def _name(self, token: int) -> str:
        return self._piece(token).decode("utf-8", errors="ignore")


def whole(head: Head, chunks: Iterator[Chunk], lists: LogprobLists | None, *, before: str) -> Reply:
    """Play a stream to its end and return the completion; `before` begins its text."""
    generated, completion = 0, None
    for chunk in chunks:
        generated += len(chunk.pieces) if chunk.round else 0
        completion = chunk.completion
    assert completion is not None
    logprobs = lists.of(completion.logprobs) if lists else None
    prompt = completion.stats.prompt_tokens
    return {
        **head.reply(before + completion.text, logprobs, completion.finish_reason),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,  # those of the stop string are counted
            "total_tokens": prompt + generated,
        },
    }


def streamed(
    head: Head, chunks: Iterator[Chunk], lists: LogprobLists | None, piece: Piece
) -> Iterator[Reply]:
    """Yield a stream token by token, and a last chunk with the reason of its end.

    Tokens come as soon as it is certain that they belong to the text.
    """
    waiting = _Waiting(piece)
    for chunk in chunks:
        for text, token in waiting.certain(chunk):
            yield head.reply(text, lists.of([token]) if lists and token else None, None)
        if chunk.completion:
            yield head.reply("", None, chunk.completion.finish_reason)


class _Waiting:
    """Tokens whose text is held back, because it may be the beginning of a stop string."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: deque[tuple[int, TokenLogprob]] = deque()  # each with its place in the text
        self._known = self._released = 0  # characters
        self._passed = 0  # tokens

    def certain(self, chunk: Chunk) -> Iterator[tuple[str, TokenLogprob | None]]:
        """Yield what `chunk` releases: texts, each with a token that begins in it or before."""
        tokens = iter(chunk.logprobs)
        for text, _ in chunk.pieces or _NO_TEXT:
            if token := next(tokens, None):
                self._tokens.append((self._known, token))
                self._known += len(self._decoder.decode(self._piece(token.token)))
            self._released += len(text)
            passed = [*self._pass(chunk.completion)]
            yield from (("", token) for token in passed[:-1])
            if text or passed:
                yield text, passed[-1] if passed else None

    def _pass(self, completion: Completion | None) -> Iterator[TokenLogprob]:
        """Let go of tokens that are certain; at the end, of all that the text keeps."""
        while self._tokens and (
            self._tokens[0][0] < self._released
            if completion is None
            else self._passed < len(completion.tokens)
        ):
            self._passed += 1
            yield self._tokens.popleft()[1]


def chat(reply: Reply) -> Reply:
    """Return a completion as a chat completion."""
    (choice,) = reply["choices"]
    message = {"role": "assistant", "content": choice["text"]}
    return {
        "id": "chat" + reply["id"],
        "object": "chat.completion",
        "created": reply["created"],
        "model": reply["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": _chat_logprobs(choice["logprobs"]),
                "finish_reason": choice["finish_reason"],
            }
        ],
        "usage": reply["usage"],
    }


def chat_chunks(replies: Iterator[Reply]) -> Iterator[Reply]:
    """Yield the chunks of a completion as those of a chat completion; the role comes first."""
    for i, reply in enumerate(replies):
        (choice,) = reply["choices"]
        if i == 0:
            yield _chat_chunk(reply, {"role": "assistant"}, None, None)
        delta = {"content": choice["text"]} if choice["finish_reason"] is None else {}
        logprobs = _chat_logprobs(choice["logprobs"])
        yield _chat_chunk(reply, delta, logprobs, choice["finish_reason"])


def _chat_chunk(
    reply: Reply, delta: Reply, logprobs: Reply | None, finish_reason: str | None
) -> Reply:
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {
        "id": "chat" + reply["id"],
        "model": reply["model"],
        "created": reply["created"],
        "object": "chat.completion.chunk",
        "choices": [choice],
    }


def _chat_logprobs(lists: Reply | None) -> Reply | None:
    if lists is None:
        return None
    columns = (lists["tokens"], lists["token_logprobs"], lists["top_logprobs"])
    content = [
        {
            "token": token,
            "bytes": None,
            "logprob": logprob,
            "top_logprobs": [
                {"token": other, "logprob": value, "bytes": None} for other, value in top.items()
            ],
        }
        for token, logprob, top in zip(*columns, strict=True)
    ]
    return {"content": content, "refusal": None}
