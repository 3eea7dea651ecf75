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
