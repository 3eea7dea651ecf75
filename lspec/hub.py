"""The Hugging Face hub: look into its cache, ask about a file, download it, remove it.

The only importer of huggingface_hub. Its client does the requests, redirects, retries, the token
(`HF_TOKEN`) and the offline switch (`HF_HUB_OFFLINE`); files lie in its own cache (`HF_HOME`).
Since `hf_hub_download` neither continues a download of an earlier process nor checks the content,
a file is first fetched and checked beside its blob, and that function then only adds it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants

from lspec import integrity, ranges
from lspec.errors import DownloadError
from lspec.gguf import Header, parse_header
from lspec.hub_errors import HubUnreachableError, is_of_client, translate

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, HFCacheInfo

PROBE_SECONDS = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says about one file; `sha256` is None if it does not know it."""

    repo: str
    filename: str
    commit: str
    etag: str
    size: int

    @property
    def sha256(self) -> str | None:
        """The file's LFS digest, which the hub sends as its etag."""
        return self.etag if _SHA256.fullmatch(self.etag) else None


def describe(repo: str, filename: str, *, revision: str | None = None) -> RemoteFile:
    """Ask the hub about a file, without retries, so that a hub out of reach shows in seconds.

    Raises HubUnreachableError, or DownloadError for what the hub itself refuses.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with _explained(repo, filename):
        url = hf_hub_url(repo, filename, revision=revision)
        found = get_hf_file_metadata(url, timeout=PROBE_SECONDS)
    if not found.commit_hash or not _ETAG.fullmatch(found.etag or "") or not found.size:
        raise HubUnreachableError(
            f"The server at {constants.ENDPOINT} does not answer as the hub does.",
            hint="A proxy or a login page may sit between this machine and the hub.",
        )
    return RemoteFile(repo, filename, found.commit_hash, found.etag or "", found.size)


def read_header(remote: RemoteFile) -> Header:
    """Read the header of a GGUF file of the hub, and nothing behind it. Raises DownloadError."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(remote.repo, remote.filename, revision=remote.commit)
    with _explained(remote.repo, remote.filename):
        file = ranges.buffered(lambda start, end: _fetch_range(url, start, end), remote.size)
        try:
            return parse_header(file)
        except ValueError as error:
            raise DownloadError(f"{remote.filename} is no GGUF file: {error}.") from None


def licence(repo: str) -> str:
    """Return the licence that the repository names, or where to look for it."""
    from huggingface_hub import HfApi

    tags: list[str] = []
    # Not worth failing for: some servers in place of the hub serve files and nothing else.
    with suppress(DownloadError), _explained(repo, "its description"):
        tags = HfApi().model_info(repo, timeout=PROBE_SECONDS).tags or []
    names = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    return names[0] if names else f"see {constants.ENDPOINT}/{repo}"


def list_files(repo: str) -> list[str]:
    """Return the names of all files of a repository. Raises DownloadError."""
    from huggingface_hub import HfApi

    with _explained(repo, "its list of files"):
        found = HfApi().model_info(repo, timeout=PROBE_SECONDS)
    return [file.rfilename for file in found.siblings or []]


def partial_size(remote: RemoteFile) -> int:
    """Return how many bytes of the file an interrupted download has left."""
    partial = _partial(remote)
    return partial.stat().st_size if partial.exists() else 0


def download(
    remote: RemoteFile, *, sha256: str, progress: Callable[[int], None] | None = None
) -> Path:
    """Fetch a file into the hub's cache and return its path there; continues where one stopped.

    Nothing gets a name in the cache before size, `sha256` and the GGUF magic are right.
    `progress` is called with the bytes that are there. Raises DownloadError.
    """
    from huggingface_hub import hf_hub_download

    blob, partial = _blob(remote), _partial(remote)
    with _explained(remote.repo, remote.filename, downloading=True):
        if not _is_good(blob, remote.size, sha256):
            blob.parent.mkdir(parents=True, exist_ok=True)
            digest = _fetch(remote, partial, progress)
            try:
                integrity.require_good(
                    partial, remote.filename, size=remote.size, digest=digest, sha256=sha256
                )
            except DownloadError:
                partial.unlink()
                raise
            partial.replace(blob)
        integrity.remember_good(blob, sha256)
        # Finds the blob, so it only links the file's name to it.
        return Path(hf_hub_download(remote.repo, remote.filename, revision=remote.commit))


def snapshots(repo: str, revision: str | None) -> list[Path]:
    """Return the folders of `repo` in the cache: `revision`'s, else the newest, first."""
    folder = _repo_folder(repo) / "snapshots"
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda p: (p.name == revision, p.stat().st_mtime), reverse=True)


def cached_path(remote: RemoteFile) -> Path:
    """Return where the file is, or would be, in the cache."""
    return _repo_folder(remote.repo) / "snapshots" / remote.commit / remote.filename


