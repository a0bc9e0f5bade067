"""What the allocator reserves for a step by a plan: seen in steps that follow it, without memory.

What the allocator of a device that is not there would reserve for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rotor_py.data_sheet import Device, Devices, Reservation
from rotor_py.estimation.caching_allocator import LARGE_SEGMENT, DeviceFullError, Event, most_bytes, replay
from rotor_py.estimation.followed_step import FollowedStep
from rotor_py.estimation.training_step import TrainingStep
from rotor_solver import InfeasibleError


def reservation_of(events: Sequence[Event], device: Device) -> Reservation:
    """What is reserved on `device` for these requests."""
    usable = device.usable_bytes
    plain, expandable = (_reserved(events, usable, expandable=each) for each in (False, True))
    gives_back = plain <= usable < replay(events).reserved_bytes
    return Reservation(device.name, usable, most_bytes(events), plain, expandable, gives_back)


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


_ROUNDS = 2
"""How often a plan for less is tried. A guess: what is reserved follows the limit closely."""


RequestsOf = Callable[[TrainingStep], Sequence[Event]]
"""What steps by the plan request of the allocator, and what was there before."""


def find_reservation(
    step: TrainingStep, devices: Devices, *, keep_limit: bool, requests_of: RequestsOf | None = None
) -> Reservation:
    """What is reserved for `step` by the plan that its network has, as `requests_of` tells, or two steps.

    Unless `keep_limit`, the network gets a smaller limit, and a plan for that, as long as the device has less than is
    reserved. If no plan fits the smaller one, the last that did stays.
    """
    network = step.network
    found = reservation(step, devices, requests_of)
    for _ in range(0 if keep_limit else _ROUNDS):
        budget, sequence, limit = network.budget, network.sequence, network.mem_limit
        assert budget is not None
        assert sequence is not None
        if not found.missing_bytes:
            break
        # The peak, not the limit: below that, it would be the same plan.
        smaller = budget.peak_bytes(sequence) - found.missing_bytes
        if smaller < budget.least_bytes():
            break
        network.mem_limit = smaller
        try:
            network.compute_sequence()
        except InfeasibleError:  # a plan may need more than the least where others have to follow it as well
            network.mem_limit, network.sequence = limit, sequence
            break
        found = reservation(step, devices, requests_of)
    return found


def reservation(step: TrainingStep, devices: Devices, requests_of: RequestsOf | None = None) -> Reservation:
    """What is reserved for `step`: no less than the peak of the plan, which is that of the worst order of backwards."""
    budget, sequence = step.network.budget, step.network.sequence
    assert budget is not None
    assert sequence is not None
    requests = followed_by_plan(step, devices.each).events if requests_of is None else requests_of(step)
    found = reservation_of(requests, devices.each)
    return found.at_least(budget.peak_bytes(sequence))


def followed_by_plan(step: TrainingStep, device: Device) -> FollowedStep:
    """The requests of two steps, the first of which makes the optimizer's state.

    State is allocated where activations were, so that those of the second find less room in one piece.
    """
    followed = FollowedStep(device)
    with step.leaving_nothing():
        step()  # the first by a plan differs from those that follow: the model is captured in it, for example
    with step.leaving_nothing():
        followed.hold_workspace()
        followed.hold(step.present())
        with followed:
            step()
            step()
    return followed
