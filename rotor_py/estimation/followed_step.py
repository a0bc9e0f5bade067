"""Trace a step on fake tensors: its seconds by a roofline, and its allocator requests.

Requests are the storages that operators make, until they are freed, and the scratch memory of kernels.
`caching_allocator` replays them to find the reserved bytes.
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
    """Traces everything that runs inside it, on a simulated `device`.

    Register tensors from before the step with `hold`.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.stream = 0
        """Stream of the requests: each stream has its own pools."""
        self.seconds = 0.0
        self.events: list[Event] = []
        self._device = device
        self._roofline = Roofline(device)
        self._before = 0

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors: parameters, optimizer state, batch."""
        for tensor in tensors:
            self.follow(local(tensor).untyped_storage())

    def hold_workspace(self) -> None:
        """Count workspaces that libraries allocate once and keep."""
        each = workspace_bytes(self._device) // WORKSPACES
        self.events += [Allocate(f"workspace {number}", each) for number in range(WORKSPACES)]

    def begin(self) -> None:
        """Begin the step: everything so far existed before it."""
        self._before = len(self.events)

    @property
    def step_events(self) -> list[Event]:
        """Requests of the step itself."""
        return self.events[self._before :]

    def risen(self) -> int:
        """Peak bytes of the step beyond those at its begin."""
        return most_bytes(self.events, self._before)

    @property
    def repeats(self) -> bool:
        """Whether the step leaves memory unchanged, so that the next one makes the same requests."""
        made = {event.key: event.size for event in self.step_events if isinstance(event, Allocate)}
        ended = {event.key for event in self.step_events if isinstance(event, Free)}
        # FSDP2 leaves empty storages.
        return ended <= set(made) and not any(size and key not in ended for key, size in made.items())

    def repeated(self) -> list[Event]:
        """All requests, then those of the step again."""
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
