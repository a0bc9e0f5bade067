"""Host memory that the process may use: in total, and currently free."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory_bytes() -> int:
    # A container may have less than the machine, but the system call only knows the machine.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, _group_limit() or memory)


def available_host_bytes() -> int:
    # MemAvailable, not MemFree: the page cache can be reclaimed. Systems other than Linux have neither.
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([host_memory_bytes(), *free])


def _group_limit() -> int | None:
    # Control groups of version 2, then of version 1. Without a limit, version 2 says "max", which is no number.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None
