"""Long texts in portions that llama.cpp's tokenizer can take.

It looks for each control token up to the end of the text, anew for each part that it has cut
already, so that the time for a chat of many messages grows by its square. Behind a control token
nothing depends on what stands before it: there a text is cut without a change.

Many BPE tokenizers first split a text by an expression that std::regex follows by recursion, a
level for each character: some ten thousand letters, or spaces, in a row overflow the stack, which
ends the process. A cut behind a word and before the next one changes no token; elsewhere it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

LONGEST = 4000  # characters without a break
_CHAT = 4 * LONGEST  # characters of a chat

_STRETCHES = (
    re.compile(rf"^[^\n]{{{LONGEST},}}", re.MULTILINE),
    re.compile(rf"(?<!\s)\s{{{LONGEST},}}"),
)
_BREAKS = (  # from the best one on: between words, behind a word, between kinds of characters
    re.compile(r"[^\W\d_](?= [^\W\d_])"),
    re.compile(r"[^\W\d_](?=[^\w\s])"),
    re.compile(r"\w(?=\W)|\W(?=\w)"),
)


def portions(text: str, markers: Callable[[], Collection[str]]) -> Iterator[str]:
    """Yield `text` in portions; in most cases as it is.

    `markers` returns texts that must stay whole; it is only called where something is cut.
    """
    found = (pattern.finditer(text) for pattern in _STRETCHES)
    begin = 0
    for start, end in sorted(match.span() for matches in found for match in matches):
        at = max(start, begin)
        while end - at > LONGEST:
            at = _cut(text, at, markers())
            yield text[begin:at]
            begin = at
    yield text[begin:]


def turns(
    text: str, controls: Callable[[], Collection[str]], markers: Callable[[], Collection[str]]
) -> Iterator[str]:
    """Yield a chat in portions that end behind a control token; a short one as it is.

    `controls` returns the texts of these tokens, and `markers` those of all tokens that are read
    wherever they stand; they are only called for a long text.
    """
    begin = 0
    while len(text) - begin > 2 * _CHAT:
        at = begin + _CHAT
        found = ((text.find(control, at, at + _CHAT), len(control)) for control in controls())
        start, length = min((hit for hit in found if hit[0] >= 0), default=(0, 0))
        end = start + length
        if not length or _crossed(text, start, markers()) or _crossed(text, end, markers()):
            break  # nothing is gained, or nothing is known
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _crossed(text: str, at: int, markers: Collection[str]) -> bool:
    """Return whether a marker begins before `at` and ends behind it."""
    return any(
        text.find(marker, max(0, at - len(marker) + 1), at + len(marker) - 1) >= 0
        for marker in markers
    )


def _cut(text: str, at: int, markers: Collection[str]) -> int:
    """Return where to cut a stretch of which `at` is the last cut, or the start."""
    middle, cut = at + LONGEST // 2, at + LONGEST
    for pattern in _BREAKS:
        ends = [found.end() for found in pattern.finditer(text, middle, cut)]
        if ends:
            cut = ends[-1]
            break
    for marker in markers:
        inside = text.find(marker, max(at + 1, cut - len(marker) + 1), cut + len(marker) - 1)
        if inside >= 0:
            return inside
    return cut
