"""What processes need for what they send to each other: seen in a step that follows the plan, without memory.

Where parameters are sharded, which of them are whole at once is decided by hooks of FSDP while a step runs. Real
processes have to plan with an upper bound (`distributed/sharded_bytes.py`). A step of tensors without memory can be
taken as often as one likes, so here the bound gives way to what is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_profiling.instruments import memory_meter, operators
from rotor_profiling.stage.gradients import scalar_after
from rotor_py.checkpointable import Checkpointable
from rotor_py.plan.inputs.sample import arguments_of
from rotor_solver import InfeasibleError

_ROUNDS = 5
"""A plan for less room than before keeps other things when the peak comes, so it is followed in turn."""

Step = Callable[[Callable[[str], None]], None]
"""A whole step, which calls what it is given with the names of its phases."""


def find_room_for_communication(network: Checkpointable, step: Step) -> None:
    """Have `network` plan with the room for communication that a step by its plan takes.

    `step` takes one step with `network`, which has been measured. If no plan fits beside it, the room stays that of the
    last plan that did.
    """
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
            step(lambda _: None)  # makes the optimizer's state, and gradients if they are kept
            first = False
        with memory_meter(network.device) as meter:
            step(meter.mark)
        risen = max(phase.peak for phase in meter.phases.values())
        beyond = divided.fixed.total - communication + risen - divided.peak_bytes(sequence)
        if beyond <= 0:
            return
        communication += beyond


def step_of(
    network: Checkpointable,
    value: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    fresh_grads: bool = False,
) -> Step:
    """A step of `network` on `value` as a training loop takes it, which holds the output to its end.

    Without a `loss`, that is the single number with a gradient in the output, and else every tensor gets a gradient.
    """

    arguments, keywords = arguments_of(value, network.model)

    def step(begins: Callable[[str], None]) -> None:
        begins("forward")
        output = network(*arguments, **keywords)
        value = loss(output) if loss is not None else _loss_in(output)
        begins("backward")
        with operators():  # not around the forward: TorchDynamo would capture what stands for them
            value.backward()
        begins("optimizer")
        del value
        if optimizer is not None:
            optimizer.step()
        if fresh_grads:
            network.zero_grad()
        begins("end")

    return step


def _loss_in(output: Any) -> torch.Tensor:
    found = [each for each in tensors_in(output) if each.dim() == 0 and each.requires_grad]
    made = found[0] if found else scalar_after(output)
    assert made is not None  # it was planned, so something trains
    return made
