"""Prompt lookup: where did the end of the text occur before, and what followed?"""

from __future__ import annotations

from collections.abc import Sequence


class SuffixIndex:
    """An online suffix automaton: O(1) amortised per appended token, for any length of match.

    Its states are sets of substrings that end at the same places. The suffix link of the newest
    state is the longest end of the text that occurred before (Blumer et al. 1985).
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # where an occurrence of the state ends; of a matched state the latest
        self._last = 0
        self.match = 0  # length of the longest end of the text that occurred before
        self._follow = 0  # the index behind that occurrence
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        for token in tokens:
            self._append(token)

    def propose(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens that followed the match; a copy may run into itself."""
        if not self.match:
            return ()
        copied: list[int] = []
        n = len(self.tokens)
        for i in range(self._follow, self._follow + limit):
            copied.append(self.tokens[i] if i < n else copied[i - n])
        return tuple(copied)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        new = self._state({}, self._length[self._last] + 1, len(self.tokens))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._reached(state, token)
        self._last = new
        matched = self._link[new]
        self.match = self._length[matched]
        self._follow = self._end[matched]
        self._end[matched] = len(self.tokens)

    def _reached(self, state: int, token: int) -> int:
        """Return the state behind `token`, split off if it holds longer substrings as well."""
        old = self._next[state][token]
        if self._length[old] == self._length[state] + 1:
            return old
        copy = self._state(dict(self._next[old]), self._length[state] + 1, self._end[old])
        self._link[copy] = self._link[old]
        self._link[old] = copy
        while state >= 0 and self._next[state].get(token) == old:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1
