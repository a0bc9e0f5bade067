"""What a program asks an allocator for, and what comes of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from rotor_py.devices.blocks import MIN_BLOCK
from rotor_py.errors import DescribedError
from rotor_py.units import format_bytes


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for `size` bytes on `stream`, and call them `key`."""

    key: Hashable
    size: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """Give back what is called `key`."""

    key: Hashable


Event = Allocate | Free


def most_bytes(events: Iterable[Event], beyond: int = 0) -> int:
    """The most bytes that tensors take while `events` happen, beyond those of the first so many events.

    Each is a multiple of a block, and what the allocator does not split off is left out.
    """
    sizes, now, before, most = dict[Hashable, int](), 0, 0, 0
    for number, event in enumerate(events, 1):
        if isinstance(event, Allocate):
            sizes[event.key] = -(-event.size // MIN_BLOCK) * MIN_BLOCK
            now += sizes[event.key]
        else:
            now -= sizes.pop(event.key)
        if number <= beyond:
            before = most = now
        most = max(most, now)
    return most - before


@dataclass(frozen=True, slots=True)
class Reserved:
    """Peaks in bytes, as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count them."""

    allocated_bytes: int
    reserved_bytes: int


class DeviceFullError(DescribedError, ValueError):
    """The driver has no memory for a segment, nor once everything has been given back that is not in use."""

    def __init__(self, size: int, allocated: int, reserved: int, limit: int) -> None:
        super().__init__(
            f"{format_bytes(size)} more do not fit: of {format_bytes(limit)}, {format_bytes(reserved)} are reserved, "
            f"of which {format_bytes(allocated)} are allocated; try expandable segments, or a smaller batch",
            kind="device_full",
            size=size,
            allocated=allocated,
            reserved=reserved,
            limit=limit,
        )
        self.size, self.allocated, self.reserved, self.limit = size, allocated, reserved, limit
