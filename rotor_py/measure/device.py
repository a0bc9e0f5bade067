"""What a device has to give, and how many of its bytes a limit stands for."""

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
        extra=record_fields("limit_above_device", mem_limit=limit, device_bytes=total),
    )  # fmt: skip


def total_bytes(device: torch.device) -> int:
    """All the memory of `device`; on the CPU, all that this process may use."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def available_bytes(device: torch.device) -> int:
    """What the device can give this process, what the process already has included."""
    if (predicted := prediction()) is not None:
        return predicted.memory_bytes
    if device.type == "cuda":
        # What PyTorch has reserved is not free, but this process can use it.
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return available_host_bytes()


def allocated_bytes(device: torch.device) -> int | None:
    """What PyTorch has handed out on `device` so far; None on the CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def segments_expand(device: torch.device) -> bool:
    """Whether all large tensors on a CUDA device are in segments that expand, whose blocks are as large as asked for.

    The allocator is asked, not the environment: that counts only if it was set before the allocator was there.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
    large = [each["is_expandable"] for each in segments if each["segment_type"] == "large"]
    return bool(large) and all(large)
