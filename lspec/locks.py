"""One process at a time: a lock file that the system releases when its holder dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two downloads of one file at a time are not guarded there.
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`; call `on_wait` once if another process has to finish first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                # A network file system without locks: final names are still given in one step.
                pass
        # Closing the file releases it. It is never deleted: a waiter would hold a dead one.
        yield
