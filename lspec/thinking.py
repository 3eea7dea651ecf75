"""What a model thinks before it answers, told from the answer while both arrive.

Families of the catalogue that think: Qwen3 (unless `enable_thinking` is false) and Granite 3.3
(where `thinking` is true). A template may open the thought itself, at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from lspec.distribution import IdArray
from lspec.sampling import Constraint


@dataclass(frozen=True, slots=True)
class Style:
    """How a family marks a thought, and maybe the answer behind it."""

    opening: str
    closing: str
    frame: tuple[str, str] | None = None  # around the answer


_TAGS = Style("<think>", "</think>")  # Qwen3, DeepSeek-R1 and most others
_GRANITE = Style("<think>", "</think>", ("<response>", "</response>"))
_BRACKETS = Style("[THINK]", "[/THINK]")  # Magistral, Ministral 3 Reasoning

MARKERS = (_TAGS.opening, _TAGS.closing, _BRACKETS.opening, _BRACKETS.closing)


def style_of(template: str | None) -> Style:
    """Return the style of a chat template; the most common one where it does not say."""
    template = template or ""
    if _BRACKETS.opening in template:
        return _BRACKETS
    if "<response>" in template and _GRANITE.opening in template:
        return _GRANITE
    return _TAGS


def is_opened(style: Style, prompt: str) -> bool:
    """Whether a prompt, or the end of it, has opened a thought for the model to go on with."""
    return prompt.rstrip().endswith(style.opening)


class Split(NamedTuple):
    """A text as what was thought and what was answered, without markers."""

    reasoning: str = ""
    answer: str = ""


class _Place(Enum):
    START = auto()  # nothing that counts yet
    THOUGHT = auto()
    GAP = auto()  # behind a thought
    FRAME = auto()  # in an answer that has an end marker
    ANSWER = auto()


class ThoughtStream:
    """Splits a text that comes in pieces.

    A thought stands at the beginning or nowhere. White space around it goes with the markers; an
    answer without a thought before it is left just as it is. What may be the beginning of a marker
    is held back.
    """

    def __init__(self, style: Style, *, opened: bool = False) -> None:
        """`opened` says that the text begins inside a thought."""
        self._style = style
        self._place = _Place.THOUGHT if opened else _Place.START
        self._held = ""
        self._begun = False  # whether the thought, or the framed answer, has shown a character

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._place is _Place.THOUGHT

    def push(self, text: str) -> Split:
        """Take more text; return what is certain now."""
        self._held += text
        reasoning = answer = ""
        if self._place is _Place.START:
            self._begin()
        if self._place is _Place.THOUGHT:
            reasoning = self._up_to(self._style.closing, then=_Place.GAP)
        if self._place is _Place.GAP:
            self._enter_answer()
        if self._place is _Place.FRAME and self._style.frame:
            answer = self._up_to(self._style.frame[1], then=_Place.ANSWER)
        if self._place is _Place.ANSWER:
            answer, self._held = answer + self._held, ""
        return Split(reasoning, answer)

    def finish(self, text: str = "") -> Split:
        """Take the last of the text; return all that was held back."""
        reasoning, answer = self.push(text)
        rest, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return Split(reasoning + (rest.rstrip() if self._begun else rest.strip()), answer)
        return Split(reasoning, answer + (rest if self._place is _Place.START else rest.rstrip()))

    def _begin(self) -> None:
        said = self._held.lstrip()
        if said.startswith(self._style.opening):
            self._place, self._held = _Place.THOUGHT, said.removeprefix(self._style.opening)
        elif not self._style.opening.startswith(said):
            self._place = _Place.ANSWER

    def _enter_answer(self) -> None:
        self._held = self._held.lstrip()
        frame = self._style.frame[0] if self._style.frame else ""
        if frame and self._held.startswith(frame):
            self._place, self._begun = _Place.FRAME, False
            self._held = self._held.removeprefix(frame)
        elif self._held and not frame.startswith(self._held):
            self._place = _Place.ANSWER

    def _up_to(self, marker: str, *, then: _Place) -> str:
        """Return the certain text before `marker`, behind which the place is `then`."""
        if not self._begun:
            self._held = self._held.lstrip()
        at = self._held.find(marker)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(marker) :]
            self._place = then
        else:
            text = self._held[: len(self._held) - overlap(self._held, marker)].rstrip()
            self._held = self._held[len(text) :]
        self._begun = self._begun or bool(text)
        return text


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class AfterThought:
    """A grammar for the answer behind a thought that the prompt has opened: a Constraint.

    Until the thought is closed anything goes but an end.
    """

    def __init__(
        self,
        constraint: Constraint,
        style: Style,
        *,
        piece: Callable[[int], bytes],
        anything: IdArray,
    ) -> None:
        """`piece` returns the bytes of a token, `anything` are the ids that do not end a text."""
        self._constraint = constraint
        self._closing = style.closing.encode()
        self._piece = piece
        self._anything = anything
        self._end = b""  # of the accepted thought, as far as it may be part of the marker
        self._closed = False

    def allowed(self, drafted: Sequence[int]) -> IdArray | None:
        """Return the ascending ids that may follow; None for any."""
        answer = self._behind(drafted)
        return self._anything if answer is None else self._constraint.allowed(answer)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that must follow, as far as they are known."""
        answer = self._behind(drafted)
        return () if answer is None else self._constraint.forced(answer)

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on behind `tokens`."""
        answer = self._behind(tokens)
        if answer is None:
            end = self._end + b"".join(map(self._piece, tokens))
            self._end = end[-len(self._closing) :]
        else:
            self._closed = True
            self._constraint.accept(answer)

    def _behind(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """Return those of `tokens` that come behind the thought; None while it goes on."""
        if self._closed:
            return tokens
        text = self._end
        for i, token in enumerate(tokens):
            text += self._piece(token)
            if self._closing in text:
                return tokens[i + 1 :]
        return None
