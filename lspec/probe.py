"""Files that nobody has vouched for are loaded in a process of their own first.

llama.cpp ends its process on some damaged files: by a failed assertion, a segmentation fault, or an
allocation without end. There that is an exit status. What went well is remembered, as long as the
file and llama.cpp stay the same, and files whose hash a pull has checked are not tried at all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path

from lspec import trial
from lspec.catalogue import split_names
from lspec.errors import ModelLoadError
from lspec.gguf import read_header
from lspec.integrity import was_verified
from lspec.llama import VERSION
from lspec.paths import cache_dir, write_whole

Model = Sequence[Path]

_COMMAND = (sys.executable or "", "-P", "-m", trial.__name__)
_HINT = (
    "The file may be damaged, or need another version of llama.cpp: fetch it again, or update "
    "llama-cpp-python."
)
# Time for reading the file from a slow disk, and for everything else.
_BYTES_PER_S, _SECONDS = 20e6, 60.0
# The trial is on the CPU: a GPU's memory may hold another model, and its driver defies any limit.
ENVIRONMENT = {
    "GGML_NO_BACKTRACE": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "GGML_VK_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
}
_ASSERTION = re.compile(r"^\S+:\d+: (.+)$|^\s*what\(\):\s*(.+)$", re.MULTILINE)

_passed: set[str] = set()  # records of this process, for where no file can be written


def require_loadable(*models: Model) -> None:
    """Raise ModelLoadError for models, each given by its files, that would fail or kill lspec.

    Where no process can be started only the headers are checked.
    """
    unknown = [files for files in models if not all(map(_is_known, parts_of(files)))]
    for path in chain.from_iterable(map(parts_of, unknown)):
        read_header(path)
    if unknown and not getattr(sys, "frozen", False):  # a frozen program would start itself
        _try(unknown)


def _try(models: Sequence[Model]) -> None:
    """Load `models` in another process. Raises ModelLoadError."""
    try:
        output, why = _run(models)
    except OSError:
        return
    began, *reports = output.splitlines() or [""]
    if began != "ready":
        return  # this Python cannot run lspec by itself, which says nothing about the files
    for files, report in zip(models, reports, strict=False):
        if report != "null":
            sentence, hint = json.loads(report)
            raise ModelLoadError(sentence, hint=hint)
        _remember(files)
    if len(reports) < len(models):
        path = models[len(reports)][0]
        raise ModelLoadError(f"loading {path} ends in a crash: {why}", hint=_HINT)


def _run(models: Sequence[Model]) -> tuple[str, str]:
    """Return what a trial of `models` says, and what ended it."""
    paths = [[str(path.absolute()) for path in files] for files in models]
    seconds = _SECONDS + sum(map(size_of, models)) / _BYTES_PER_S
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ENVIRONMENT}
    with subprocess.Popen(  # noqa: S603  # no shell; the files are not on the command line
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    ) as process:
        try:
            output, log = process.communicate(json.dumps(paths).encode(), timeout=seconds)
            why = reason(process.returncode, log.decode(errors="replace"))
        except subprocess.TimeoutExpired as expired:
            output, why = expired.stdout or b"", f"it takes more than {seconds:.0f} s"
        finally:
            process.kill()
            process.wait()
    if process.returncode == -signal.SIGINT:
        raise KeyboardInterrupt  # the trial alone has heard it, or was the first to
    return output.decode(errors="replace"), why


def reason(status: int, log: str) -> str:
    """Return in a clause what ended the process: an assertion, an exception, or a signal."""
    if status >= 0:
        return (log.splitlines() or ["no reason given"])[-1]
    if found := _ASSERTION.findall(log):
        return "".join(found[-1])
    name = signal.strsignal(-status) or f"signal {-status}"
    return f"{name} (out of memory?)" if status == -signal.SIGKILL else name


def parts_of(files: Model) -> list[Path]:
    """Return the files, of a split model also those that llama.cpp finds by itself."""
    found = (path.with_name(name) for path in files for name in split_names(path.name))
    return list(dict.fromkeys([*files, *filter(Path.exists, found)]))


def size_of(files: Model) -> int:
    """Return the bytes of all parts of a model."""
    return sum(path.stat().st_size for path in parts_of(files))


def _is_known(path: Path) -> bool:
    try:
        record, facts = _record(path), _facts(path)
    except OSError:
        return False
    if facts in _passed or was_verified(path):
        return True
    with suppress(OSError, ValueError):
        return record.read_text(encoding="utf-8") == facts
    return False


def _remember(files: Model) -> None:
    facts = {_record(path): _facts(path) for path in parts_of(files)}
    _passed.update(facts.values())
    with suppress(OSError):  # a cache that cannot be written means another trial next time
        for record, text in facts.items():
            record.parent.mkdir(parents=True, exist_ok=True)
            write_whole(record, text)


def _facts(path: Path) -> str:
    stat = path.stat()
    facts = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return json.dumps({**facts, "llama_cpp": VERSION})


def _record(path: Path) -> Path:
    """Return where it is remembered that the file behind `path` passed (links are followed)."""
    key = sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_dir() / "tried" / key
