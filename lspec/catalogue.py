"""The catalogue: which files make a model, which two models make a pair.

`load` reads the catalogue that comes with lspec and then the user's own, which wins. The format
is described at the head of `models.toml`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from lspec.errors import CatalogueError
from lspec.paths import reason, user_catalogue_path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+()\[\]-]*")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PATTERNS = {
    "sha256": (re.compile(r"[0-9a-f]{64}"), "64 hex digits"),
    "revision": (re.compile(r"[0-9a-f]{40}"), "a commit of 40 hex digits"),
}


@dataclass(frozen=True, slots=True)
class Mirror:
    """The parts of a file in wheels of the package index: `prefix`1 to `prefix``parts`."""

    prefix: str
    parts: int
    version: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model; what is None is taken from the hub when the file is pulled."""

    repo: str
    filename: str
    revision: str | None = None
    size: int | None = None
    sha256: str | None = None
    mirror: Mirror | None = None

    @property
    def basename(self) -> str:
        """The file's name without the folder that it may have in the repository."""
        return PurePosixPath(self.filename).name


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its files (several for a split GGUF, in order, the first is loaded) and licence."""

    name: str
    files: tuple[ModelFile, ...]
    licence: str

    @property
    def size(self) -> int | None:
        """All its bytes; None where the size of a file is not known."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the draft that guesses for it."""

    name: str
    title: str
    target: Model
    draft: Model
    note: str = ""

    @property
    def models(self) -> tuple[Model, Model]:
        """Target and draft, in this order."""
        return self.target, self.draft

    @property
    def size(self) -> int | None:
        """The bytes of both models; None where the size of a file is not known."""
        sizes = {model.name: model.size for model in self.models}
        return None if None in sizes.values() else sum(size or 0 for size in sizes.values())


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All pairs by name, in the order of the files, and the name of the default pair."""

    pairs: Mapping[str, Pair]
    default: str

    def pair(self, name: str | None = None) -> Pair:
        """Return the pair `name`; None means `$LSPEC_PAIR`, and without that the default.

        Raises CatalogueError for an unknown name, with the closest known ones.
        """
        name = name or os.environ.get("LSPEC_PAIR") or self.default
        if name in self.pairs:
            return self.pairs[name]
        close = [known for known in self.pairs if known.startswith(name)][:3]
        close = close or get_close_matches(name, self.pairs, n=4, cutoff=0.5)
        hint = f"Did you mean {', '.join(close)}? " if close else ""
        hint += (
            "`lspec ls` lists all pairs; `lspec pull --target OWNER/REPO:FILE "
            "--draft OWNER/REPO:FILE --name NAME` adds one."
        )
        if name == os.environ.get("LSPEC_PAIR"):
            hint += " The name comes from the environment variable LSPEC_PAIR."
        if not NAME.fullmatch(name):
            hint = "`lspec ls` lists the pairs. What is to be answered is given with -p TEXT."
        if name.endswith(".gguf") or "/" in name:
            hint = (
                "It looks like a file, which chat, generate, bench, check and serve take: "
                f'target="{name}", and draft=FILE if there is one.'
            )
        raise CatalogueError(f"There is no pair named {name!r} in the catalogue.", hint=hint)


def load() -> Catalogue:
    """Read the catalogue of lspec and then the user's own.

    Raises CatalogueError, naming the file and what is wrong with it.
    """
    models: dict[str, Model] = {}
    pairs: dict[str, Pair] = {}
    default = ""
    for path in (shipped_path(), user_catalogue_path()):
        tables = read_tables(path)
        if tables is not None:
            default = _merged(path, tables, models, pairs) or default
    if default not in pairs:
        raise CatalogueError(f"The catalogue's default pair {default!r} does not exist.")
    return Catalogue(pairs, default)


def shipped_path() -> Path:
    """Return the path of lspec's own catalogue: in the package, or in a checkout at its root."""
    packaged = Path(__file__).with_name("models.toml")
    # An editable install has no copy inside the package.
    return packaged if packaged.exists() else Path(__file__).parents[1] / "models.toml"


