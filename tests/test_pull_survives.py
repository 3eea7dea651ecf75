"""Pulls under fire: killed, crowded, cut, stalled, lied to, out of space."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_server
import pytest
from hub_server import Hub, Served, is_part, running_hub
from hub_world import (
    BIG,
    CATALOGUE,
    ROOT,
    SMALL,
    all_files,
    environment,
    isolate,
    plain_pair,
    write_catalogue,
)
from huggingface_hub import constants

from lspec import store
from lspec.catalogue import Pair
from lspec.errors import DownloadError
from lspec.pull import pull

Handler = hub_server._Handler
Trouble = Callable[[Handler, Served], None]


@pytest.fixture
def troubles(monkeypatch: pytest.MonkeyPatch) -> list[Trouble]:
    """What the storage does in place of sending a file, one for each time that it is asked."""
    waiting: list[Trouble] = []

    class Troubled(Handler):
        def _send_content(self, file: Served) -> None:
            if waiting and not is_part(self.headers.get("Range")):
                waiting.pop(0)(self, file)
            else:
                super()._send_content(file)

    monkeypatch.setattr(hub_server, "_Handler", Troubled)
    return waiting


@pytest.fixture
def server(
    troubles: list[Trouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with running_hub() as server:
        isolate(monkeypatch, tmp_path, server.endpoint)
        server.add("owner/big", "big.gguf", BIG)
        server.add("owner/small", "small.gguf", SMALL)
        yield server


@pytest.fixture
def tiny_hub(server: Hub, tmp_path: Path, chat_model: Path, chat_draft: Path) -> Hub:
    """A hub with a pair that can be loaded, and a catalogue that names it."""
    write_catalogue(tmp_path, CATALOGUE)
    server.add("owner/big", "big.gguf", chat_model.read_bytes())
    server.add("owner/small", "small.gguf", chat_draft.read_bytes())
    return server


def is_whole(tmp_path: Path) -> bool:
    """Return whether the pair is on the disk, and nothing else."""
    files = store.locate_pair(plain_pair())
    assert files is not None
    right = [path.read_bytes() for path in (*files.target, *files.draft)] == [BIG, SMALL]
    return right and len(all_files(tmp_path / "hub")) == 4


def partial(tmp_path: Path) -> bytes:
    """What an interrupted pull has left; it must be all that it has left."""
    (name,) = all_files(tmp_path / "hub")
    assert name.endswith(".lspec.incomplete")
    (path,) = (tmp_path / "hub").rglob(name)
    return path.read_bytes()


# -- several at once --


def lspec(tmp_path: Path, server: Hub, *args: str) -> subprocess.Popen[str]:
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}  # however busy this machine is
    return subprocess.Popen(
        [sys.executable, "-m", "lspec", *args],
        env=os.environ | environment(tmp_path, server.endpoint) | patient,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_pull_the_same_pair_one_waits_and_both_end_right(
    tiny_hub: Hub, troubles: list[Trouble], tmp_path: Path
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold(handler: Handler, file: Served) -> None:
        asked.set()
        go_on.wait()
        handler._send_content(file)

    troubles.append(hold)
    try:
        first = lspec(tmp_path, tiny_hub, "pull")
        asked.wait()
        second = lspec(tmp_path, tiny_hub, "pull", "tiny")
        assert second.stderr is not None
        while "Another process is fetching big.gguf; waiting." not in second.stderr.readline():
            assert second.poll() is None
    finally:
        go_on.set()
    for process in (first, second):
        _, log = process.communicate()
        assert process.returncode == 0, log
        assert "tiny: files checked, vocabularies match" in log
        assert log.endswith("Next: lspec chat\n")
    assert tiny_hub.ranges() == [None, None]  # each file was fetched once


# -- killed --

KILLS = """
import hashlib, importlib, os, random, shutil, signal, sys
from pathlib import Path
from huggingface_hub import constants
from lspec import hub, index, integrity, store
from lspec.catalogue import *
from lspec.pull import pull

constants.DOWNLOAD_CHUNK_SIZE = 1000
os.fsync = lambda file: None  # the machine does not lose power, and a busy disk takes seconds
PAIR, SOURCE, KILLS, PLACE = {pair!r}, {source!r}, {kills}, Path({place!r})

def attempt(last):
    '''Pull in another process that kills itself at step `last`.

    Return its exit code, the number of its steps, and the modules that it has imported.
    '''
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        steps = 0
        def step(*args):
            nonlocal steps
            steps += 1
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(step)  # files opened, renamed, linked; connections, processes, imports
        pull(PAIR, SOURCE, progress=step)
        with os.fdopen(writer, "w") as pipe:
            print(steps, *sys.modules, file=pipe)
        os._exit(0)
    os.close(writer)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(reader) as pipe:
        steps, *modules = pipe.read().split() or ["0"]
    return code, int(steps), modules

