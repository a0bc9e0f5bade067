"""A step on tensors without memory, followed: its seconds by a roofline, and its requests to the allocator.

What a step reserves is known once its requests have been replayed (caching_allocator.py). They are the storages that
operators make and that end when nobody holds them, and what kernels allocate inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from rotor_profiling.followed_storages import FollowedStorages
from rotor_profiling.storage import local
from rotor_py.data_sheet import WORKSPACES, Device, workspace_bytes
from rotor_py.estimation.caching_allocator import Allocate, Event, Free, most_bytes
from rotor_py.estimation.roofline import Roofline
from rotor_py.estimation.scratch import scratch_bytes


class FollowedStep(FollowedStorages):
    """Follows what runs inside it, on `device`, which need not be there.

    What was there before has to be told by `hold`.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.stream = 0
        """On which requests are made: each stream has pools of its own."""
        self.seconds = 0.0
        self.events: list[Event] = []
        self._device = device
        self._roofline = Roofline(device)
        self._before = 0

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is there already: parameters, the optimizer's state, the batch."""
        for tensor in tensors:
            self.follow(local(tensor).untyped_storage())

    def hold_workspace(self) -> None:
        """Count what libraries allocate once, and keep."""
        each = workspace_bytes(self._device) // WORKSPACES
        self.events += [Allocate(f"workspace {number}", each) for number in range(WORKSPACES)]

    def begin(self) -> None:
        """All that has been told so far was there before the step."""
        self._before = len(self.events)

    @property
    def step_events(self) -> list[Event]:
        """The requests of the step itself."""
        return self.events[self._before :]

    def risen(self) -> int:
        """The most bytes that the step has taken beyond what was there when it began."""
        return most_bytes(self.events, self._before)

    @property
    def repeats(self) -> bool:
        """Whether the step leaves all as it was, so that the next one will request the same."""
        made = {event.key: event.size for event in self.step_events if isinstance(event, Allocate)}
        ended = {event.key for event in self.step_events if isinstance(event, Free)}
        # FSDP2 leaves storages without bytes.
        return ended <= set(made) and not any(size and key not in ended for key, size in made.items())

    def repeated(self) -> list[Event]:
        """All requests, and those of the step once more."""
        return [*self.events, *(replace(event, key=("again", event.key)) for event in self.step_events)]

    def taken(self, number: int, size: int) -> None:
        self.events.append(Allocate(number, size, self.stream))

    def freed(self, number: int) -> None:
        self.events.append(Free(number))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inside = scratch_bytes(func, args, kwargs, out)
        if inside:
            inner = ("inside", len(self.events))
            self.events += [Allocate(inner, inside, self.stream), Free(inner)]
        self.seconds += self._roofline(func, args, kwargs, out)
