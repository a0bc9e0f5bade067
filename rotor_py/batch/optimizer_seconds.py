"""How long the optimizer's step takes: the part of a training step that does not grow with the batch."""

from __future__ import annotations

import torch

from rotor_profiling.backends import stopwatch
from rotor_profiling.timing import seconds_of
from rotor_py.checkpointable import Checkpointable
from rotor_py.trials.restore import left_alone, put_back


def optimizer_seconds(network: Checkpointable, optimizer: torch.optim.Optimizer | None, *, fresh_grads: bool) -> float:
    """The seconds of `optimizer.step()` and `zero_grad()`; zero without an optimizer.

    Steps are taken on gradients of zeros. Parameters, gradients and the optimizer's state are put back.
    """
    if optimizer is None:
        return 0.0
    trained = [parameter for parameter in network.model.parameters() if parameter.requires_grad]

    def give_gradients() -> None:
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=fresh_grads)

    with left_alone(network, optimizer), put_back(trained):
        give_gradients()
        optimizer.step()  # the first step makes the state
        with stopwatch(network.device) as watch:
            return seconds_of(run, watch, before=give_gradients)
