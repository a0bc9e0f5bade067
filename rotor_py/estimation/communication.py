"""Measure the memory of communication in a step that follows the plan on fake tensors.

FSDP's hooks decide during a step which parameters are gathered at once. Real processes plan with an upper bound
(`gathered_bytes`); steps on fake tensors are cheap, so here the observed bytes replace the bound.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Device
from rotor_py.estimation.caching_allocator import Event
from rotor_py.estimation.reservation import FollowedStep
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.measure.device import limit_bytes
from rotor_solver import InfeasibleError, Sequence

_GATHERING = 1


@contextmanager
def gathering_apart(step: FollowedStep) -> Iterator[None]:
    """Trace FSDP2's all-gather buffers on a stream of their own, as on CUDA.

    The allocator keeps a pool for each stream, so these buffers are reserved separately.
    """
    group: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:  # no sharding
        yield
        return
    gather = group.foreach_all_gather

    def gathered(*args: Any, **kwargs: Any) -> Any:
        before, step.stream = step.stream, _GATHERING
        try:
            return gather(*args, **kwargs)
        finally:
            step.stream = before

    group.foreach_all_gather = gathered
    try:
        yield
    finally:
        group.foreach_all_gather = gather


_SLACK = (0.0, 0.0, 0.03, 0.06, 0.12)
"""Slack added to the bytes of the last step, by round, as a share. Guesses: too little does not converge, too much
wastes memory.

A plan with less memory recomputes other stages, which gathers other parameters and may need more memory again. Without
slack, this did not converge for a Llama of 80 layers.
"""


class Communication:
    """Steps of sharded models on `device`, by their plans. Each plan is traced once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: tuple[Checkpointable, Sequence, FollowedStep] | None = None

    def requests(self, step: SimulatedStep) -> list[Event]:
        """Requests of two steps by the plan, with the optimizer's state already allocated."""
        followed = self._followed(step)
        with step.state_restored(), gathering_apart(followed), followed:
            step()
        return followed.events

    def find_room(self, step: SimulatedStep) -> None:
        """Plan the measured network of `step` with the communication bytes that the step takes.

        If no step stays within its planned bytes, the upper bound applies again. If no plan fits, the bytes stay, and
        planning raises the error.
        """
        network = step.network
        budget = network.budget
        assert budget is not None
        step.prepare()
        taken = 0
        for slack in _SLACK:
            room = int((1 + slack) * taken)
            divided = budget.with_communication(room)
            network.divide(divided)
            try:
                network.compute_sequence()
            except InfeasibleError:
                return
            taken = self._taken(step)
            if taken <= room:
                return
        network.divide(budget)

    def promise(self, step: SimulatedStep) -> None:
        """Set the communication bytes to those of the current plan.

        If the peak then exceeds the limit, the limit becomes the peak.
        """
        network = step.network
        plan, budget = network.sequence, network.budget
        assert plan is not None
        assert budget is not None
        taken = self._taken(step)
        if taken > budget.fixed.communication:
            divided = budget.with_communication(taken)
            network.divide(divided)
            network.sequence = plan
            network.mem_limit = max(limit_bytes(network.mem_limit, network.device), divided.peak_bytes(plan))

    def _taken(self, step: SimulatedStep) -> int:
        """Communication bytes with which the plan's peak equals that of the step."""
        followed, budget, plan = self._followed(step), step.network.budget, step.network.sequence
        assert plan is not None
        assert budget is not None
        return budget.fixed.total + followed.risen() - budget.peak_bytes(plan)

    def _followed(self, step: SimulatedStep) -> FollowedStep:
        network, plan = step.network, step.network.sequence
        assert plan is not None
        if self._last is None or self._last[0] is not network or self._last[1] != plan:
            followed = FollowedStep()
            followed.hold_workspace(self._device)
            followed.hold(step.present())
            followed.begin()
            with step.state_restored(), gathering_apart(followed), followed:
                step()
            self._last = network, plan, followed
        return self._last[2]
