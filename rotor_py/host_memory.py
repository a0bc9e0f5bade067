"""Read how many bytes of host memory this process may use in all, and how many of these are available now."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def host_memory_bytes() -> int:
    # `sysconf` counts the machine's memory, of which a container may be allowed only a part.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *_numbers("memory.max", "memory/memory.limit_in_bytes")])


def available_host_bytes() -> int:
    # MemAvailable, unlike MemFree, counts the page cache, which can be reclaimed. Only Linux has this file.
    free = [1024 * each for each in _cells(Path("/proc/meminfo"), "MemAvailable:")]
    # A container has its own limit. The bytes that it uses include its page cache, which can be reclaimed, too.
    limits = _numbers("memory.max", "memory/memory.limit_in_bytes")
    used = _numbers("memory.current", "memory/memory.usage_in_bytes")
    cached = [*_cells(_GROUP / "memory.stat", "inactive_file"), *_cells(_GROUP / "memory/memory.stat", "inactive_file")]
    free += [limit - held + sum(cached) for limit, held in zip(limits, used, strict=False)]
    return max(0, min([host_memory_bytes(), *free]))


def _numbers(*files: str) -> list[int]:
    """Return the numbers in these cgroup files, of version 2 or 1, that exist. Skip "max", which means no limit."""
    texts = [path.read_text().strip() for each in files if (path := _GROUP / each).is_file()]
    return [int(text) for text in texts if text.isdecimal()]


def _cells(path: Path, name: str) -> list[int]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [int(cells[1]) for cells in map(str.split, lines) if cells[:1] == [name]]
