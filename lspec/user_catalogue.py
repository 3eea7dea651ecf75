"""Adding a pair to the user's own catalogue."""

from __future__ import annotations

import tomllib
from pathlib import Path

from lspec import catalogue
from lspec.catalogue import NAME, Model, Pair
from lspec.errors import CatalogueError
from lspec.paths import reason, user_catalogue_path, write_whole

HEADER = "# Your own models and pairs; the format is described in lspec's models.toml.\n"


def require_free_name(name: str, known: catalogue.Catalogue, *, for_pair: Pair) -> bool:
    """Return True where `name` is free, False where it already names the files of `for_pair`.

    Raises CatalogueError for a name that is not valid or names another pair.
    """
    if not NAME.fullmatch(name):
        raise CatalogueError(
            f"{name!r} cannot be the name of a pair.",
            hint="Use letters, digits and . _ - only, and begin with a letter or digit.",
        )
    if name not in known.pairs:
        return True
    if _file_names(known.pairs[name]) == _file_names(for_pair):
        return False
    raise CatalogueError(
        f"There is already another pair named {name!r}.",
        hint=f"Choose another --name, or change the pair in {user_catalogue_path()}.",
    )


def add_pair(pair: Pair) -> Path:
    """Append `pair` and its two models to the user's catalogue; return that file's path.

    The text that is there, comments too, stays as it is; the file is replaced in one step.
    """
    path = user_catalogue_path()
    tables = catalogue.read_tables(path)
    old = HEADER if tables is None else path.read_text(encoding="utf-8")
    lines = [f"\n[pairs.{_quote(pair.name)}]"]
    for key in ("title", "note"):
        if text := getattr(pair, key):
            lines.append(f"{key} = {_quote(text)}")
    for role, model in zip(("target", "draft"), pair.models, strict=True):
        lines.append(f"{role} = {_quote(model.name)}")
    for model in pair.models:
        lines += _model_lines(model)
    new = old.rstrip("\n") + "\n" + "\n".join(lines) + "\n"
    try:
        tomllib.loads(new)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(
            f"The pair {pair.name!r} cannot be appended to {path}: {error}."
        ) from error
    _write(path, new)
    return path


def _file_names(pair: Pair) -> list[tuple[str, str]]:
    return [(file.repo, file.filename) for model in pair.models for file in model.files]


def _model_lines(model: Model) -> list[str]:
    first = model.files[0]
    lines = [f"\n[models.{_quote(model.name)}]", f"repo = {_quote(first.repo)}"]
    lines.append(f"licence = {_quote(model.licence)}")
    if first.revision:
        lines.append(f"revision = {_quote(first.revision)}")
    for file in model.files:
        if len(model.files) > 1:
            lines.append(f"\n[[models.{_quote(model.name)}.files]]")
        lines.append(f"file = {_quote(file.filename)}")
        if file.size:
            lines.append(f"size = {file.size}")
        if file.sha256:
            lines.append(f"sha256 = {_quote(file.sha256)}")
    return lines


def _quote(text: str) -> str:
    """Return `text` as a TOML string; control characters become spaces."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _write(path: Path, text: str) -> None:
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise CatalogueError(f"The catalogue {path} cannot be written: {reason(error)}.") from error
