"""What a device has to give, and how many of its bytes a limit stands for."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

import torch

from rotor_profiling.instruments import prediction
from rotor_py.units import format_bytes, parse_bytes

_log = logging.getLogger("rotor_py")

DEFAULT_SHARE = 0.9
"""The part of what the device can give this process that is used if no limit is set. A guess: the other tenth is for
fragmentation, which no plan knows of."""


def limit_bytes(limit: float | str | None, device: torch.device) -> int:
    """The bytes that a limit stands for on `device`: a number of bytes, `4GB`, `512MiB`, or `80%` of all its memory.

    None stands for 90 % of what the device can give this process now. ValueError for anything else, and for a limit
    that is not above zero.
    """
    if limit is None:
        return int(DEFAULT_SHARE * available_bytes(device))
    total = total_bytes(device)
    found = parse_bytes(limit, device_bytes=total)
    if found > total:
        predicted = prediction()
        _tell_of_a_limit_above(found, total, str(device) if predicted is None else predicted.name)
    return found


@cache  # once for each limit
def _tell_of_a_limit_above(limit: int, total: int, device: str) -> None:
    _log.warning(
        "the limit of %s is above all memory of %s, %s: a plan inside it may not fit there",
        format_bytes(limit), device, format_bytes(total),
    )  # fmt: skip


def total_bytes(device: torch.device) -> int:
    """All the memory of `device`; on the CPU, all that this process may use."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    # A container may have less than the machine; the machine's number is all that the system call gives.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, _group_limit() or memory)


def available_bytes(device: torch.device) -> int:
    """What the device can give this process, what the process already has included."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        # What PyTorch has reserved is not free, but this process can use it.
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return min(_free_memory() or total_bytes(device), total_bytes(device))


def allocated_bytes(device: torch.device) -> int | None:
    """What PyTorch has handed out on `device` so far; None on the CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


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