def check():
    '''Every file under a final name is the right one.'''
    digests = {{file.sha256: file.filename for model in PAIR.models for file in model.files}}
    found = [path for path in PLACE.rglob("*") if path.is_file()]
    for path in found:
        if path.suffix == ".gguf" or path.parent.name == "blobs" and path.suffix != ".incomplete":
            assert hashlib.sha256(path.read_bytes()).hexdigest() in digests, path

rng = random.Random(1)
for name in attempt(0)[2]:
    importlib.import_module(name)  # which is most of the steps, and no part of a pull
shutil.rmtree(PLACE)
code, steps, _ = attempt(0)
assert code == 0, code
kills = 0
while kills < KILLS:
    if store.locate_pair(PAIR):
        shutil.rmtree(PLACE)
    code, *_ = attempt(rng.randrange(1, steps))
    assert code in (0, -signal.SIGKILL), code
    kills += code != 0
    check()
assert attempt(0)[0] == 0
check()
assert store.locate_pair(PAIR)
print("survived", kills)
"""


def survive_kills(pair: Pair, source: str, kills: int, tmp_path: Path, endpoint: str) -> None:
    code = KILLS.format(pair=pair, source=source, kills=kills, place=str(tmp_path / "place"))
    env = os.environ | environment(tmp_path / "place", endpoint)
    env["FAKE_INDEX"] = str(tmp_path / "wheels")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"survived {kills}\n"


def test_pull_killed_at_20_random_moments_ends_verified(server: Hub, tmp_path: Path) -> None:
    survive_kills(plain_pair(), "hub", 20, tmp_path, server.endpoint)


def test_pull_from_the_mirror_killed_at_random_moments_ends_verified(
    mirrored: Pair, tmp_path: Path
) -> None:
    survive_kills(mirrored, "index", 8, tmp_path, constants.ENDPOINT)


# -- out of space --


class FullDisk(io.FileIO):
    """A file on a disk that has room for 10,500 bytes."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        room = 10_500 - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:room])


