"""From token bytes to text: UTF-8 that arrives in parts, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lspec.errors import RequestError


class TextStream:
    """Decodes token bytes piece by piece and ends at the first stop string.

    A character is released as soon as it is whole; text that may be the beginning of a stop string
    is held back. The result does not depend on how many tokens a round brings: of all matches the
    one that is complete first counts (the longest, if several are), and text ends before it.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raise RequestError for an empty stop string."""
        if any(not s for s in stop):
            raise RequestError("a stop string must not be empty")
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=1)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._released = 0  # characters released so far
        self._starts: list[int] = []  # for each token: characters known before it came
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Take the bytes of one more token; return the text that is certain now."""
        self._starts.append(self._released + len(self._held))
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what was held back, now that nothing follows; incomplete UTF-8 becomes U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
            self._released += len(text)
        return text

    @property
    def tokens_kept(self) -> int:
        """How many of the pushed tokens begin inside the text before the stop string."""
        if not self.stopped:
            return len(self._starts)
        return sum(start < self._released for start in self._starts)

    def _take(self, new: str) -> str:
        if self.stopped:
            return ""
        known = len(self._held)
        self._held += new
        end = self._first_stop(known)
        if end is None:
            keep = self._possible_stop()
            text, self._held = (
                self._held[: len(self._held) - keep],
                self._held[len(self._held) - keep :],
            )
        else:
            text, self._held, self.stopped = self._held[:end], "", True
        self._released += len(text)
        return text

    def _first_stop(self, known: int) -> int | None:
        """Return where the stop string that is complete first begins; None if there is none."""
        found: list[tuple[int, int]] = []
        for stop in self._stop:
            at = self._held.find(stop, max(0, known - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at))
        return min(found)[1] if found else None

    def _possible_stop(self) -> int:
        """Return the length of the longest tail that is the beginning of a stop string."""
        for n in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stop):
                return n
        return 0
