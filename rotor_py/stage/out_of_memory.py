"""Errors that say that a device is out of memory."""

from __future__ import annotations

import re

import torch

_CPU = "DefaultCPUAllocator: can't allocate memory"
"""The CPU's allocator has no error of its own: it raises a RuntimeError, whose text alone tells what it is."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of PyTorch raised `error`, because it had no memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _CPU in str(error))


def asked_bytes(error: BaseException) -> int:
    """What the allocation that failed had asked for; 0 if the error does not say so. CUDA rounds it to 1 %."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
