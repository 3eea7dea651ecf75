from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hub_server import COMMIT, Hub, Served, running_hub
from hub_world import NOWHERE, all_files, gguf_bytes, isolate, run_python
from huggingface_hub import constants

from lspec import hub, integrity
from lspec.errors import DownloadError
from lspec.gguf import read_header
from lspec.hub_errors import HubUnreachableError

REPO, NAME = "owner/big", "big.gguf"
DATA = gguf_bytes(20_000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        isolate(monkeypatch, tmp_path, server.endpoint)
        yield server


def fetch(served: Served) -> Path:
    remote = hub.describe(REPO, NAME)
    return hub.download(remote, sha256=served.sha256)


def test_file_is_described_without_being_fetched(server: Hub) -> None:
    served = server.add(REPO, NAME, DATA)
    remote = hub.describe(REPO, NAME)
    assert (remote.commit, remote.size, remote.sha256) == (COMMIT, len(DATA), served.sha256)
    assert [method for method, *_ in server.asked] == ["HEAD"]


def test_downloaded_file_lies_in_the_hub_cache_under_commit_and_name(server: Hub) -> None:
    path = fetch(server.add(REPO, NAME, DATA))
    assert path.read_bytes() == DATA
    assert path == hub.snapshots(REPO, None)[0] / NAME
    assert path.parent.name == COMMIT


def test_token_goes_to_the_hub_and_not_to_its_storage(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(server.add(REPO, NAME, DATA))
    for _, path, headers in server.asked:
        assert ("authorization" in headers) == (not path.startswith("/storage/"))


def test_progress_counts_up_to_the_size(server: Hub) -> None:
    served = server.add(REPO, NAME, DATA)
    seen: list[int] = []
    hub.download(hub.describe(REPO, NAME), sha256=served.sha256, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(DATA)


def test_connection_cut_half_way_is_resumed_in_the_same_call(server: Hub) -> None:
    path = fetch(server.add(REPO, NAME, DATA, cuts=[10_500]))
    assert path.read_bytes() == DATA
    assert server.ranges() == [None, "bytes=10000-"]


def test_server_that_ignores_ranges_sends_the_whole_file_again(server: Hub) -> None:
    path = fetch(server.add(REPO, NAME, DATA, cuts=[10_500], ranges=False))
    assert path.read_bytes() == DATA


def test_connection_that_stays_broken_is_an_error_and_the_next_run_goes_on(server: Hub) -> None:
    served = server.add(REPO, NAME, DATA, cuts=[10_500] + [0] * 8)
    with pytest.raises(DownloadError, match=r"broke in the middle of big\.gguf") as caught:
        fetch(served)
    assert "goes on where it stopped" in caught.value.hint
    assert all_files(Path(constants.HF_HUB_CACHE)) == [f"{served.sha256}.lspec.incomplete"]
    served.cuts.clear()
    server.asked.clear()
    assert fetch(served).read_bytes() == DATA
    assert server.ranges() == ["bytes=10000-"]


def test_killed_download_leaves_no_final_name_and_is_continued(server: Hub, tmp_path: Path) -> None:
    served = server.add(REPO, NAME, DATA)
    code = f"""
import os, signal
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1000
from lspec import hub
def die(done):
    if done >= 10_000:
        os.kill(os.getpid(), signal.SIGKILL)
hub.download(hub.describe({REPO!r}, {NAME!r}), sha256={served.sha256!r}, progress=die)
"""
    assert run_python(code, tmp_path, server.endpoint).returncode == -signal.SIGKILL
    assert all_files(tmp_path / "hub") == [f"{served.sha256}.lspec.incomplete"]
    assert not hub.snapshots(REPO, None)
    server.asked.clear()
    assert fetch(served).read_bytes() == DATA
    assert server.ranges() == ["bytes=10000-"]
    assert all_files(tmp_path / "hub") == [NAME, served.sha256]


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><p>Log in</p>", b"\n <html></html>"])
def test_web_page_in_place_of_the_model_is_an_error_and_deleted(
    server: Hub, page: bytes, tmp_path: Path
) -> None:
    served = server.add(REPO, NAME, DATA)
    served.sent = page
    with pytest.raises(DownloadError, match="a web page arrived"):
        fetch(served)
    assert all_files(tmp_path / "hub") == []


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (gguf_bytes(20_000, seed=1), "has the SHA-256"),
        (gguf_bytes(19_000), "has 19,000 bytes where 20,000 are expected"),
        (b"GGML" + DATA[4:], "is not a GGUF file"),
    ],
)
def test_wrong_content_never_gets_a_final_name(
    server: Hub, tmp_path: Path, sent: bytes, complaint: str
) -> None:
    served = server.add(REPO, NAME, DATA)
    served.sent = sent
    with pytest.raises(DownloadError, match=complaint):
        fetch(served)
    assert all_files(tmp_path / "hub") == []
    served.sent = DATA
    assert fetch(served).read_bytes() == DATA


def test_damaged_blob_is_replaced(server: Hub) -> None:
    served = server.add(REPO, NAME, DATA)
    path = fetch(served)
    path.resolve().write_bytes(DATA[:-1] + b"x")
    assert fetch(served).read_bytes() == DATA


@pytest.mark.parametrize(
    ("status", "code", "complaint", "hint"),
    [
        (401, "GatedRepo", "owner/big is gated", "Accept the terms at"),
        (403, "GatedRepo", "owner/big is gated", "HF_TOKEN"),
        (401, "RepoNotFound", "no repository owner/big", "HF_TOKEN"),
        (401, "", r"valid access token to read owner/big \(401\)", "HF_TOKEN"),
        (403, "", r"forbids reading owner/big \(403\)", "HF_TOKEN"),
        (404, "", r"owner/big has no file big\.gguf", "/owner/big/tree/main"),
        (404, "EntryNotFound", r"owner/big has no file big\.gguf", "/owner/big/tree/main"),
        (404, "RevisionNotFound", "no longer has the commit", ""),
        (400, "", "answered 400", ""),
    ],
)
def test_refusal_of_the_hub_says_what_to_do(
    server: Hub, status: int, code: str, complaint: str, hint: str
) -> None:
    server.add(REPO, NAME, DATA, status=status, error_code=code)
    with pytest.raises(DownloadError, match=complaint) as caught:
        hub.describe(REPO, NAME)
    assert hint in caught.value.hint
    assert not isinstance(caught.value, HubUnreachableError)


def test_repository_that_does_not_exist_is_an_error(server: Hub) -> None:
    with pytest.raises(DownloadError, match="no repository owner/big, or it is private"):
        hub.describe(REPO, NAME)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_hub_in_trouble_counts_as_out_of_reach(server: Hub, status: int) -> None:
    server.add(REPO, NAME, DATA, status=status)
    with pytest.raises(HubUnreachableError, match=f"answered {status}"):
        hub.describe(REPO, NAME)
    assert len(server.asked) == 1


def test_something_else_in_place_of_the_hub_counts_as_out_of_reach(server: Hub) -> None:
    server.add(REPO, NAME, DATA, is_hub=False)
    with pytest.raises(HubUnreachableError, match="does not answer as the hub does"):
        hub.describe(REPO, NAME)


@pytest.mark.parametrize("endpoint", [NOWHERE, "http://[bad", "nonsense"])
def test_hub_out_of_reach_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    isolate(monkeypatch, tmp_path, endpoint)
    with pytest.raises(HubUnreachableError, match=r"^The hub at .* cannot be reached: .*\.\n"):
        hub.describe(REPO, NAME)


def test_offline_switch_forbids_asking(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(REPO, NAME, DATA)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids") as caught:
        hub.describe(REPO, NAME)
    assert not isinstance(caught.value, HubUnreachableError)
    assert server.asked == []


def test_full_disk_is_said_to_be_full(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.add(REPO, NAME, DATA)

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(integrity.HashingFile, "write", full)
    with pytest.raises(DownloadError, match=r"disk is full; big\.gguf could not be written"):
        fetch(served)


def test_fault_of_our_own_is_not_disguised(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.add(REPO, NAME, DATA)

    def broken(*args: object) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(integrity.HashingFile, "write", broken)
    with pytest.raises(TypeError, match="a bug"):
        fetch(served)


def test_licence_is_the_one_that_the_repository_names(server: Hub) -> None:
    assert hub.licence(REPO) == "mit"


def test_removing_a_file_leaves_the_others_of_its_repository(server: Hub, tmp_path: Path) -> None:
    path = fetch(server.add(REPO, NAME, DATA))
    other = server.add(REPO, "other.gguf", gguf_bytes(5_000, seed=2))
    hub.download(hub.describe(REPO, "other.gguf"), sha256=other.sha256)
    hub.remove(REPO, [path])
    assert all_files(tmp_path / "hub") == [other.sha256, "other.gguf"]


def test_removing_the_last_file_removes_the_repository(server: Hub, tmp_path: Path) -> None:
    path = fetch(server.add(REPO, NAME, DATA))
    hub.remove(REPO, [path])
    assert not (tmp_path / "hub" / "models--owner--big").exists()


def test_damaged_cache_is_not_guessed_at(server: Hub, tmp_path: Path) -> None:
    path = fetch(server.add(REPO, NAME, DATA))
    (tmp_path / "hub" / "models--owner--big" / "snapshots" / "stray").write_text("")
    with pytest.raises(DownloadError, match="cache of owner/big is damaged"):
        hub.remove(REPO, [path])
    assert path.exists()


# -- headers --


def test_header_is_read_without_fetching_the_file(server: Hub, chat_model: Path) -> None:
    whole = read_header(chat_model)
    data = chat_model.read_bytes() + bytes(20 << 20)
    server.add(REPO, NAME, data)
    remote = hub.describe(REPO, NAME)
    server.asked.clear()
    assert hub.read_header(remote) == whole
    assert server.parts() == [f"bytes=0-{(4 << 20) - 1}"]
    assert server.ranges() == []


def test_header_longer_than_a_block_takes_another(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", ["x" * (5 << 20), "y"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    server.add(REPO, NAME, path.read_bytes())
    assert hub.read_header(hub.describe(REPO, NAME)) == read_header(path)
    assert len(server.parts()) == 2


def test_server_that_sends_no_parts_is_not_read(server: Hub, chat_model: Path) -> None:
    server.add(REPO, NAME, chat_model.read_bytes(), ranges=False)
    with pytest.raises(HubUnreachableError, match="sends no parts"):
        hub.read_header(hub.describe(REPO, NAME))


def test_header_of_something_else_is_an_error(server: Hub) -> None:
    server.add(REPO, NAME, DATA)
    with pytest.raises(DownloadError, match=r"big\.gguf is no GGUF file"):
        hub.read_header(hub.describe(REPO, NAME))
