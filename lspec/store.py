"""Which models are on the disk, checked, and where; asks no network.

A model's files are in the hub's cache or, when they came from the package-index mirror, in
lspec's own. They count as being there only after their size, SHA-256 and magic were checked, and
as long as they have not changed since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lspec import index, integrity
from lspec.catalogue import Catalogue, Model, ModelFile, Pair
from lspec.errors import DownloadError
from lspec.locks import locked
from lspec.paths import cache_dir


@dataclass(frozen=True, slots=True)
class PairFiles:
    """The files of a pair on the disk; the first path of each model is the one to load."""

    target: tuple[Path, ...]
    draft: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A file of a model on the disk; `kept_for` names another pulled pair that needs it."""

    file: ModelFile
    path: Path
    kept_for: str = ""


def locate(model: Model) -> tuple[Path, ...] | None:
    """Return the paths of a model's files, None unless all are there and were checked.

    All lie in one folder; llama.cpp loads the first and finds the other parts of a split model
    by itself.
    """
    for paths in _candidates(model):
        pairs = zip(model.files, paths, strict=True)
        if all(integrity.is_known_good(path, _expected(file, path)) for file, path in pairs):
            return paths
    return None


def locate_pair(pair: Pair) -> PairFiles | None:
    """Return the files of a pair, None unless both of its models are there and were checked."""
    target, draft = (locate(model) for model in pair.models)
    return PairFiles(target, draft) if target and draft else None


def check_present(
    model: Model, on_check: Callable[[ModelFile], None] | None = None
) -> tuple[Path, ...] | None:
    """Check files that are there but not known to be good, and return them if they are.

    So what another program has put into the hub's cache is used and not fetched again. `on_check`
    is called before each file that has to be hashed.
    """
    for paths in _candidates(model):
        try:
            for file, path in zip(model.files, paths, strict=True):
                _check(file, path, on_check)
        except (DownloadError, OSError):
            continue
        return paths
    return None


def file_lock(file: ModelFile) -> Path:
    """Return the lock file that whoever fetches or deletes `file` holds."""
    key = f"{file.repo}/{file.filename}"
    return cache_dir() / "locks" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock"


def copies(pair: Pair, catalogue: Catalogue) -> tuple[Copy, ...]:
    """Return every copy on the disk of a pair's files, with the pulled pair that needs it too."""
    used = {
        path.resolve(): other.name
        for other in catalogue.pairs.values()
        if other.name != pair.name and (files := locate_pair(other))
        for path in (*files.target, *files.draft)
    }
    return tuple(
        Copy(file, path, used.get(path.resolve(), ""))
        for model in _models(pair)
        for paths in _candidates(model)
        for file, path in zip(model.files, paths, strict=True)
    )


def remove(pair: Pair, found: tuple[Copy, ...]) -> None:
    """Delete those of the copies that no other pair needs, and unfinished downloads of the pair.

    Nothing else in the hub's cache is touched.
    """
    from lspec import hub

    needed = {copy.file for copy in found if copy.kept_for}
    for file in {file for model in pair.models for file in model.files} - needed:
        with locked(file_lock(file)):
            own = index.path_of(file)
            in_hub = [copy.path for copy in found if copy.file == file and copy.path != own]
            if in_hub:
                hub.remove(file.repo, in_hub)
            hub.remove_partial(file.repo, file.sha256)
            if file.sha256:
                index.remove(file)


def _candidates(model: Model) -> Iterator[tuple[Path, ...]]:
    """Yield all sets of files in one folder that could be the model, as names and sizes say."""
    from lspec import hub

    first = model.files[0]
    if len(model.files) == 1 and first.sha256 and _may_be(first, own := index.path_of(first)):
        yield (own,)
    for folder in hub.snapshots(first.repo, first.revision):
        paths = tuple(folder / file.filename for file in model.files)
        if all(map(_may_be, model.files, paths)):
            yield paths


def _may_be(file: ModelFile, path: Path) -> bool:
    from lspec import hub

    if not path.is_file() or path.stat().st_size != (file.size or path.stat().st_size):
        return False
    # Another version of the file, in another snapshot of the repository, is not ours.
    return not file.sha256 or hub.linked_sha256(path) in (None, file.sha256)


def _expected(file: ModelFile, path: Path) -> str:
    """Return the SHA-256 that the file must have: the catalogue's, else the hub's own."""
    from lspec import hub

    return file.sha256 or hub.linked_sha256(path) or ""


def _check(file: ModelFile, path: Path, on_check: Callable[[ModelFile], None] | None) -> None:
    """Hash a file that is not known to be good; raise DownloadError if it is not."""
    sha256 = _expected(file, path)
    if integrity.is_known_good(path, sha256):
        return
    if on_check:
        on_check(file)
    size = path.stat().st_size
    digest = integrity.hash_start(path, size=size).hexdigest()
    integrity.require_good(path, file.basename, size=size, digest=digest, sha256=sha256)
    integrity.remember_good(path, sha256)


def _models(pair: Pair) -> tuple[Model, ...]:
    """Return the pair's models, once if the target is its own draft."""
    return pair.models if pair.target != pair.draft else (pair.target,)
