"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from lspec.llama import Vocab
from lspec.request import Chunk, Completion
from lspec.round import TokenLogprob
from lspec.server.wire import Json

Placed = tuple[int, TokenLogprob]  # with the number of characters before the token
Shape = Callable[[Sequence[Placed], Vocab], Json]

_LEAST = -9999.0  # instead of minus infinity, which JSON lacks


class _Offsets:
    """Says at which character each token of a text begins."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._known = 0

    def place(self, logprob: TokenLogprob) -> Placed:
        start = self._known
        self._known += len(self._decoder.decode(self._vocab.piece(logprob.token)))
        return start, logprob


class LogprobStream:
    """Releases a token's log-probability once its text is certain.

    A token that begins in text which a stop string may still take away is held back with it.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._offsets = _Offsets(vocab)
        self._held: deque[Placed] = deque()
        self._released = 0  # characters that have been streamed
        self._sent = 0

    def add(self, chunk: Chunk) -> list[Placed]:
        """Return what is certain now; with the last chunk, all that the completion keeps."""
        self._held.extend(map(self._offsets.place, chunk.logprobs))
        self._released += len(chunk.text)
        if chunk.completion:
            certain = len(chunk.completion.logprobs) - self._sent
        else:
            certain = sum(start < self._released for start, _ in self._held)
        self._sent += certain
        return [self._held.popleft() for _ in range(certain)]


def placed(completion: Completion, vocab: Vocab) -> list[Placed]:
    """Return the log-probabilities of a whole answer."""
    return list(map(_Offsets(vocab).place, completion.logprobs))


def chat_logprobs(tokens: Sequence[Placed], vocab: Vocab) -> Json:
    """Return the `logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> Json:
        name = vocab.piece(token, special=True)
        text = name.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(name)}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top]}
        for _, t in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Placed], vocab: Vocab) -> Json:
    """Return the `logprobs` of a text completion's choice."""

    def name(token: int) -> str:
        return vocab.piece(token, special=True).decode("utf-8", errors="replace")

    return {
        "tokens": [name(t.token) for _, t in tokens],
        "token_logprobs": [max(t.logprob, _LEAST) for _, t in tokens],
        "top_logprobs": [{name(i): max(p, _LEAST) for i, p in t.top} for _, t in tokens],
        "text_offset": [start for start, _ in tokens],
    }
