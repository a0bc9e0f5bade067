"""Predict the bytes that the allocator reserves for a step by its plan, from steps on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rotor_py.data_sheet import Device, Devices, Reservation
from rotor_py.estimation.caching_allocator import LARGE_SEGMENT, DeviceFullError, Event, most_bytes, replay
from rotor_py.estimation.followed_step import FollowedStep
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_solver import InfeasibleError


def reservation_of(events: Sequence[Event], device: Device) -> Reservation:
    """Reserved bytes on `device` for these requests."""
    usable = device.usable_bytes
    plain, expandable = (_reserved(events, usable, expandable=each) for each in (False, True))
    gives_back = plain <= usable < replay(events).reserved_bytes
    return Reservation(device.name, usable, most_bytes(events), plain, expandable, gives_back)


def _reserved(events: Sequence[Event], usable: int, *, expandable: bool) -> int:
    """Peak of reserved bytes; if the device is too small, the memory that suffices, to within a segment."""
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


_ROUNDS = 2
"""Replans with a smaller limit. A guess: reserved bytes follow the limit closely; too few keep a plan that does not
fit.
"""


RequestsOf = Callable[[SimulatedStep], Sequence[Event]]
"""Allocator requests of steps by the plan, preceded by those of existing tensors."""


def find_reservation(
    step: SimulatedStep, devices: Devices, *, keep_limit: bool, requests_of: RequestsOf | None = None
) -> Reservation:
    """Find the reservation of `step` by its network's plan, from `requests_of`, or from two traced steps.

    Unless `keep_limit`, lowers the limit and replans while more is reserved than the device has. If no plan fits the
    smaller limit, the last one stays.
    """
    network = step.network
    found = reservation(step, devices, requests_of)
    for _ in range(0 if keep_limit else _ROUNDS):
        budget, sequence, limit = network.budget, network.sequence, network.mem_limit
        assert budget is not None
        assert sequence is not None
        if not found.missing_bytes:
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
        found = reservation(step, devices, requests_of)
    return found


def reservation(step: SimulatedStep, devices: Devices, requests_of: RequestsOf | None = None) -> Reservation:
    """Reservation of `step`, at least the peak of the plan, which assumes the worst order of backwards."""
    budget, sequence = step.network.budget, step.network.sequence
    assert budget is not None
    assert sequence is not None
    requests = followed_by_plan(step, devices.each).events if requests_of is None else requests_of(step)
    found = reservation_of(requests, devices.each)
    return found.at_least(budget.peak_bytes(sequence))


def followed_by_plan(step: SimulatedStep, device: Device) -> FollowedStep:
    """Trace two steps, the first of which makes the optimizer's state.

    The state lies where activations were, which fragments the memory of the second step.
    """
    followed = FollowedStep(device)
    with step.state_restored():
        step()  # the first step by a plan differs: it captures the model, for example
    with step.state_restored():
        followed.hold_workspace()
        followed.hold(step.present())
        with followed:
            step()
            step()
    return followed
