"""Is a file on the disk the one that was meant: magic, size and SHA-256, checked once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from lspec.errors import DownloadError
from lspec.paths import cache_dir, write_whole

GGUF_MAGIC = b"GGUF"
CHUNK = 4 << 20


def hash_start(
    path: Path, *, size: int, progress: Callable[[int], None] | None = None
) -> hashlib._Hash:
    """Return the running SHA-256 of the first `size` bytes of `path`.

    `progress` is called with the bytes read so far. Raises DownloadError if the file is shorter.
    """
    running, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while done < size:
            chunk = file.read(min(CHUNK, size - done))
            if not chunk:
                raise DownloadError(f"{path} ends after {done:,} of {size:,} bytes.")
            running.update(chunk)
            done += len(chunk)
            if progress:
                progress(done)
    return running


def require_good(path: Path, name: str, *, size: int, digest: str, sha256: str) -> None:
    """Raise DownloadError, naming `name` and the reason, unless `path` is the GGUF file meant.

    `digest` is what was computed from the file, `size` and `sha256` what is expected.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DownloadError(
            f"Instead of {name} a web page arrived.",
            hint="A proxy or a login page may sit between this machine and the server.",
        )
    if not head.startswith(GGUF_MAGIC):
        raise DownloadError(f"{name} is not a GGUF file: it begins with {head[:4]!r}.")
    if (actual := path.stat().st_size) != size:
        raise DownloadError(f"{name} has {actual:,} bytes where {size:,} are expected.")
    if digest != sha256:
        raise DownloadError(f"{name} has the SHA-256 {digest} where {sha256} is expected.")


def disk_error(error: OSError, filename: str, progress: str = "") -> DownloadError:
    """Return the DownloadError for a file that could not be written; `progress` says how far."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"The disk is full; {filename} could not be written{progress and f': {progress}'}.",
            hint="Free some space and run the same command again: it goes on where it stopped.",
        )
    return DownloadError(f"{filename} could not be stored: {error}.")


class HashingFile:
    """A file being written that hashes what it gets and reports its length after each write.

    It begins with the first `resume` bytes that are already at `path`; what is behind them goes.
    It takes no more than `size` bytes; `name` is what errors call it.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        size: int,
        resume: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        path.touch()
        self._path, self._name, self._size, self._progress = path, name, size, progress
        self._file = path.open("r+b", buffering=0)
        self._running = hash_start(path, size=resume)
        self._file.seek(resume)
        self._file.truncate()

    def write(self, data: bytes) -> int:
        """Append all of `data`; return its length. Raises DownloadError, also on a full disk."""
        rest = memoryview(data)
        if self.tell() + len(rest) > self._size:
            self._file.truncate(0)  # it is another file: nothing of it is worth going on with
            raise DownloadError(f"More than the {self._size:,} bytes of {self._name} arrived.")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            there = f"{self.tell():,} of {self._size:,} bytes are in {self._path.parent}"
            raise disk_error(error, self._name, there) from error
        self._running.update(data)
        if self._progress:
            self._progress(self._file.tell())
        return len(data)

    def tell(self) -> int:
        """Return the position, which is always the end."""
        return self._file.tell()

    def seek(self, position: int) -> int:
        """Go back to `position`; what is behind it is to be written again."""
        self._running = hash_start(self._path, size=position)
        return self._file.seek(position)

    def truncate(self) -> int:
        """Cut off what is behind the position."""
        return self._file.truncate()

    def finish(self) -> str:
        """Bring everything to the disk, close the file and return its SHA-256."""
        os.fsync(self._file.fileno())
        self._file.close()
        return self._running.hexdigest()

    def close(self) -> None:
        """Close the file, if `finish` has not."""
        self._file.close()


def is_known_good(path: Path, sha256: str) -> bool:
    """Return whether `path` passed the check for `sha256` before and has not changed since."""
    try:
        record = json.loads(_record(path).read_text(encoding="utf-8"))
        return bool(record == _facts(path, sha256))
    except (OSError, ValueError, RecursionError):
        return False


def was_verified(path: Path) -> bool:
    """Return whether `path` passed the check for any SHA-256 and has not changed since."""
    try:
        sha256 = json.loads(_record(path).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return is_known_good(path, sha256)


def remember_good(path: Path, sha256: str) -> None:
    """Remember that `path` passed the check for `sha256`, so that it is not hashed again."""
    record = _record(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps(_facts(path, sha256)))


def forget(path: Path) -> None:
    """Forget what is remembered about `path`."""
    _record(path).unlink(missing_ok=True)


def _facts(path: Path, sha256: str) -> dict[str, str | int]:
    stat = path.stat()
    return {"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _record(path: Path) -> Path:
    """Return where the check of the file behind `path` is remembered (links are followed)."""
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_dir() / "verified" / key
