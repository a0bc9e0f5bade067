"""Take a training step on fake tensors, as a training loop would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_profiling.backends import operators
from rotor_profiling.optimizer import stepping_as_on_cuda
from rotor_profiling.stage.gradients import scalar_after
from rotor_py.checkpointable import Checkpointable
from rotor_py.estimation.cuda_autocast import region
from rotor_py.plan.step_spec import arguments_of


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step of `network` on `value`, whose caller holds the output to its end. Call it to take the step.

    Without a `loss`, the loss is the output's single number with a gradient, else every tensor gets a gradient. With
    `fresh_grads`, gradients are freed at the end. Runs as many forwards in flight as the network was planned for. With
    `autocast`, forward and loss run in a region with this dtype; the backward outside, as in training.
    """

    network: Checkpointable
    value: Any
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    fresh_grads: bool = False
    autocast: torch.dtype | None = None

    def __call__(self, begins: Callable[[str], None] = lambda phase: None) -> None:
        """Take the step; `begins` is called with the name of each phase."""
        network, budget = self.network, self.network.budget
        arguments, keywords = arguments_of(self.value, network.model)
        begins("forward")
        outputs, values = [], []
        with region(self.autocast):
            for _ in range(1 if budget is None else budget.forwards):
                outputs.append(network(*arguments, **keywords))
                values.append(_loss_in(outputs[-1]) if self.loss is None else self.loss(outputs[-1]))
        begins("backward")
        with operators():  # not around the forward: TorchDynamo would capture the replacements
            while values:
                last = budget is not None and budget.backward_order == "reverse"
                values.pop(-1 if last else 0).backward()
        begins("optimizer")
        self._step_optimizer()
        begins("end")

    def _step_optimizer(self) -> None:
        if self.optimizer is not None:
            with stepping_as_on_cuda(self.optimizer):
                self.optimizer.step()
        if self.fresh_grads:
            self.network.zero_grad()

    def prepare(self) -> None:
        """Make the optimizer's state, and gradients if kept, without a step."""
        for parameter in self.network.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        self._step_optimizer()

    def present(self) -> list[torch.Tensor]:
        """Tensors that exist before the first step."""
        parameters = list(self.network.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        state = [] if self.optimizer is None else tensors_in(list(self.optimizer.state.values()))
        return [*parameters, *self.network.buffers(), *gradients, *state, *tensors_in(self.value)]

    @contextmanager
    def state_restored(self) -> Iterator[None]:
        """Drop gradients and optimizer state of steps inside the context, and do not watch them."""
        gradients = {each: each.grad for each in self.network.parameters()}
        state = None if self.optimizer is None else {key: dict(each) for key, each in self.optimizer.state.items()}
        watch, self.network.watch = self.network.watch, False
        try:
            yield
        finally:
            self.network.watch = watch
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            if self.optimizer is not None and state is not None:
                self.optimizer.state.clear()
                self.optimizer.state.update(state)


def _loss_in(output: Any) -> torch.Tensor:
    found = [each for each in tensors_in(output) if each.dim() == 0 and each.requires_grad]
    made = found[0] if found else scalar_after(output)
    assert made is not None  # a planned network trains something
    return made
