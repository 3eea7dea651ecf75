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


# -- memory --

GB = 1 << 30


def group_2(files: dict[str, str], name: str, most: str, used: int, cached: int = 0) -> None:
    """Put a control group of version 2 onto the machine."""
    folder = f"/sys/fs/cgroup{name}"
    files[f"{folder}/memory.max"] = f"{most}\n"
    files[f"{folder}/memory.current"] = f"{used}\n"
    files[f"{folder}/memory.stat"] = f"anon 1\nactive_file {cached}\ninactive_file 0\n"


def group_1(files: dict[str, str], name: str, most: int, used: int, cached: int = 0) -> None:
    folder = f"/sys/fs/cgroup/memory{name}"
    files[f"{folder}/memory.limit_in_bytes"] = f"{most}\n"
    files[f"{folder}/memory.usage_in_bytes"] = f"{used}\n"
    files[f"{folder}/memory.stat"] = f"cache 9\ntotal_inactive_file {cached}\n"


@pytest.fixture
def free(computer: dict[str, str]) -> dict[str, str]:
    """A machine with 16 GB, of which programs may take 12."""
    computer["/proc/meminfo"] = f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\nHuge: 0\n"
    return computer


def test_this_machine_has_free_memory() -> None:
    memory = machine.free_memory()
    assert memory is None or memory > 10**7


def test_memory_that_programs_may_take_is_free(free: dict[str, str]) -> None:
    assert machine.free_memory() == 12 * GB
    del free["/proc/meminfo"]
    assert machine.free_memory() is None
    free["/proc/meminfo"] = "MemTotal: 1 kB\n"  # an old kernel
    assert machine.free_memory() is None


def test_limit_of_a_control_group_counts(free: dict[str, str]) -> None:
    free["/proc/self/cgroup"] = "0::/\n"
    group_2(free, "", str(4 * GB), 3 * GB, cached=GB)
    assert machine.free_memory() == 2 * GB
    group_2(free, "", "max", 3 * GB)
    assert machine.free_memory() == 12 * GB
    group_2(free, "", str(4 * GB), 5 * GB)
    assert machine.free_memory() == 0


def test_limits_of_all_groups_above_count(free: dict[str, str]) -> None:
    free["/proc/self/cgroup"] = "0::/user/session\n"
    group_2(free, "/user/session", str(9 * GB), GB)
    group_2(free, "/user", str(5 * GB), 2 * GB)
    assert machine.free_memory() == 3 * GB


@pytest.mark.parametrize("name", ["", "/docker/123"])
def test_limit_of_the_first_version_counts(free: dict[str, str], name: str) -> None:
    free["/proc/self/cgroup"] = "9:name=systemd:/\n4:cpu,memory:/docker/123\n0::/\n"
    group_1(free, name, 6 * GB, 4 * GB, cached=GB)
    assert machine.free_memory() == 3 * GB
    group_1(free, name, 9223372036854771712, 4 * GB)
    assert machine.free_memory() == 12 * GB
