"""Models of the hub for `Llama.from_pretrained`: found by name, downloaded and checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from lspec import hub, pull, store
from lspec.catalogue import Model, Pair, parse_file, split_names
from lspec.errors import RequestError
from lspec.pull import Plan

log = logging.getLogger("lspec")


def fetch(repo: str, pattern: str, additional: Sequence[str] = ()) -> Path:
    """Return the path of the model in `repo` that `pattern` names; its first part if it is split.

    All its parts come with it; `additional` may name them, but no other files. The hub is asked
    about what is not on the disk, and to expand wildcards that match no model on the disk.
    Raises RequestError, CatalogueError, DownloadError.
    """
    filename = _find(repo, pattern)
    parts = split_names(filename)
    for other in additional:
        if not any(fnmatchcase(part, other) for part in parts):
            raise RequestError(
                f"{other} is no part of {filename}",
                hint="additional_files can only name the parts of a split model.",
            )
    model = Model(filename, tuple(parse_file(repo, part, repo) for part in parts), licence="")
    if paths := store.locate(model) or store.check_present(model):
        return paths[0]
    model = pull.pinned_model(filename, repo, filename)
    # What is pulled is a pair; one model is a pair with itself.
    return pull.pull(Pair(filename, filename, model, model), announce=_announce).target[0]


def _find(repo: str, pattern: str) -> str:
    """Return the name of the one model that `pattern` matches. Raises RequestError."""
    if not any(sign in pattern for sign in "*?["):
        return split_names(pattern)[0]
    found = _models(_on_disk(repo), pattern)
    if len(found) == 1:
        return found[0]
    names = sorted(hub.list_files(repo))
    found = _models(names, pattern)
    if len(found) == 1:
        return found[0]
    files = ", ".join(found or [name for name in names if name.endswith(".gguf")])
    raise RequestError(
        f"{len(found) or 'no'} models in {repo} match {pattern!r}",
        hint=f"There are {files}." if files else "It has no GGUF files.",
    )


def _on_disk(repo: str) -> Iterator[str]:
    for folder in hub.snapshots(repo, None)[:1]:
        yield from (path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))


def _models(names: Iterable[str], pattern: str) -> list[str]:
    """Return the first files of the models among `names` that `pattern` matches."""
    matching = (name for name in names if name.endswith(".gguf") and fnmatchcase(name, pattern))
    return sorted({split_names(name)[0] for name in matching})


def _announce(plan: Plan) -> None:
    log.warning("downloading %s (%.2f GB)", plan.pair.name, plan.size / 1e9)
