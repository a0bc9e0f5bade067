"""Batches of a model, measured when they are asked for, each for itself; and real steps of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor_profiling import bytes_like, tensors_in
from rotor_py.batch.agreed_costs import agreed_costs, agreed_number
from rotor_py.batch.optimizer_seconds import optimizer_seconds
from rotor_py.batch.step_costs import StepCosts
from rotor_py.checkpointable import Checkpointable
from rotor_py.distributed.processes import processes
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.measure.device import limit_bytes
from rotor_py.trials.default_loss import default_loss
from rotor_py.trials.restore import left_alone
from rotor_py.trials.step import TrainingStep
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")


class MeasuredBatches:
    """The costs of steps of `model` by batch, as all processes see them that train it together.

    `sample_of(batch)` gives a sample of so many rows. `options` are those of `Checkpointable`.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_of: Callable[[int], Any],
        mem_limit: float | str | None,
        *,
        loss: Callable[[Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        fresh_grads: bool,
        progress: Progress | None,
        **options: Any,
    ) -> None:
        self.costs: dict[int, StepCosts] = {}
        self._model, self._sample_of, self._limit = model, sample_of, mem_limit
        self._loss, self._optimizer, self._fresh_grads = loss or default_loss, optimizer, fresh_grads
        self._progress, self._options = progress, options
        self._networks: dict[int, Checkpointable] = {}
        self._sample_bytes: dict[int, int] = {}

    def of(self, batch: int) -> StepCosts:
        """The measured costs of a batch. UnsupportedModelError if its sample does not grow with it."""
        if batch not in self.costs:
            network = self._network(batch)
            sample = self._sample_of(batch)
            self._refuse_other_rows(batch, sample)
            self._measure(network, batch, sample)
            measurement, budget = network.inspection_values, network.budget
            assert measurement is not None
            assert budget is not None
            prefix = measurement.prefix
            costs = agreed_costs(StepCosts(budget, prefix.seconds if prefix else 0.0), self._group, network.device)
            self.costs[batch], self._networks[batch] = costs, network
        return self.costs[batch]

    def trains_on(self, batch: int) -> bool:
        """Measure a batch; False if it is a single sample, and the model refuses that."""
        try:
            self.of(batch)
        except Exception:  # any: it is the user's model that refuses
            if batch > 1:
                raise
            _log.info("the model does not train on one sample", exc_info=True, extra=record_fields("no_batch_of_one"))
            return False
        return True

    def network(self, batch: int) -> Checkpointable:
        """The model, measured on this batch."""
        self.of(batch)
        return self._networks[batch]

    @property
    def mem_limit(self) -> int:
        """The least limit of any process, in bytes. At least one batch is measured."""
        return -int(self.agreed(-limit_bytes(self._limit, self._any.device)))

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's step. At least one batch is measured."""
        return self.agreed(optimizer_seconds(self._any, self._optimizer, fresh_grads=self._fresh_grads))

    @property
    def on_cuda(self) -> bool:
        """Whether sizes are those of CUDA's allocator, which rounds them. At least one batch is measured."""
        return self._any.device.type == "cuda"

    def agreed(self, number: float) -> float:
        """The most that any process says; all have to call this. At least one batch is measured."""
        return agreed_number(number, self._group, self._any.device)

    @contextmanager
    def stepping(self, batch: int) -> Iterator[TrainingStep]:
        """For real steps of a batch, which leave no trace, and the plan as it is."""
        network = self.network(batch)
        step = TrainingStep(
            network.model,
            self._sample_of(batch),
            self._loss,
            self._optimizer,
            network.device,
            fresh_grads=self._fresh_grads,
            forwards=network.forwards_in_flight,
        )
        watch, network.watch = network.watch, False
        try:
            with left_alone(network, self._optimizer):
                yield step
        finally:
            network.watch = watch

    @property
    def _any(self) -> Checkpointable:
        return next(iter(self._networks.values()))

    @property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        return self._options.get("process_group") or processes(self._model)

    def _network(self, batch: int) -> Checkpointable:
        progress = self._progress

        def tell(done: int, total: int, name: str) -> None:
            if progress is not None:
                progress(done, total, f"{name}, batch {batch}")

        # A limit that is none is told before anything is measured.
        return Checkpointable(
            self._model,
            mem_limit=self._limit,
            loss=self._loss,
            optimizer=self._optimizer,
            fresh_grads=self._fresh_grads,
            progress=None if progress is None else tell,
            **self._options,
        )

    def _measure(self, network: Checkpointable, batch: int, sample: Any) -> None:
        network.measure(sample)

    def _refuse_other_rows(self, batch: int, sample: Any) -> None:
        """UnsupportedModelError if samples of other batches have as many numbers."""
        self._sample_bytes[batch] = bytes_like(tensors_in(sample))
        for other, size in self._sample_bytes.items():
            if (other < batch) != (size < self._sample_bytes[batch]) and other != batch:
                raise UnsupportedModelError(
                    f"a sample of {batch} rows has {self._sample_bytes[batch]} bytes, and one of {other} has {size}: "
                    "`sample_of(batch)` has to give as many rows as it is asked for",
                    kind="sample_ignores_batch",
                    batch=batch,
                )
