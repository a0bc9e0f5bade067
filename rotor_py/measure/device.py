"""Read the total and the available memory of a device, and convert a limit such as `80%` into bytes."""

from __future__ import annotations

import logging
from functools import cache

import torch

from rotor_profiling.backends import prediction
from rotor_py.errors import record_fields
from rotor_py.host_memory import available_host_bytes, host_memory_bytes
from rotor_py.units import format_bytes, parse_bytes

_log = logging.getLogger("rotor_py")

DEFAULT_SHARE = 0.9
"""Share of the available memory that is the default limit. A guess: plans do not predict fragmentation."""


def limit_bytes(limit: float | str | None, device: torch.device) -> int:
    """Return the bytes of a limit on `device`: a number of bytes, `4GB`, `512MiB`, or `80%` of its total memory.

    None means 90 % of the memory that this process can use now. Raises ValueError for any other text, and for a limit
    below one byte. Logs a warning if the limit is above the device's total memory.
    """
    if limit is None:
        return int(DEFAULT_SHARE * available_bytes(device))
    total = total_bytes(device)
    found = parse_bytes(limit, device_bytes=total)
    if found > total:
        predicted = prediction()
        _warn_of_limit_above(found, total, str(device) if predicted is None else predicted.name)
    return found


@cache  # warns once per limit
def _warn_of_limit_above(limit: int, total: int, device: str) -> None:
    _log.warning(
        f"the limit of {format_bytes(limit)} is above all memory of {device}, {format_bytes(total)}",
        extra=record_fields("limit_above_device", mem_limit=limit, device_bytes=total),
    )


def total_bytes(device: torch.device) -> int:
    """Return the total bytes of memory of `device`; on the CPU, of the memory that this process may use."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process can use on `device`: those that are free, and those that it uses already."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        # Memory that PyTorch's allocator has reserved is not free for CUDA, but this process can use it.
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return available_host_bytes()


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes allocated by PyTorch on `device`; None on the CPU, where PyTorch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def segments_expand(device: torch.device) -> bool:
    """Whether all large segments of a CUDA device are expandable, so that blocks have the requested size.

    Reads the allocator's segments, not environment variables: if set after the allocator's start, these have no effect.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
    large = [each["is_expandable"] for each in segments if each["segment_type"] == "large"]
    return bool(large) and all(large)