def test_disk_that_fills_up_is_an_error_with_numbers_and_the_pull_goes_on_later(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        opened = Path.open

        def opening(path: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
            return FullDisk(path, "r+") if mode == "r+b" else opened(path, mode, *args, **kwargs)

        patch.setattr(Path, "open", opening)
        with pytest.raises(DownloadError, match=r"disk is full; big\.gguf could not") as caught:
            pull(plain_pair())
    assert "10,500 of 20,000 bytes are in /" in str(caught.value)
    assert "goes on where it stopped" in caught.value.hint
    assert partial(tmp_path) == BIG[:10_500]
    server.asked.clear()
    pull(plain_pair())
    assert server.ranges() == ["bytes=10500-", None]
    assert is_whole(tmp_path)


def test_file_larger_than_the_system_allows_is_an_error_of_the_command(
    tiny_hub: Hub, tmp_path: Path
) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "lspec", "pull"],
        env=os.environ | environment(tmp_path, tiny_hub.endpoint),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert (process.returncode, process.stdout) == (1, "")
    assert "error: big.gguf could not be stored: [Errno 27] File too large" in process.stderr
    assert "Traceback" not in process.stderr
    assert len(partial(tmp_path)) == 50_000
    with lspec(tmp_path, tiny_hub, "pull") as again:
        assert again.wait() == 0
    assert tiny_hub.ranges() == [None, "bytes=50000-", None]


def test_cache_that_cannot_be_made_is_an_error_before_anything_is_fetched(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(DownloadError, match=r"big\.gguf could not be stored: .*/dev/null/lspec"):
        pull(plain_pair())
    assert server.ranges() == []


# -- a server in trouble --


def begin(handler: Handler, file: Served, *, length: int, upto: int) -> None:
    """Send the headers for a body of `length` bytes and `upto` bytes of the file."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(file.sent[:upto])
    handler.close_connection = True


def stall(handler: Handler, file: Served) -> None:
    """Send half of the file, then nothing until the other side gives up."""
    begin(handler, file, length=len(file.sent), upto=10_500)
    handler.rfile.read(1)


def reset(handler: Handler, file: Served) -> None:
    """Send half of the file, then tear the connection down."""
    begin(handler, file, length=len(file.sent), upto=10_500)
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.rfile.close()
    handler.connection.close()


def end_early(handler: Handler, file: Served) -> None:
    """Send half of the file without a word of its length, then end as if that were all."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(file.sent[:10_500])
    handler.close_connection = True


def never_end(handler: Handler, file: Served) -> None:
    """Send noise without end: here, 50 MB."""
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    try:
        for _ in range(50):
            handler.wfile.write(b"GGUF" * 250_000)
    except OSError:
        return
    raise AssertionError("all of it was taken")


def refuse(status: int) -> Trouble:
    return lambda handler, file: handler._send(status, b"", {})


def log_in(handler: Handler, file: Served) -> None:
    """Answer like the log-in page of a hotel."""
    handler._send(200, b"<html>Room number, please</html>", {})


def test_server_that_stalls_is_asked_again_for_the_rest(
    server: Hub, troubles: list[Trouble], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    troubles += [stall]
    pull(plain_pair())
    assert server.ranges() == [None, "bytes=10000-", None]
    assert is_whole(tmp_path)


def test_connection_that_is_torn_down_is_an_error_and_the_next_pull_goes_on(
    server: Hub, troubles: list[Trouble], tmp_path: Path
) -> None:
    troubles += [reset] * 9
    with pytest.raises(DownloadError, match=r"broke in the middle of big\.gguf: ") as caught:
        pull(plain_pair())
    assert "goes on where it stopped" in caught.value.hint
    troubles.clear()
    left = partial(tmp_path)
    assert BIG.startswith(left)
    pull(plain_pair())
    assert server.ranges()[-2:] == [f"bytes={len(left)}-" if left else None, None]
    assert is_whole(tmp_path)


@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        (refuse(403), r"forbids reading owner/big \(403\)"),
        (refuse(404), r"owner/big has no file big\.gguf"),
        (refuse(416), r"answered 416 for big\.gguf"),
        (refuse(500), r"answered 500 for big\.gguf"),
        (log_in, "a web page arrived"),
        (end_early, "has 10,500 bytes where 20,000 are expected"),
        (never_end, r"More than the 20,000 bytes of big\.gguf arrived"),
    ],
)
def test_storage_that_refuses_or_lies_is_one_sentence_and_the_next_pull_is_whole(
    server: Hub, troubles: list[Trouble], tmp_path: Path, trouble: Trouble, complaint: str
) -> None:
    troubles += [trouble]
    with pytest.raises(DownloadError, match=complaint) as caught:
        pull(plain_pair())
    assert re.fullmatch(r"[^\n]+", str(caught.value))
    assert not [name for name in all_files(tmp_path / "hub") if not name.endswith(".incomplete")]
    pull(plain_pair())
    assert is_whole(tmp_path)


@pytest.mark.parametrize("trouble", [refuse(403), log_in, never_end])
def test_trouble_with_the_rest_of_a_file_does_not_spoil_the_next_pull(
    server: Hub, troubles: list[Trouble], tmp_path: Path, trouble: Trouble
) -> None:
    big = server.files["owner/big", "big.gguf"]
    big.cuts = [10_500] + [0] * 9
    with pytest.raises(DownloadError):
        pull(plain_pair())
    big.cuts.clear()
    assert partial(tmp_path) == BIG[:10_000]
    troubles += [trouble]
    with pytest.raises(DownloadError):
        pull(plain_pair())
    pull(plain_pair())
    assert is_whole(tmp_path)


def test_partial_file_that_was_damaged_on_the_disk_is_fetched_anew(
    server: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "hub" / "models--owner--big" / "blobs"
    folder.mkdir(parents=True)
    left = folder / f"{hashlib.sha256(BIG).hexdigest()}.lspec.incomplete"
    left.write_bytes(bytes(10_000))
    with pytest.raises(DownloadError, match="is not a GGUF file"):
        pull(plain_pair())
    left.write_bytes(b"too long" * 10_000)
    pull(plain_pair())
    assert is_whole(tmp_path)


def test_repository_that_was_renamed_is_followed(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Handler._resolve

    def moved(handler: Handler, path: str) -> None:
        if path.startswith("/owner/big/"):
            new = path.replace("/owner/big/", "/owner/new/")
            handler._send(307, b"", {"Location": new})
        else:
            resolve(handler, path)

    monkeypatch.setattr(Handler, "_resolve", moved)
    server.add("owner/new", "big.gguf", BIG)
    pull(plain_pair())
    assert is_whole(tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "complaint", "hint"),
    [
        (401, "GatedRepo", "owner/big is gated", "Accept the terms at"),
        (403, "GatedRepo", "owner/big is gated", "Accept the terms at"),
        (404, "RepoNotFound", "has no repository owner/big", "Check the name"),
    ],
)
def test_command_tells_what_a_gated_or_missing_repository_needs(
    tiny_hub: Hub, tmp_path: Path, status: int, code: str, complaint: str, hint: str
) -> None:
    big = tiny_hub.files["owner/big", "big.gguf"]
    big.status, big.error_code = status, code
    with lspec(tmp_path, tiny_hub, "pull") as process:
        _, log = process.communicate()
    assert process.returncode == 1
    _, first, second = log.splitlines()
    assert complaint in first
    assert hint in second
    assert all_files(tmp_path / "hub") == []
