"""The model of a program that is planned where it stands, and what its first step shows beside its own costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py.checkpointable import Checkpointable
from rotor_py.plan.inputs.sample import Call
from rotor_py.stage.restored.autocast import Autocast, autocast_now, restored_autocast
from rotor_py.trainers.in_place import PlannedForward


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a first training step has shown, right before its optimizer steps."""

    network: Checkpointable
    """The model, measured and, where a plan fits, planned."""
    sample: Call
    """What it was called with."""
    autocast: tuple[Autocast, ...]
    """The state of autocast around the call."""
    optimizer: torch.optim.Optimizer | None
    """None where none stepped that trains the model."""
    own_loss: bool
    """Whether the model returned a single number to be trained by: its loss."""
    others: tuple[nn.Module, ...]
    """Other models that the step trains, smaller ones."""


class _Forward:
    """Lives as long as the graph of a forward: its output's hooks hold it."""


class FollowedModel:
    """The model of `network`, which was measured on `sample`; the parameters that it trains have `size` elements.

    `optimizer` is known to train it; others may. It is measured again as `closely` as it was.
    """

    def __init__(
        self,
        network: Checkpointable,
        sample: Call,
        size: int,
        optimizer: torch.optim.Optimizer | None,
        *,
        closely: bool,
    ) -> None:
        self.network, self.model, self.sample, self.size = network, network.model, sample, size
        self.optimizer, self._closely = optimizer, closely
        self.autocast = autocast_now([network.device])
        self.forward = PlannedForward(network)
        self.went_back = self.own_loss = False
        self._in_flight: WeakSet[_Forward] = WeakSet()
        self._most_in_flight = 1

    def measure(self, sample: Call) -> None:
        """Measure it again, on `sample`."""
        self.forward.measure(sample, closely=self._closely)

    def count_gradients(self) -> None:
        """Plan for gradients that are kept, if some are there when a forward begins."""
        if self.network.fresh_grads and any(each.grad is not None for each in self.model.parameters()):
            self.network.fresh_grads = False
            self.measure(self.sample)

    def make_room_for_forwards(self) -> None:
        """Plan for as many forwards in flight as there were."""
        network = self.network
        if self._most_in_flight <= network.forwards_in_flight:
            return
        assert network.inspection_values is not None
        loss = network.inspection_values.loss  # as the step has shown it; measuring does not
        network.loss_tmp_memory_usage = loss.temp_bytes + loss.kept_bytes
        network.forwards_in_flight = self._most_in_flight
        with restored_autocast(self.autocast, cache=True):
            self.measure(self.sample)

    def returned(self, output: Any, sample: Call) -> None:
        """A forward on `sample` has returned this."""
        self.sample = sample
        tensors = [each for each in tensors_in(output) if each.requires_grad]
        self.own_loss = any(each.dim() == 0 for each in tensors)
        forward = _Forward()
        self._in_flight.add(forward)
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))
        for tensor in tensors:
            tensor.register_hook(partial(self._gradient_came, forward))

    def step(self, optimizer: torch.optim.Optimizer | None, others: list[nn.Module]) -> FirstStep:
        """What the step has shown: `optimizer` is about to step, and the `others` are trained as well."""
        optimizer = optimizer or self.optimizer
        return FirstStep(self.network, self.sample, self.autocast, optimizer, self.own_loss, tuple(others))

    def _gradient_came(self, forward: _Forward, gradient: torch.Tensor) -> None:
        self.went_back = True
        self._in_flight.discard(forward)
