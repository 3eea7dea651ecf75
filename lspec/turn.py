"""Whose turn it is: one thread at a time, and the others wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lspec.errors import RequestError

_LISTEN_S = 0.05  # between looks at should_stop, while another thread has the turn


class Turn:
    """A lock that knows whose it is, and that nobody has to wait for to the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    @contextmanager
    def take(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold the turn for a whole generation; other threads wait.

        Yields False to a caller that is told to stop while it waits. Raises RequestError for one
        that has the turn already.
        """
        if not self._lock.acquire(blocking=False):
            if self.mine:
                raise RequestError(
                    "this engine is in the middle of a stream",
                    hint="Read the stream to its end, or close it, before asking again.",
                )
            while not self._lock.acquire(timeout=_LISTEN_S):
                if should_stop():
                    yield False
                    return
        self._owner = threading.get_ident()
        try:
            yield True
        finally:
            self._owner = None
            self._lock.release()
