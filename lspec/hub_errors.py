"""What the hub's client raises, as DownloadErrors with one clear sentence and what to do.

The client's classes are told apart by their names, so that only `lspec.hub` imports it.
"""

from __future__ import annotations

from lspec.errors import DownloadError
from lspec.integrity import disk_error

NETWORK_HINT = "Check the connection, then run the same command again."
PERMISSION_HINT = "Set HF_TOKEN to an access token that may read it (made in the hub's settings)."

# From class to sentence and hint, subclass before class; the first row that fits is used.
TABLE: tuple[tuple[str, str, str], ...] = (
    (
        "GatedRepoError",
        "{repo} is gated: its owner gives access only on request.",
        "Accept the terms at {page}, then set HF_TOKEN to an access token of that account.",
    ),
    (
        "DisabledRepoError",
        "{repo} has been disabled on the hub.",
        "Choose another pair: `lspec ls` lists them.",
    ),
    (
        "RepositoryNotFoundError",
        "The hub has no repository {repo}, or it is private.",
        f"Check the name. For a private one: {PERMISSION_HINT}",
    ),
    (
        "RevisionNotFoundError",
        "{repo} no longer has the commit that the catalogue names.",
        "Update lspec, or describe the model without `revision` in your own catalogue.",
    ),
    ("RemoteEntryNotFoundError", "{repo} has no file {name}.", "Its files: {page}/tree/main"),
    (
        "OfflineModeIsEnabled",
        "{name} is not on this machine, and HF_HUB_OFFLINE forbids asking the hub.",
        "Unset HF_HUB_OFFLINE, or use `--from index` for a pair that has a mirror.",
    ),
    (
        "HFValidationError",
        "{repo} cannot be the name of a repository on the hub.",
        "Check the spelling: owner/name.",
    ),
)

_HTTP = {"httpx", "httpx2"}

STATUS: dict[int, tuple[str, str]] = {
    401: (
        "The hub asks for a valid access token to read {repo} (401).",
        "Set HF_TOKEN, or make a new token if it is set, or log in with `hf auth login`.",
    ),
    403: ("The hub forbids reading {repo} (403).", PERMISSION_HINT),
    404: ("{repo} has no file {name}.", "Its files: {page}/tree/main"),
}


class HubUnreachableError(DownloadError):
    """The hub could not be asked: no network, or it is in trouble itself."""


def is_of_client(error: Exception) -> bool:
    """Return whether `error` is one that the hub's client raises, rather than a fault of ours."""
    return isinstance(error, (OSError, ValueError)) or _module(error) in {"huggingface_hub", *_HTTP}


def translate(
    error: Exception, repo: str, filename: str, *, endpoint: str, downloading: bool
) -> DownloadError:
    """Return the DownloadError for what the client raised about a file.

    It is a HubUnreachableError if another source may be tried. `downloading` says that the hub
    had already answered.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    values = {"repo": repo, "name": filename, "page": f"{endpoint}/{repo}"}
    for kind, sentence, hint in TABLE:
        if kind in names:
            return DownloadError(sentence.format_map(values), hint=hint.format_map(values))
    if "HfHubHTTPError" in names:
        return _refusal(error.response.status_code, filename, values)  # type: ignore[attr-defined]
    # LocalEntryNotFoundError, an OSError, is what remains of a failed request.
    network = _module(error) in _HTTP or "LocalEntryNotFoundError" in names
    if isinstance(error, OSError) and not network:
        return disk_error(error, filename)
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    if downloading:
        return DownloadError(
            f"The connection to the hub broke in the middle of {filename}: {reason}.",
            hint="Run the same command again: it goes on where it stopped.",
        )
    return HubUnreachableError(
        f"The hub at {endpoint} cannot be reached: {reason}.", hint=NETWORK_HINT
    )


def _refusal(status: int, filename: str, values: dict[str, str]) -> DownloadError:
    """Return the DownloadError for an answer of the hub that is not the file."""
    if status in (408, 429) or status >= 500:
        return HubUnreachableError(
            f"The hub is in trouble or too busy: it answered {status} for {filename}.",
            hint="Try again in a few minutes.",
        )
    sentence, hint = STATUS.get(
        status, (f"The hub answered {status} for {{name}} of {{repo}}.", "")
    )
    return DownloadError(sentence.format_map(values), hint=hint.format_map(values))


def _module(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]
