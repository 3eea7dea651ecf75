"""What imports what: the layers of the package, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lspec

ROOT = Path(lspec.__file__).parent

# A file imports only files of the lines above its own, or of the same line to the left of it.
LAYERS = """
errors arguments
params distribution truncation sampling round verify model exact widths logprobs costs estimates
theory controller adaptive lookup drafters decoder stats comparison verdict text thinking compat
sizes gguf memory fitting machine devices ranges
paths locks integrity template prompts history turn
llama grammar chats
placement offload
catalogue user_catalogue hub_errors hub index store pull
trial probe planning wanted
measured selfcheck request player aio engine opening loading
bench check dropin doctor
server cli __main__ llm_plugin
"""
ORDER = LAYERS.split()
PURE = set(LAYERS.split("paths")[0].split())
OWNERS = {
    "llama_cpp": {"llama"},
    "huggingface_hub": {"hub"},
    "llguidance": {"grammar"},
    "click": {"cli"},
    "tqdm": {"cli"},
    "matplotlib": {"cli"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server", "llm_plugin"},
    "uvicorn": {"server"},
    "prometheus_client": {"server"},
    "llm": {"llm_plugin"},
    "openai": {"dropin"},
}


def part(path: Path) -> str:
    """Return the name in LAYERS of a source file: its own, or its folder's."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


SOURCES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of everything that is imported, in functions and for types as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def parts_used(path: Path) -> set[str]:
    names = imported(ast.parse(path.read_text(encoding="utf-8")))
    inside = (name.split(".")[1] for name in names if name.startswith("lspec."))
    return {name for name in inside if name in ORDER}  # not lspec.load and the like


def outside(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = {name.split(".")[0] for name in imported(tree)}
    return tops - set(sys.stdlib_module_names) - {"lspec", "__future__"}


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_every_file_has_a_place_in_the_layers(path: Path) -> None:
    assert part(path) in ORDER, f"give {part(path)} its place in LAYERS"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_a_file_imports_only_what_is_above_it(path: Path) -> None:
    own = part(path)
    above = set(ORDER[: ORDER.index(own)])
    allowed = above | ({own} if (ROOT / own).is_dir() else set())
    assert parts_used(path) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_each_outside_library_has_one_importer(path: Path) -> None:
    for library in outside(path):
        assert part(path) in OWNERS.get(library, {part(path)}), f"{library} in {part(path)}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_pure_files_use_numpy_and_the_standard_library_only(path: Path) -> None:
    if part(path) in PURE:
        assert outside(path) <= {"numpy"}


def test_the_checks_see_an_import_inside_a_function(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    lines = ("from lspec import engine", "import lspec.llama", "from click import echo")
    file.write_text("\n    ".join(("def f():", *lines)))
    assert parts_used(file) == {"engine", "llama"}
    assert outside(file) == {"click"}


HEAVY = ("llama_cpp", "numpy", "huggingface_hub", "click", "tqdm", "jinja2", "asyncio", "fastapi")


def loaded_by(code: str) -> set[str]:
    """Return the modules that a fresh process has loaded after `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import lspec; dir(lspec); lspec.LspecError") & set(HEAVY)


def test_looking_up_a_public_class_loads_no_more_than_it_needs() -> None:
    modules = loaded_by("import lspec; lspec.SamplingParams; lspec.Stats")
    assert "numpy" in modules
    assert not modules & {"llama_cpp", "huggingface_hub", "click"}


def test_public_names_exist() -> None:
    for name in lspec.__all__:
        assert getattr(lspec, name).__name__ == name
    assert sorted(lspec.__all__) == dir(lspec)
    with pytest.raises(AttributeError, match="nothing"):
        _ = lspec.nothing  # type: ignore[attr-defined]
