"""What the allocator of a device that is not there would reserve for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotor_py.devices.blocks import LARGE_SEGMENT
from rotor_py.devices.caching_allocator import replay
from rotor_py.devices.device import Device
from rotor_py.devices.requests import DeviceFullError, Event, most_bytes
from rotor_py.units import format_bytes, limit_text

_SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is reserved at most on `device`, whose allocator can have `usable_bytes`: predicted.

    By default, and with expandable segments. Where that is more than the device has, it runs out of memory.
    """

    device: str
    usable_bytes: int
    step_bytes: int
    """What the tensors of such a step take at most; a plan promises no less."""
    reserved_bytes: int
    expandable_bytes: int
    gives_back: bool
    """Whether it fits only because the allocator gives free segments back to the driver when there is no more."""

    @classmethod
    def of(cls, events: Sequence[Event], device: Device) -> Reservation:
        """What is reserved on `device` for these requests."""
        usable = device.usable_bytes
        plain, expandable = (_reserved(events, usable, expandable=each) for each in (False, True))
        gives_back = plain <= usable < replay(events).reserved_bytes
        return cls(device.name, usable, most_bytes(events), plain, expandable, gives_back)

    def at_least(self, size: int) -> Reservation:
        """The same, where tensors take so many bytes in another order than that of the requests."""
        reserved, expandable = max(self.reserved_bytes, size), max(self.expandable_bytes, size)
        return replace(self, reserved_bytes=reserved, expandable_bytes=expandable)

    @property
    def missing_bytes(self) -> int:
        """What the device has too little."""
        return max(0, self.reserved_bytes - self.usable_bytes)

    def warning(self, peak_bytes: int) -> str | None:
        """What to do where it does not fit the device, or only just, in one sentence; None if there is nothing to do.

        `peak_bytes` is the peak of the plan.
        """
        if self.gives_back:
            return (
                f"Predicted: the allocator reserves all {format_bytes(self.usable_bytes)} that it can have, and gives "
                f"free segments back to make others, which takes time that is not counted; {_SETTING} avoids that."
            )
        if not self.missing_bytes:
            return None
        smaller = max(peak_bytes - self.missing_bytes, 1)
        other = f", or {_SETTING}, with which it fits" if self.expandable_bytes <= self.usable_bytes else ""
        return (
            f"Warning: the step is predicted to run out of memory although its tensors fit, since the allocator has to "
            f"reserve {format_bytes(self.reserved_bytes)} for them, and {self.device} has "
            f"{format_bytes(self.usable_bytes)}; try a limit of {limit_text(smaller)}{other}."
        )


def _reserved(events: Sequence[Event], usable: int, *, expandable: bool) -> int:
    """What is reserved at most. Where the device is too small, what one would have to have, up to a segment more."""
    much = replay(events, expandable=expandable).reserved_bytes
    if much <= usable:
        return much
    within = _reserved_within(usable, events, expandable=expandable)
    if within is not None:
        return within
    little = usable
    while much - little > LARGE_SEGMENT:
        middle = (little + much) // 2
        if _reserved_within(middle, events, expandable=expandable) is None:
            little = middle
        else:
            much = middle
    return much


def _reserved_within(limit: int, events: Sequence[Event], *, expandable: bool) -> int | None:
    try:
        return replay(events, expandable=expandable, limit=limit).reserved_bytes
    except DeviceFullError:
        return None