def linked_sha256(path: Path) -> str | None:
    """Return the LFS digest under which the cache keeps the file `path` of a snapshot."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if _SHA256.fullmatch(name) else None


def remove(repo: str, paths: Sequence[Path]) -> None:
    """Delete the files `paths` of snapshots of `repo` from the cache, blobs too if unused.

    Raises DownloadError where the cache is not as the hub's client leaves it.
    """
    for path in paths:
        integrity.forget(path)
    with _explained(repo, "its files in the cache"):
        chosen = {path.parent.resolve() / path.name for path in paths}
        cache = _scan(repo)
        found = [
            file
            for file in _files(cache)
            if file.file_path.parent.resolve() / file.file_path.name in chosen
        ]
        if len(found) < len(chosen):
            raise DownloadError(
                f"The hub's cache of {repo} is damaged.",
                hint=f"Delete it by hand: {_repo_folder(repo)}",
            )
        cache.delete_files(*found).execute()
        cache = _scan(repo)
        revisions = [revision for cached in cache.repos for revision in cached.revisions]
        empty = [revision.commit_hash for revision in revisions if not revision.files]
        if empty:
            cache.delete_revisions(*empty).execute()


def remove_partial(repo: str, sha256: str | None) -> None:
    """Delete what an interrupted download of the file with this digest has left."""
    if sha256:
        (_repo_folder(repo) / "blobs" / f"{sha256}.lspec.incomplete").unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return the folder of the hub's cache."""
    return Path(constants.HF_HUB_CACHE)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids asking the hub."""
    return bool(constants.HF_HUB_OFFLINE)


def has_token() -> bool:
    """Return whether the hub would be asked with an access token."""
    from huggingface_hub import get_token

    with suppress(OSError):  # the folder where it would be
        return get_token() is not None
    return False


def _fetch(remote: RemoteFile, partial: Path, progress: Callable[[int], None] | None) -> str:
    """Bring `partial` to its full size and return its SHA-256."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import silent_tqdm

    have = partial_size(remote)
    resume = have if have <= remote.size else 0
    file = integrity.HashingFile(
        partial, remote.filename, size=remote.size, resume=resume, progress=progress
    )
    try:
        if file.tell() < remote.size:
            # The hub's own address, not that of its storage: a redirect is followed afresh each
            # time, without the token, so it cannot run out in the middle of a long download.
            url = hf_hub_url(remote.repo, remote.filename, revision=remote.commit)
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            with _quiet():
                http_get(
                    url,
                    file,  # type: ignore[arg-type]
                    resume_size=file.tell(),
                    headers=headers,
                    tqdm_class=silent_tqdm,
                )
        return file.finish()
    finally:
        file.close()


def _fetch_range(url: str, start: int, end: int) -> bytes:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    wanted = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    headers = build_hf_headers() | wanted
    with get_session().stream("GET", url, headers=headers, timeout=PROBE_SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # the whole file would follow
            raise HubUnreachableError("The hub sends no parts of files.")
        return response.read()


@contextmanager
def _explained(repo: str, filename: str, *, downloading: bool = False) -> Iterator[None]:
    """Turn every error of the hub's client in the block into a DownloadError about the file."""
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:
        if not is_of_client(error):
            raise
        raise translate(
            error, repo, filename, endpoint=constants.ENDPOINT, downloading=downloading
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's own warnings about retries, which show addresses, off the screen."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _is_good(blob: Path, size: int, sha256: str) -> bool:
    """Return whether the blob is there and whole; a damaged one is deleted."""
    if not blob.exists():
        return False
    if blob.stat().st_size == size and (
        integrity.is_known_good(blob, sha256)
        or integrity.hash_start(blob, size=size).hexdigest() == sha256
    ):
        return True
    integrity.forget(blob)
    blob.unlink()
    return False


def _repo_folder(repo: str) -> Path:
    return cache_folder() / constants.REPO_ID_SEPARATOR.join(["models", *repo.split("/")])


def _blob(remote: RemoteFile) -> Path:
    return _repo_folder(remote.repo) / "blobs" / remote.etag


def _partial(remote: RemoteFile) -> Path:
    # This ending makes the hub's own cache tools see it as an unfinished download.
    return _blob(remote).with_name(f"{remote.etag}.lspec.incomplete")


def _scan(repo: str) -> HFCacheInfo:
    """Return what is in the cache of `repo` only: copied repositories share their commits."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(cache_folder())
    of_repo = [
        found for found in cache.repos if (found.repo_type, found.repo_id) == ("model", repo)
    ]
    return replace(cache, repos=frozenset(of_repo))


def _files(cache: HFCacheInfo) -> list[CachedFileInfo]:
    revisions = [revision for cached in cache.repos for revision in cached.revisions]
    return [file for revision in revisions for file in revision.files]
