"""What the allocator reserves for a step by a plan: seen in steps that follow it, without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rotor_py.devices.device import Device, Devices
from rotor_py.devices.followed_step import FollowedStep
from rotor_py.devices.requests import Event
from rotor_py.devices.reservation import Reservation
from rotor_py.predict.training_step import TrainingStep
from rotor_solver import InfeasibleError

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
    found = Reservation.of(requests, devices.each)
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