def read_tables(path: Path) -> dict[str, Any] | None:
    """Return the parsed TOML of `path`, None where there is no such file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CatalogueError(
            f"The catalogue {path} cannot be read: {reason(error)}.",
            hint="Correct or remove that file.",
        ) from error


def parse_file(repo: str, filename: str, where: str) -> ModelFile:
    """Return the file `filename` of the repository `repo`, both checked; `where` is for errors."""
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise CatalogueError(f"{where}: {repo!r} is not a hub repository (owner/name).")
    parts = filename.split("/")
    if not all(_FILE_PART.fullmatch(part) for part in parts) or not filename.endswith(".gguf"):
        raise CatalogueError(f"{where}: {filename!r} is not the name of a .gguf file.")
    return ModelFile(repo, filename)


def split_names(filename: str) -> tuple[str, ...]:
    """Return the names of all parts of the split GGUF that `filename` is one of, else itself."""
    match = _SPLIT.fullmatch(filename)
    if not match:
        return (filename,)
    parts = int(match["parts"])
    return tuple(f"{match['stem']}-{n:05}-of-{parts:05}.gguf" for n in range(1, parts + 1))


def _merged(
    path: Path, tables: dict[str, Any], models: dict[str, Model], pairs: dict[str, Pair]
) -> str:
    """Merge, and say of whatever is wrong what to do about it."""
    try:
        return _merge(path, tables, models, pairs)
    except CatalogueError as error:
        error.hint = error.hint or f"Correct {path}, or take out what it says there."
        raise


def _merge(
    path: Path, tables: dict[str, Any], models: dict[str, Model], pairs: dict[str, Pair]
) -> str:
    """Put the content of one catalogue file over `models` and `pairs`; return its default."""
    _only(tables, {"default", "models", "pairs"}, f"{path}")
    for name, table in _named_tables(path, tables, "models"):
        models[name] = _model(name, table, f"{path}: [models.{name}]")
    # A model that a user replaces is replaced in lspec's pairs as well.
    for name, pair in pairs.items():
        pairs[name] = replace(pair, target=models[pair.target.name], draft=models[pair.draft.name])
    for name, table in _named_tables(path, tables, "pairs"):
        pairs[name] = _pair(name, table, models, f"{path}: [pairs.{name}]")
    default = _text(tables, "default", f"{path}", "")
    if default and default not in pairs:
        raise CatalogueError(f"{path}: the default pair {default!r} does not exist.")
    return default


def _named_tables(
    path: Path, tables: dict[str, Any], key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    group = tables.get(key, {})
    if not isinstance(group, dict):
        raise CatalogueError(f"{path}: {key} must be tables, written [{key}.NAME].")
    for name, table in group.items():
        if not NAME.fullmatch(name):
            raise CatalogueError(f"{path}: {name!r} is no name (letters, digits and . _ - only).")
        if not isinstance(table, dict):
            raise CatalogueError(
                f"{path}: {key}.{name} must be a table.",
                hint=f'A name with a dot needs quotes: [{key}."NAME"].',
            )
        yield name, table


def _pair(name: str, table: dict[str, Any], models: Mapping[str, Model], where: str) -> Pair:
    _only(table, {"title", "target", "draft", "note"}, where)
    chosen = {}
    for role in ("target", "draft"):
        key = _text(table, role, where)
        if key not in models:
            raise CatalogueError(f"{where}: there is no model named {key!r} for the {role}.")
        chosen[role] = models[key]
    title = _text(table, "title", where, name)
    return Pair(name, title, chosen["target"], chosen["draft"], _text(table, "note", where, ""))


def _model(name: str, table: dict[str, Any], where: str) -> Model:
    _only(table, {"repo", "licence", "revision", "file", "files", *_FILE_KEYS}, where)
    parts = table.get("files")
    if (parts is None) == ("file" not in table):
        raise CatalogueError(f"{where}: give either `file` or `files`.")
    if parts is None:
        parts = [{key: value for key, value in table.items() if key in {"file", *_FILE_KEYS}}]
    elif not isinstance(parts, list) or len(parts) < 2 or _FILE_KEYS & table.keys():
        raise CatalogueError(f"{where}: `files` must be a list of tables, one for each part.")
    repo, revision = _text(table, "repo", where), _matching(table, "revision", where)
    files = tuple(replace(_file(repo, part, where), revision=revision) for part in parts)
    if len(files) > 1 and any(file.mirror for file in files):
        raise CatalogueError(f"{where}: a split model cannot have a mirror.")
    return Model(name, files, _text(table, "licence", where))


_FILE_KEYS = {"size", "sha256", "mirror"}


def _file(repo: str, table: Any, where: str) -> ModelFile:
    if not isinstance(table, dict):
        raise CatalogueError(f"{where}: each of `files` must be a table.")
    _only(table, {"file", *_FILE_KEYS}, where)
    file = parse_file(repo, _text(table, "file", where), where)
    size, sha256 = table.get("size"), _matching(table, "sha256", where)
    if size is not None and (type(size) is not int or size <= 0):
        raise CatalogueError(f"{where}: size must be a positive whole number.")
    mirror = _mirror(table["mirror"], where) if "mirror" in table else None
    if mirror and (size is None or sha256 is None):
        raise CatalogueError(f"{where}: a mirror needs size and sha256.")
    return replace(file, size=size, sha256=sha256, mirror=mirror)


def _mirror(table: Any, where: str) -> Mirror:
    where = f"{where} mirror"
    if not isinstance(table, dict):
        raise CatalogueError(f"{where}: must be a table with prefix, parts and version.")
    _only(table, {"prefix", "parts", "version"}, where)
    prefix, version = _text(table, "prefix", where), _text(table, "version", where)
    parts = table.get("parts")
    # Both strings reach pip's command line, so nothing that could be an option or an address.
    if not NAME.fullmatch(prefix) or not re.fullmatch(r"[0-9][0-9A-Za-z.+!]*", version):
        raise CatalogueError(f"{where}: prefix or version is not valid.")
    if type(parts) is not int or not 1 <= parts <= 10_000:
        raise CatalogueError(f"{where}: parts must be a whole number from 1 to 10000.")
    return Mirror(prefix, parts, version)


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table.keys() - known:
        hint = f"Known are {', '.join(sorted(known))}."
        if isinstance(table[key], dict):
            hint = 'A name with a dot needs quotes: [pairs."NAME"].'
        raise CatalogueError(f"{where}: unknown key {key!r}.", hint=hint)


def _text(table: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise CatalogueError(f"{where}: {key} must be a text.")
    if _CONTROL.search(value):  # it is shown on terminals
        raise CatalogueError(f"{where}: {key} has a control character.")
    return value


def _matching(table: dict[str, Any], key: str, where: str) -> str | None:
    value = table.get(key)
    pattern, meaning = _PATTERNS[key]
    if value is None or (isinstance(value, str) and pattern.fullmatch(value)):
        return value
    raise CatalogueError(f"{where}: {key} must be {meaning}.")
