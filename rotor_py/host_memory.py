"""The memory of this machine that the process may use: all of it, and what nobody else has taken."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory_bytes() -> int:
    """All the memory that this process may use."""
    # A container may have less than the machine; the machine's number is all that the system call gives.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, _group_limit() or memory)


def available_host_bytes() -> int:
    """What this process can have besides what it has."""
    return min(_free_memory() or host_memory_bytes(), host_memory_bytes())


def _group_limit() -> int | None:
    """The limit that a container sets, if there is one."""
    # Control groups of version 2, then of version 1. Without a limit, the first says "max", which is no number.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None


def _free_memory() -> int | None:
    # MemAvailable, not MemFree: the page cache gives way to whoever allocates. Systems other than Linux have neither.
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
