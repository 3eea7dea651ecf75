"""How many cores may be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lspec import machine


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine of 8 processors, two to a core; its files can be changed."""
    files = {
        f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n"
        for i in range(8)
    }

    def read_text(self: Path) -> str:
        try:
            return files[str(self)]
        except KeyError:
            raise FileNotFoundError(str(self)) from None

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return files


def test_this_machine_has_a_sensible_number() -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)


def test_two_threads_of_a_core_count_once(computer: dict[str, str]) -> None:
    assert machine.usable_cores() == 4


@pytest.mark.parametrize(("allowed", "cores"), [({0}, 1), ({0, 4}, 1), ({0, 1}, 2), ({1, 5, 6}, 2)])
def test_only_processors_that_this_process_may_use_count(
    computer: dict[str, str], monkeypatch: pytest.MonkeyPatch, allowed: set[int], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("50000 100000", 1), ("250000 100000", 2), ("max 100000", 4)],
)
def test_a_containers_quota_counts(computer: dict[str, str], quota: str, cores: int) -> None:
    computer["/sys/fs/cgroup/cpu.max"] = quota + "\n"
    assert machine.usable_cores() == cores


def test_system_that_does_not_tell(
    computer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.usable_cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


def test_allowed_processors_and_quota_count_where_cores_are_unknown(
    computer: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    computer.clear()
    assert machine.usable_cores() == 3
    computer["/sys/fs/cgroup/cpu.max"] = "200000 100000\n"
    assert machine.usable_cores() == 2
