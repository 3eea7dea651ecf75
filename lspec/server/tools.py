"""The tools of a request: a grammar for its calls, and the calls in its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lspec.errors import RequestError
from lspec.llama import Vocab
from lspec.request import Chunk, Completion
from lspec.server.formats import Call, Format, begin_of_calls, format_of, read_calls
from lspec.server.schemas import Function
from lspec.thinking import Style, ThoughtStream, style_of

# As templates write JSON, and as models have learned to write it.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Tools:
    """A format of calls in the tokens of one vocabulary.

    `shows_calls` is false where the chat template leaves out the calls of earlier turns.
    """

    def __init__(
        self,
        format: Format,
        vocab: Vocab,
        *,
        shows_calls: bool = True,
        style: Style | None = None,
    ) -> None:
        self.format = format
        self.shows_calls = shows_calls
        self._style = style or style_of(None)
        self._vocab = vocab
        self._tokens: dict[str, int] = {}  # the markers that are one token each
        for marker in format.markers:
            ids = vocab.tokenize(marker, bos=False, special=True)
            if len(ids) == 1:
                self._tokens[marker] = ids[0]
        unseen = [token for token in self._tokens.values() if not vocab.piece(token)]
        self._unseen = {token: vocab.piece(token, special=True) for token in unseen}

    @classmethod
    def of(cls, template: str | None, vocab: Vocab) -> Tools | None:
        """Return the tools of a chat template; None where it shows none to the model."""
        format = format_of(template)
        if template is None or format is None:
            return None
        shows_calls = "tool_calls" in template
        return cls(format, vocab, shows_calls=shows_calls, style=style_of(template))

    def opens(self, token: int) -> bool:
        """Whether `token` opens a call and leaves no trace in the text."""
        return token in self._unseen and token == self._tokens.get(self.format.markers[0])

    def answer(self, completion: Completion) -> str:
        """Return an answer, without the thought before it, with the markers it does not show."""
        pieces = (self._unseen.get(t) or self._vocab.piece(t) for t in completion.tokens)
        text = b"".join(pieces).decode("utf-8", errors="replace")
        if not completion.thought_tokens:
            return text
        opened = not text.lstrip().startswith(self._style.opening)
        return ThoughtStream(self._style, opened=opened).finish(text).answer

    def grammar(self, functions: Sequence[Function], *, free: bool, many: bool) -> str:
        """Return a grammar, in Lark's language, of calls of `functions` with their arguments.

        `free` allows an answer before the calls, or instead of them; `many` more calls than one.
        Raises RequestError where a call in an answer could not be told from the rest.
        """
        form = self.format
        more = form.between if many else None
        again = "" if more is None else f"({self._symbols(more)} call)*"
        lines = [
            *(self._free_start() if free else ["start: calls"]),
            f"calls: {self._symbols(form.start)} call {again} {self._symbols(form.end)}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        ]
        for i, function in enumerate(functions):
            head = self._symbols(f"{form.head}{function.name}{form.body}")
            schema = {"type": "object", **function.parameters, "x-guidance": _ONE_LINE}
            lines += [
                f"call_{i}: {head} arguments_{i} {self._symbols(form.tail)}",
                f"arguments_{i}: %json {json.dumps(schema)}",
            ]
        if free:
            lines.append(_bare_calls([function.name for function in functions]))
        return "\n".join(lines)

    def _free_start(self) -> list[str]:
        """Return rules for an answer that shows by its beginning whether it is a bare call."""
        opener = self.format.markers[0]
        marked = "calls?" if opener in self._tokens else ""
        if not marked and opener in self.format.head:
            raise RequestError(f"no token of this model is {opener}, so calls cannot be strict")
        return [f"start: PROSE? {marked} | bare", r"PROSE: /[^`{\s](?s:.*)/"]

    def _symbols(self, text: str) -> str:
        """Return `text` as grammar symbols: tokens for markers, else strings."""
        markers = "|".join(map(re.escape, self._tokens)) or "(?!)"
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part)
            for part in re.split(f"({markers})", text)
            if part
        )


def _bare_calls(names: Sequence[str]) -> str:
    """Return rules for one call without markers, maybe in a block of code: see read_calls."""
    lines = [
        f'bare: FENCE? ({" | ".join(f"bare_{i}" for i in range(len(names)))}) (SPACE? "```")?',
        r"FENCE: /```(json)?\s{0,9}/",
        r"SPACE: /\s{1,20}/",
        r'KEY: "\"arguments\"" | "\"parameters\""',
    ]
    for i, name in enumerate(names):
        parts = ('"{"', r'"\"name\""', '":"', json.dumps(f'"{name}"'), '","', "KEY", '":"')
        rule = " SPACE? ".join((*parts, f"arguments_{i}", '"}"'))
        lines.append(f"bare_{i}: {rule}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that a request lets the model call, and how often."""

    tools: Tools
    functions: Sequence[Function]
    many: bool

    @property
    def strict(self) -> bool:
        """Whether a function wants its schema followed."""
        return any(function.strict for function in self.functions)

    def read(self, completion: Completion) -> tuple[str, list[Call]]:
        """Return what an answer says beside its calls, and the calls."""
        names = {function.name for function in self.functions}
        text = self.tools.answer(completion)
        content, calls = read_calls(text, self.tools.format, names, strict=self.strict)
        if not calls:
            return completion.answer, []
        return content, calls if self.many else calls[:1]


class ContentStream:
    """Streams what an answer says beside its calls; these are read from the whole of it."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._seen = ""
        self._sent = 0
        self._limit: int | None = None  # where a call has begun that the text does not show

    def add(self, chunk: Chunk) -> tuple[str, list[Call]]:
        """Return the text that is certainly no part of a call, and behind the last the calls."""
        if chunk.completion:
            content, calls = self._offer.read(chunk.completion)
            return content[self._sent :], calls
        tools = self._offer.tools
        tokens = chunk.round.tokens if chunk.round else ()
        for token, (split, _) in zip(tokens, chunk.parts, strict=False):
            if self._limit is None and tools.opens(token):
                self._limit = len(self._seen)
            self._seen += split.answer
        certain = begin_of_calls(self._seen, tools.format, since=self._sent, whole=False)
        if self._limit is not None:
            certain = min(certain, self._limit)
        text = self._seen[self._sent : certain]
        self._sent = max(self._sent, certain)
        return text, []
