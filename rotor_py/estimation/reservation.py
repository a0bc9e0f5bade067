"""Predict the bytes that the allocator reserves for a step by its plan, from steps traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from rotor_profiling.followed_storages import FollowedStorages
from rotor_profiling.storage import local
from rotor_py.data_sheet import WORKSPACES, Device, Devices, Reservation, workspace_bytes
from rotor_py.estimation.caching_allocator import (
    LARGE_SEGMENT,
    Allocate,
    DeviceFullError,
    Event,
    Free,
    most_bytes,
    replay,
)
from rotor_py.estimation.scratch import scratch_bytes
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_solver import InfeasibleError


class FollowedStep(FollowedStorages):
    """Traces the allocator requests of what runs inside it: storages until they are freed, and scratch of kernels.

    Register tensors from before the step with `hold`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = 0
        """Stream of the requests: each stream has its own pools."""
        self.events: list[Event] = []
        self._before = 0

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors: parameters, optimizer state, batch."""
        for tensor in tensors:
            self.follow(local(tensor).untyped_storage())

    def hold_workspace(self, device: Device) -> None:
        """Count workspaces that libraries on `device` allocate once and keep."""
        each = workspace_bytes(device) // WORKSPACES
        self.events += [Allocate(f"workspace {number}", each) for number in range(WORKSPACES)]

    def begin(self) -> None:
        """Begin the step: everything so far existed before it."""
        self._before = len(self.events)

    def risen(self) -> int:
        """Peak bytes of the step beyond those at its begin."""
        return most_bytes(self.events, self._before)

    def taken(self, number: int, size: int) -> None:
        self.events.append(Allocate(number, size, self.stream))

    def freed(self, number: int) -> None:
        self.events.append(Free(number))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inside = scratch_bytes(func, args, kwargs, out)
        if inside:
            inner = ("inside", len(self.events))
            self.events += [Allocate(inner, inside, self.stream), Free(inner)]


def reservation_of(events: Sequence[Event], device: Device) -> Reservation:
    usable = device.usable_bytes
    plain, expandable = (_reserved(events, usable, expandable=each) for each in (False, True))
    gives_back = plain <= usable < replay(events).reserved_bytes
    return Reservation(device.name, usable, most_bytes(events), plain, expandable, gives_back)


def _reserved(events: Sequence[Event], usable: int, *, expandable: bool) -> int:
    """Peak of reserved bytes; if the device is too small, the memory that suffices, to within a segment."""
    much, little = replay(events, expandable=expandable).reserved_bytes, usable
    if much <= usable:
        return much
    with suppress(DeviceFullError):
        return replay(events, expandable=expandable, limit=usable).reserved_bytes
    while much - little > LARGE_SEGMENT:
        middle = (little + much) // 2
        try:
            replay(events, expandable=expandable, limit=middle)
            much = middle
        except DeviceFullError:
            little = middle
    return much


_ROUNDS = 2
"""Replans with a smaller limit. A guess: reserved bytes follow the limit closely; too few keep a plan that does not
fit.
"""


def find_reservation(
    step: SimulatedStep,
    devices: Devices,
    *,
    keep_limit: bool,
    requests_of: Callable[[SimulatedStep], Sequence[Event]] | None = None,
) -> Reservation:
    """Find the reservation of `step` by its network's plan, from its requests; by default those of two traced steps.

    Unless `keep_limit`, lowers the limit and replans while more is reserved than the device has. If no plan fits the
    smaller limit, the last one stays.
    """
    network = step.network
    for attempt in range(_ROUNDS + 1):
        budget, sequence, limit = network.budget, network.sequence, network.mem_limit
        assert budget is not None
        assert sequence is not None
        requests = followed_by_plan(step, devices.each).events if requests_of is None else requests_of(step)
        # At least the peak of the plan, which assumes the worst order of backwards.
        found = reservation_of(requests, devices.each).at_least(budget.peak_bytes(sequence))
        if keep_limit or attempt == _ROUNDS or not found.missing_bytes:
            break
        # Lower the peak, not the limit: below that, the plan would not change.
        smaller = budget.peak_bytes(sequence) - found.missing_bytes
        if smaller < budget.least_bytes():
            break
        network.mem_limit = smaller
        try:
            network.compute_sequence()
        except InfeasibleError:  # processes that share the plan may need more than the least limit
            network.mem_limit, network.sequence = limit, sequence
            break
    return found


def followed_by_plan(step: SimulatedStep, device: Device) -> FollowedStep:
    """Trace two steps, the first of which makes the optimizer's state.

    The state lies where activations were, which fragments the memory of the second step.
    """
    followed = FollowedStep()
    with step.state_restored():
        step()  # the first step by a plan differs: it captures the model, for example
    with step.state_restored():
        followed.hold_workspace(device)
        followed.hold(step.present())
        with followed:
            step()
            step()
    return followed
