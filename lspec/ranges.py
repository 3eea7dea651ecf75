"""A file that lies elsewhere and is fetched in parts, as a file to read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

_BLOCK = 4 << 20  # bytes: most headers of a model in two


class RangedFile(io.RawIOBase):
    """Reads what `fetch(start, end)` returns: the bytes from one place up to before another."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size = fetch, size
        self._at = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place; see io.RawIOBase."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as the file goes; return the number of bytes."""
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = self._fetch(self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def buffered(fetch: Callable[[int, int], bytes], size: int) -> io.BufferedReader:
    """Return a file of `size` bytes that is fetched in blocks of a few megabytes."""
    return io.BufferedReader(RangedFile(fetch, size), _BLOCK)
