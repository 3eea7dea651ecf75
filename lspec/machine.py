"""What this process may use of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_MEMORY = "/proc/meminfo"
# Where control groups are; of each the files of its limit and its use; counts of what is cached.
_GROUPS_2 = (
    "/sys/fs/cgroup",
    "memory.max",
    "memory.current",
    ("active_file", "inactive_file"),
)
_GROUPS_1 = (
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def usable_cores() -> int:
    """Return the number of physical cores that this process may run on, at least 1.

    Two hardware threads of one core count once: llama.cpp's kernels gain nothing from the second.
    Where the system does not tell (not Linux), it is the number of logical processors.
    """
    try:
        processors = os.sched_getaffinity(0)
    except AttributeError:
        return os.cpu_count() or 1
    try:
        cores = len({Path(_TOPOLOGY.format(cpu)).read_text() for cpu in processors})
    except OSError:
        cores = len(processors)
    return max(1, min(cores, _quota()))


def _quota() -> int:
    """Return the whole processors of the control group's quota (a container's limit)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return os.cpu_count() or 1


def total_memory() -> int | None:
    """Return the bytes of memory that the machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def free_memory() -> int | None:
    """Return the bytes that this process may still take without anybody having to swap.

    Pages that only cache files count as free. Of the system's memory and the limits of all control
    groups that this process is in, the least. None where the system does not tell (not Linux).
    """
    try:
        system = _fields(_MEMORY)["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        return None
    return min([system, *_room_in_groups()])


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file of lines that begin with a name and a number."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _room_in_groups() -> Iterator[int]:
    """Yield what is left of the memory limit of each control group, of versions 1 and 2."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:
            root, limit, usage, cached = _GROUPS_2
        elif "memory" in controllers.split(","):
            root, limit, usage, cached = _GROUPS_1
        else:
            continue
        path = PurePosixPath(name)
        # Inside a container the name may be that of the host, where only the root is to be seen.
        for group in dict.fromkeys(map(str, (path, *path.parents, "/"))):
            folder = root + group.rstrip("/")
            with suppress(OSError, ValueError):  # no such file, or "max"
                most = int(Path(f"{folder}/{limit}").read_text())
                used = int(Path(f"{folder}/{usage}").read_text())
                counts = _fields(f"{folder}/memory.stat")
                yield max(0, most - used + sum(counts.get(key, 0) for key in cached))
