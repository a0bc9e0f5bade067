"""What processes need for what they send to each other: seen in a step that follows the plan, without memory.

Where parameters are sharded, which of them are whole at once is decided by hooks of FSDP while a step runs. Real
processes have to plan with an upper bound (`distributed/sharded_bytes.py`). A step of tensors without memory can be
taken as often as one likes, so here the bound gives way to what is seen.

The stream on which FSDP2 gathers parameters, told to a step that is followed.

The allocator keeps what each stream frees for that stream, so what is gathered apart is also reserved apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Device
from rotor_py.estimation.caching_allocator import Event
from rotor_py.estimation.followed_step import FollowedStep
from rotor_py.estimation.training_step import TrainingStep
from rotor_py.measure.device import limit_bytes
from rotor_solver import InfeasibleError, Sequence

_GATHERING = 1


@contextmanager
def gathering_apart(step: FollowedStep) -> Iterator[None]:
    """Inside, what FSDP2 makes to gather parameters is requested on a stream of its own, as on CUDA."""
    group: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:  # nothing is sharded
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
"""How much more room than the last step took is planned with, round by round, as a part of it. Guesses.

A plan that is left less memory runs other stages again, which gathers other parameters: it may take more room in turn.
Without slack, that went on for a Llama of 80 layers.
"""


class Communication:
    """Steps on `device` of models whose parameters are sharded, by the plans that they have. None is taken twice."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: tuple[Checkpointable, Sequence, FollowedStep] | None = None

    def requests(self, step: TrainingStep) -> list[Event]:
        """Those of two steps by the plan. An optimizer's state is there before."""
        followed = self._followed(step)
        if followed.repeats:
            return followed.repeated()
        with step.leaving_nothing(), gathering_apart(followed), followed:
            step()
        return followed.events

    def find_room(self, step: TrainingStep) -> None:
        """Have the network of `step`, which has been measured, plan with the room that the step takes.

        If no step stays inside of the room that it was planned with, the room is the upper bound again. If no plan fits
        beside a room, the room stays, and planning says so.
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

    def promise(self, step: TrainingStep) -> None:
        """Have the network of `step` count the room that the step takes by its plan, whatever that was made for.

        Where that is beyond its limit, the limit is what the step takes.
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

    def _taken(self, step: TrainingStep) -> int:
        """The bytes for communication with which the peak of the plan is that of the step."""
        followed, budget, plan = self._followed(step), step.network.budget, step.network.sequence
        assert plan is not None
        assert budget is not None
        return budget.fixed.total + followed.risen() - budget.peak_bytes(plan)

    def _followed(self, step: TrainingStep) -> FollowedStep:
        network, plan = step.network, step.network.sequence
        assert plan is not None
        if self._last is None or self._last[0] is not network or self._last[1] != plan:
            followed = FollowedStep(self._device)
            followed.hold_workspace()
            followed.hold(step.present())
            followed.begin()
            with step.leaving_nothing(), gathering_apart(followed), followed:
                step()
            self._last = network, plan, followed
        return self._last[2]
