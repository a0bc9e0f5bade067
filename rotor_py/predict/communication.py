"""What processes need for what they send to each other: seen in a step that follows the plan, without memory.

Where parameters are sharded, which of them are whole at once is decided by hooks of FSDP while a step runs. Real
processes have to plan with an upper bound (`distributed/sharded_bytes.py`). A step of tensors without memory can be
taken as often as one likes, so here the bound gives way to what is seen.
"""

from __future__ import annotations

from rotor_profiling.instruments import memory_meter
from rotor_py.predict.training_step import TrainingStep
from rotor_solver import InfeasibleError

_SLACK = (0.0, 0.0, 0.03, 0.06, 0.12)
"""How much more room than the last step took is planned with, round by round, as a part of it. Guesses.

A plan that is left less memory runs other stages again, which gathers other parameters: it may take more room in turn.
Without slack, that went on for a Llama of 80 layers.
"""


def find_room_for_communication(step: TrainingStep) -> None:
    """Have the network of `step`, which has been measured, plan with the room for communication that the step takes.

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
            sequence = network.compute_sequence()
        except InfeasibleError:
            return
        with memory_meter(network.device) as meter:
            step(meter.mark)
        risen = max(phase.peak for phase in meter.phases.values())
        taken = divided.fixed.total + risen - divided.peak_bytes(sequence)
        if taken <= room:
            return
    network.divide(budget)
