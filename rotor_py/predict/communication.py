"""What processes need for what they send to each other: seen in a step that follows the plan, without memory.

Where parameters are sharded, which of them are whole at once is decided by hooks of FSDP while a step runs. Real
processes have to plan with an upper bound (`distributed/sharded_bytes.py`). A step of tensors without memory can be
taken as often as one likes, so here the bound gives way to what is seen.
"""

from __future__ import annotations

from rotor_profiling.instruments import memory_meter
from rotor_py.predict.training_step import TrainingStep
from rotor_solver import InfeasibleError

_ROUNDS = 5
"""A plan for less room than before keeps other things when the peak comes, so it is followed in turn."""


def find_room_for_communication(step: TrainingStep) -> None:
    """Have the network of `step`, which has been measured, plan with the room for communication that the step takes.

    If no plan fits beside it, the room stays that of the last plan that did.
    """
    network = step.network
    budget = network.budget
    assert budget is not None
    communication, first = 0, True
    for _ in range(_ROUNDS):
        divided = budget.with_communication(communication)
        network.divide(divided)
        try:
            sequence = network.compute_sequence()
        except InfeasibleError:
            return
        if first:
            step()  # makes the optimizer's state, and gradients if they are kept
            first = False
        with memory_meter(network.device) as meter:
            step(meter.mark)
        risen = max(phase.peak for phase in meter.phases.values())
        beyond = divided.fixed.total - communication + risen - divided.peak_bytes(sequence)
        if beyond <= 0:
            return
        communication += beyond
