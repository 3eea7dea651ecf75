"""What a bug report needs to say of an installation: the report of `lspec doctor`.

Nothing in it tells who or where the user is: the home folder is `~`, the names of user and machine
are left out of paths, addresses out of messages, and of settings only the names are told.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lspec
from lspec import catalogue, hub, integrity, machine, store
from lspec.catalogue import Catalogue, Pair
from lspec.errors import DownloadError, LspecError
from lspec.paths import cache_dir, config_dir, shown

PACKAGES = ("llama-cpp-python", "numpy", "click", "huggingface-hub", "tqdm")
EXTRAS = (
    *("llguidance", "fastapi", "uvicorn", "prometheus-client", "pydantic", "llm", "matplotlib"),
)
HUB_SECONDS = 15.0  # for a name server that does not answer: the hub's client has no limit for it
_SETTINGS = ("LSPEC_", "HF_", "HUGGING_FACE_", "LLAMA_", "GGML_", "OMP_", "GOMP_")
_MORE_SETTINGS = {
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NO_COLOR"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD"),
}
_CPU_FLAGS = re.compile(r"sse4_2|ssse3|avx\w*|f16c|fma|bmi2|amx\w*|asimd\w*|neon|sve\w*|i8mm|bf16")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+[^\s.,:;)]", re.IGNORECASE)
_HUB = "https://huggingface.co"  # everybody's; another one may be private

Report = dict[str, Any]
Progress = Callable[[str, int, int], None]


def examine(*, hashes: bool = True, progress: Progress = lambda name, done, size: None) -> Report:
    """Look at everything and return it, ready for JSON.

    With `hashes` every file of a pulled pair is read, which takes seconds per gigabyte; `progress`
    is told its name, the bytes read and its size.
    """
    known, problem = _catalogue()
    found: list[dict[str, Any]] = []
    with suppress(OSError):  # a folder that cannot be read is told among the folders
        found.extend(pairs(known, hashes=hashes, progress=progress) if known else ())
    report = {
        "versions": versions(),
        "system": system(),
        "cpu": cpu(),
        "memory": {"total": machine.total_memory(), "free": machine.free_memory()},
        "llama_cpp": llama_cpp(),
        "folders": folders(),
        "settings": settings(),
        "hub": None if known is None else reach_hub(known),
        "catalogue_problem": problem,
        "pairs": found,
    }
    private: Report = _private(report)
    return private


def versions() -> dict[str, str | None]:
    """Return the versions of lspec, of Python and of the packages in use; None: not there."""
    packages = {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    python = f"{platform.python_version()} {platform.python_implementation()}"
    return {"lspec": lspec.__version__, "python": python, **packages}


def system() -> str:
    """Return the operating system, its kernel and C library, and the kind of machine."""
    libc = " ".join(platform.libc_ver()).strip()
    parts = (platform.system(), platform.release(), platform.machine(), libc)
    return " ".join(filter(None, parts))


def cpu() -> dict[str, Any]:
    """Return the processor's name and the instructions that matter, and how many may be used."""
    fields = _cpu_fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name") or platform.processor(),
        "flags": sorted(flag for flag in flags if _CPU_FLAGS.fullmatch(flag)),
        "processors": os.cpu_count(),
        "threads": machine.usable_cores(),
    }


def llama_cpp() -> dict[str, Any]:
    """Return what the installed llama-cpp-python can do, or the `problem` with loading it."""
    try:
        from lspec.llama import features
        from lspec.offload import survey

        found = survey()
    except Exception as error:  # a broken build fails in any way
        return {"problem": f"{type(error).__name__}: {error}"}
    return {
        "problem": None,
        "features": features().strip(" |"),
        **asdict(found),
        "commands": found.commands,
    }


def folders() -> dict[str, dict[str, Any]]:
    """Return where models and settings lie, and what is free there in bytes."""
    places = {"hub cache": hub.cache_folder(), "lspec cache": cache_dir(), "settings": config_dir()}
    return {name: _folder(path) for name, path in places.items()}


def settings() -> list[str]:
    """Return the names of the environment variables that change what lspec does."""
    names = {name for name in os.environ if name.startswith(_SETTINGS)}
    return sorted(names | {name for name in os.environ if name.upper() in _MORE_SETTINGS})


