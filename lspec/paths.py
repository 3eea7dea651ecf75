"""Where lspec keeps its files, the cache and the user's own catalogue, and how it writes one."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder for files that can be fetched again (it may not exist yet).

    `$XDG_CACHE_HOME/lspec` wherever that variable is set, else the platform's usual place.
    """
    return _base("XDG_CACHE_HOME", linux=".cache", mac="Library/Caches", windows="LOCALAPPDATA")


def config_dir() -> Path:
    """Return the folder for what the user has written (it may not exist yet).

    `$XDG_CONFIG_HOME/lspec` wherever that variable is set, else the platform's usual place.
    """
    return _base(
        "XDG_CONFIG_HOME", linux=".config", mac="Library/Application Support", windows="APPDATA"
    )


def user_catalogue_path() -> Path:
    """Return the path of the user's own catalogue, which need not exist."""
    return config_dir() / "models.toml"


def shown(path: Path) -> str:
    """Return a path for people and shells: the home folder is `~`."""
    try:
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    except (ValueError, RuntimeError):  # it is elsewhere; nobody's home is known
        return str(path)


def reason(error: Exception) -> str:
    """Return why a file cannot be read or written, without its name, which the caller tells."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    return getattr(error, "strerror", None) or str(error)


def write_whole(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all, in a folder that is there. Raises OSError.

    A symbolic link stays one, and a file keeps its mode.
    """
    path = path.resolve()
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".lspec-") as folder:
        new = Path(folder) / path.name
        new.write_text(text, encoding="utf-8", errors="replace")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)


def _base(variable: str, *, linux: str, mac: str, windows: str) -> Path:
    chosen = os.environ.get(variable, "")
    # The XDG rules say that a relative path is to be ignored.
    if Path(chosen).is_absolute():
        return Path(chosen) / "lspec"
    if sys.platform == "win32":
        return Path(os.environ.get(windows) or Path.home()) / "lspec"
    return Path.home() / (mac if sys.platform == "darwin" else linux) / "lspec"
