"""Where lspec keeps its files: the cache, and the user's own catalogue."""

from __future__ import annotations

import os
import sys
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
    return getattr(error, "strerror", None) or str(error)


def _base(variable: str, *, linux: str, mac: str, windows: str) -> Path:
    chosen = os.environ.get(variable, "")
    # The XDG rules say that a relative path is to be ignored.
    if Path(chosen).is_absolute():
        return Path(chosen) / "lspec"
    if sys.platform == "win32":
        return Path(os.environ.get(windows) or Path.home()) / "lspec"
    return Path.home() / (mac if sys.platform == "darwin" else linux) / "lspec"