def reach_hub(known: Catalogue) -> dict[str, Any]:
    """Ask the hub about a file of the default pair; give up after HUB_SECONDS."""
    answer: dict[str, Any] = {"offline": hub.is_offline(), "token": hub.has_token()}
    if answer["offline"]:
        return {**answer, "problem": None}
    file = known.pairs[known.default].draft.files[0]
    problems: list[str | None] = []

    def ask() -> None:
        try:
            hub.describe(file.repo, file.filename, revision=file.revision)
            problems.append(None)
        except LspecError as error:
            problems.append(str(error))
        except Exception as error:  # the report goes on, whatever the client raises
            problems.append(type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    late = f"The hub has not answered within {HUB_SECONDS:.0f} s."
    return {**answer, "problem": problems[0] if problems else late}


def pairs(known: Catalogue, *, hashes: bool, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield what is on the disk of each pair, the default one in any case.

    A pair of which there is only what it shares with a pulled one is left out.
    """
    states: dict[Path, str] = {}
    for pair in known.pairs.values():
        copies, pulled = store.copies(pair, known), store.locate_pair(pair) is not None
        shared = not pulled and all(copy.kept_for for copy in copies)
        if shared and pair.name != known.default:
            continue
        for copy in copies:
            key = copy.path.resolve()
            if key not in states:
                told = partial(progress, copy.file.basename)
                states[key] = _state(copy, hashes=hashes, progress=told)
        yield {
            "name": pair.name,
            "default": pair.name == known.default,
            "pulled": pulled,
            "files": [_file(copy, states[copy.path.resolve()]) for copy in copies],
            "missing": _missing(pair, copies),
        }


def _catalogue() -> tuple[Catalogue | None, str | None]:
    try:
        return catalogue.load(), None
    except LspecError as error:
        return None, str(error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_fields() -> dict[str, str]:
    """Return the description of the first processor; nothing where the system has none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _folder(path: Path) -> dict[str, Any]:
    free, writable, exists = None, False, False
    with suppress(OSError, StopIteration):  # below a folder that this user may not read
        exists = path.is_dir()
        there = next(place for place in (path, *path.parents) if place.exists())
        writable = there.is_dir() and os.access(there, os.W_OK)
        free = shutil.disk_usage(there).free
    return {"path": shown(path), "exists": exists, "writable": writable, "free": free}


def _state(copy: store.Copy, *, hashes: bool, progress: Callable[[int, int], None]) -> str:
    """Return "good", "damaged" or "unknown": it cannot be told, or was not to be looked at."""
    expected = copy.file.sha256 or hub.linked_sha256(copy.path)
    if expected is None:
        return "unknown"
    if not hashes:
        return "good" if integrity.is_known_good(copy.path, expected) else "unknown"
    size = copy.path.stat().st_size
    try:
        found = integrity.hash_start(copy.path, size=size, progress=lambda n: progress(n, size))
    except (OSError, DownloadError):
        return "damaged"
    return "good" if found.hexdigest() == expected else "damaged"


def _file(copy: store.Copy, state: str) -> dict[str, Any]:
    return {
        "name": copy.file.basename,
        "size": copy.path.stat().st_size,
        "sha256": copy.file.sha256 or hub.linked_sha256(copy.path),
        "state": state,
    }


def _missing(pair: Pair, copies: tuple[store.Copy, ...]) -> list[str]:
    there = {copy.file for copy in copies}
    files = (file for model in pair.models for file in model.files)
    return [file.basename for file in dict.fromkeys(files) if file not in there]


def _private(value: Any) -> Any:
    """Return `value` with every text in it freed of what names the user or the machine."""
    if isinstance(value, dict):
        return {key: _private(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_private(item) for item in value]
    return _anonymous(value) if isinstance(value, str) else value


def _anonymous(text: str) -> str:
    text = _ADDRESS.sub(lambda found: found[0] if found[0] == _HUB else "(address left out)", text)
    home = os.path.expanduser("~")  # noqa: PTH111  # never raises
    if len(home) > 1:
        text = text.replace(home, "~")
    for name in filter(None, {os.environ.get("USER"), os.environ.get("LOGNAME"), platform.node()}):
        text = re.sub(rf"(?<=[/\\]){re.escape(name)}(?=[/\\]|$)", "…", text)
    return text
