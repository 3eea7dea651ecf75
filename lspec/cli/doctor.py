"""`lspec doctor`: what a bug report needs to say of an installation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lspec.cli.output import EXIT_FAILED
from lspec.cli.pulling import size_text
from lspec.devices import NEEDS

if TYPE_CHECKING:
    from tqdm import tqdm  # type: ignore[import-untyped]


@click.command()
@click.option(
    "--hash/--no-hash",
    "hashes",
    default=True,
    help="Read the files of pulled pairs and compare their SHA-256 (default).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(*, hashes: bool, as_json: bool) -> int:
    """Tell what a bug report needs to say.

    Versions, what llama-cpp-python was built for, processor and memory, folders, whether the hub
    answers, and which pairs are on the disk, whole or damaged. It can be pasted as it is: it names
    no user, no machine, no token, no address. The exit code is 1 where something is broken.
    """
    from lspec.doctor import examine

    report = examine(hashes=hashes, progress=_Bars().show)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        click.echo("\n".join(lines(report)))
    return EXIT_FAILED if any(problems(report)) else 0


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield what people read."""
    versions = dict(report["versions"])
    yield f"lspec {versions.pop('lspec')}, Python {versions.pop('python')}, {report['system']}"
    there = [f"{name} {version}" for name, version in versions.items() if version]
    yield ", ".join(there)
    yield ""
    yield from _machine(report)
    yield ""
    yield from _build(report["llama_cpp"])
    yield ""
    for name, folder in report["folders"].items():
        state = "" if folder["writable"] else ", cannot be written"
        free = "?" if folder["free"] is None else f"{size_text(folder['free'])} free"
        yield f"{name:12} {folder['path']}, {free}{state}"
    yield f"{'variables':12} {', '.join(report['settings']) or 'none'}"
    if report["hub"]:
        yield from _hub(report["hub"])
    for pair in report["pairs"]:
        yield from ("", *_pair(pair))
    found = [*problems(report)]
    yield from ("", *(f"Problem: {problem}" for problem in found)) if found else ()


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Yield what is broken, each in a sentence with what to do."""
    if problem := report["llama_cpp"]["problem"]:
        yield f"llama-cpp-python cannot be loaded: {problem}. Install it anew."
    if problem := report["catalogue_problem"]:
        yield problem
    for name, folder in report["folders"].items():
        if not folder["writable"]:
            yield f"the folder of the {name} cannot be written: change its permissions."
    for pair in report["pairs"]:
        bad = [file["name"] for file in pair["files"] if file["state"] == "damaged"]
        for file in dict.fromkeys(bad):
            yield f"{file} is damaged: `lspec rm {pair['name']}`, then `lspec pull {pair['name']}`."


def _machine(report: dict[str, Any]) -> Iterator[str]:
    cpu, memory = report["cpu"], report["memory"]
    threads = f"{cpu['threads']} threads of {cpu['processors']} processors"
    yield f"{'CPU':12} {cpu['name'] or 'unknown'}, {threads}"
    if cpu["flags"]:
        yield f"{'':12} {' '.join(cpu['flags'])}"
    yield f"{'memory':12} {size_text(memory['total'])}, {size_text(memory['free'])} free"


def _build(build: dict[str, Any]) -> Iterator[str]:
    if build["problem"]:
        yield "llama-cpp-python cannot be loaded."
        return
    yield f"{'llama.cpp':12} {build['features']}"
    for i, gpu in enumerate(build["gpus"]):
        memory = f"{size_text(gpu['memory_total'])}, {size_text(gpu['memory_free'])} free"
        yield f"{f'GPU {i}':12} {gpu['description']} ({gpu['name']}), {memory}"
    for gpu in build["unused"]:
        yield f"{'GPU':12} {gpu['name']}, not used"
    for backend, command in build["commands"].items():
        yield f"{'':12} with {NEEDS[backend]}: {command}"
    if not build["gpus"] and not build["unused"]:
        unnamed = build.get("unnamed")  # the library does not list what it uses
        yield f"{'GPU':12} {'in use' if unnamed else 'none'}"


def _hub(hub: dict[str, Any]) -> Iterator[str]:
    answer = "offline by HF_HUB_OFFLINE" if hub["offline"] else hub["problem"] or "answers"
    yield f"{'hub':12} {answer.rstrip('.')}; {'a' if hub['token'] else 'no'} token is set"


def _pair(pair: dict[str, Any]) -> Iterator[str]:
    default = " (default)" if pair["default"] else ""
    state = "pulled" if pair["pulled"] else "not pulled"
    yield f"{pair['name']}{default}: {state}"
    for file in pair["files"]:
        state = {"unknown": "not compared"}.get(file["state"], file["state"])
        yield f"  {file['name']}, {size_text(file['size'])}, {file['sha256']}: {state}"
    for name in pair["missing"]:
        yield f"  {name}: not there"


class _Bars:
    """A progress bar on stderr for the file that is read, where that is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._name = ""

    def show(self, name: str, done: int, size: int) -> None:
        """Show that `done` of `size` bytes of the file have been read."""
        if not sys.stderr.isatty():
            return
        if self._bar and name != self._name:  # the last file could not be read to its end
            self._bar.close()
            self._bar = None
        if self._bar is None:
            from tqdm import tqdm

            self._name = name
            # Gone when it is full: the report is what stays.
            self._bar = tqdm(
                total=size, desc=name, unit="B", unit_scale=True, leave=False, file=sys.stderr
            )
        self._bar.update(done - self._bar.n)
        if done == size:
            self._bar.close()
            self._bar = None
