"""Predict batches of a model on fake tensors for a simulated device.

Instead of a real step, a traced step by the plan shows the allocator's reservation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from rotor_profiling.backends import stopwatch
from rotor_profiling.optimizer import stepping_as_on_cuda
from rotor_py.batch_size.measured_batches import MeasuredBatches
from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Reservation
from rotor_py.estimation.cuda_autocast import region
from rotor_py.estimation.simulated_step import SimulatedStep


class Followed(Protocol):
    """Simulated devices and their steps: an `SimulatedDevices`, for example."""

    def follow(self, step: SimulatedStep) -> None:
        """Plan a measured model with the communication bytes of a step by its plan."""

    def reserve(self, step: SimulatedStep, *, keep_limit: bool) -> Reservation | None:
        """Reservation of the allocator for a step by the plan."""


class PredictedBatches(MeasuredBatches):
    """Costs of steps of a model on fake tensors by batch, computed within `measuring`.

    Other arguments are those of `MeasuredBatches`. Steps run under `autocast` if it is a dtype.
    """

    predicted: ClassVar[bool] = True

    def __init__(
        self,
        followed: Followed,
        autocast: torch.dtype | None,
        model: nn.Module,
        sample_of: Callable[[int], Any],
        mem_limit: float | str | None,
        **step: Any,
    ) -> None:
        super().__init__(model, sample_of, mem_limit, **step)
        self._followed, self._autocast = followed, autocast

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer step. Needs a measured batch."""
        optimizer, step = self._optimizer, self._step(self._any, next(iter(self.costs)))
        if optimizer is None:
            return 0.0
        with step.state_restored():
            for parameter in step.network.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            with stepping_as_on_cuda(optimizer):
                optimizer.step()  # the first step makes the state
                with stopwatch(self._any.device) as watch:
                    watch.start()
                    optimizer.step()
                    watch.lap()
                    return watch.stop()[0]

    @property
    def on_cuda(self) -> bool:
        """Whether CUDA's allocator rounds sizes."""
        return True

    def step_peak(self, batch: int) -> None:
        """None: no real step can be taken, so the prediction decides."""

    def missing_bytes(self, batch: int, mem_limit: int) -> int:
        """Bytes missing on the device for the reservation of a batch by its plan within `mem_limit` bytes."""
        network = self.network(batch)
        network.compute_sequence(mem_limit)
        found = self._followed.reserve(self._step(network, batch), keep_limit=True)
        return 0 if found is None else found.missing_bytes

    def lower_limit(self, mem_limit: int) -> None:
        """Lower the limit to `mem_limit` bytes."""
        self._limit = mem_limit

    def _measure(self, network: Checkpointable, batch: int, sample: Any) -> None:
        with region(self._autocast):
            super()._measure(network, batch, sample)
        self._followed.follow(self._step(network, batch))

    def _step(self, network: Checkpointable, batch: int) -> SimulatedStep:
        sample = self._sample_of(batch)
        return SimulatedStep(network, sample, self._loss, self._optimizer, self._fresh_grads, self._autocast)

    @property
    def _group(self) -> None:
        return None
