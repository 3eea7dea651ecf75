"""What this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


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
    """Return the bytes that programs may still take; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvail")) * 1024
    except (OSError, ValueError, StopIteration):
        return None
