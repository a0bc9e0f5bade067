"""Measure the costs of a model's training step for any batch, or predict them on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from rotor_profiling import bytes_like, tensors_in
from rotor_profiling.backends import stopwatch
from rotor_profiling.isolate import RandomState, accelerators_of, undoing
from rotor_profiling.timing import seconds_of, several_processes
from rotor_py.batch_size.search import StepCosts, agreed_costs
from rotor_py.checkpointable import Checkpointable
from rotor_py.distributed.processes import gather_objects, processes
from rotor_py.errors import InvalidValueError, UnsupportedModelError, record_fields
from rotor_py.estimation.cuda_autocast import region
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.estimation.simulated_target import SimulatedDevices
from rotor_py.measure.device import available_bytes, limit_bytes
from rotor_py.plan.planned_model import plan_of
from rotor_py.stage.replayed_routing import streams_kept
from rotor_py.validate.steps import TrainingStep, state_restored, values_restored
from rotor_py.validate.verification import default_loss
from rotor_solver.watching import Progress

_log = logging.getLogger("rotor_py")
# Options of `Checkpointable` that fix the plan, hold for one batch only, or change parameters in a measured backward.
_EXCLUDED = ("compile", "level", "every_n_layers", "max_checkpoints", "plan", "custom_input", "step_in_backward")
_SEVERAL = 3  # Number of steps of which the lowest measured peak counts (`step_peak`). A guess; fewer overestimate it.
_TURNS = 3  # Number of timed steps of each batch. A guess; with fewer, one slow step may decide which batch wins.


class MeasuredBatches:
    """Costs of a training step of `model` by batch size, each the maximum over the processes that train it together.

    `options` are arguments of `Checkpointable`. Raises ValueError for those named in `_EXCLUDED`.
    """

    predicted: ClassVar[bool] = False  # whether costs are predicted for a simulated device

    def __init__(
        self,
        model: nn.Module,
        sample_of: Callable[[int], Any],
        limit: float | str | None,
        *,
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        fresh_grads: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        for name in _EXCLUDED:
            if options.pop(name, None) not in (None, False):
                message = f"choose a batch without {name}=, then plan for that batch with it"
                raise InvalidValueError(message, kind="excluded", name=name)
        self.costs: dict[int, StepCosts] = {}
        self.limit, self.fresh_grads, self.slots = limit, fresh_grads, options.get("mem_slots", 500)
        self._model, self._make, self._loss, self._optimizer = model, sample_of, loss or default_loss, optimizer
        self._progress, self._options = progress, options
        self._networks: dict[int, Checkpointable] = {}
        self._sample_bytes: dict[int, int] = {}

    def of(self, batch: int) -> StepCosts:
        """Return a batch's costs, measured once. Raises UnsupportedModelError if samples do not grow with the batch."""
        if batch not in self.costs:
            network = self._network(batch)
            sample = self._sample_of(batch)
            size = self._sample_bytes[batch] = bytes_like(tensors_in(sample))
            for other, known in self._sample_bytes.items():
                if (other < batch) != (known < size) and other != batch:
                    message = f"sample_of(n) must return n rows, got {size} bytes for n={batch}, {known} for n={other}"
                    raise UnsupportedModelError(message, kind="sample_ignores_batch", batch=batch)
            self._measure(network, batch, sample)
            plan = plan_of(network)
            prefix = plan.measurement.prefix
            costs = StepCosts(plan.budget, prefix.seconds if prefix else 0.0)
            self.costs[batch] = agreed_costs(costs, self._group, network.device)
            self._networks[batch] = network
        return self.costs[batch]

    def _sample_of(self, batch: int) -> Any:
        with undoing() as undo, streams_kept(self._make):
            undo.append(RandomState.now(accelerators_of((), self._model)).restore)
            return self._make(batch)

    def trains_on(self, batch: int) -> bool:
        try:
            self.of(batch)
        except Exception:  # the user's model may raise anything
            if batch > 1:
                raise
            _log.info("the model does not train on one sample", exc_info=True, extra=record_fields("no_batch_of_one"))
            return False
        return True

    def network(self, batch: int) -> Checkpointable:
        self.of(batch)
        return self._networks[batch]

    @property
    def mem_limit(self) -> int:
        """Bytes of the lowest of all processes' limits. Call `of` first."""
        return -int(self.agreed(-limit_bytes(self.limit, self._any.device)))

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of `optimizer.step()` and `zero_grad()`; zero without an optimizer. Call `of` first."""
        network, optimizer = self._any, self._optimizer
        if optimizer is None:
            return self.agreed(0.0)
        trained = [parameter for parameter in network.model.parameters() if parameter.requires_grad]

        def give_gradients() -> None:
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        def run() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.fresh_grads)

        with state_restored(network, optimizer), values_restored(trained):
            give_gradients()
            optimizer.step()  # the first step also allocates the optimizer's state, so it is not timed
            with stopwatch(network.device) as watch:
                return self.agreed(seconds_of(run, watch, before=give_gradients))

    @property
    def on_cuda(self) -> bool:
        return self.predicted or self._any.device.type == "cuda"

    def agreed(self, number: float) -> float:
        """Return the maximum of `number` over all processes, which must call this together. Call `of` first."""
        group = self._group
        return number if group is None else max(gather_objects(number, group, self._any.device))

    def step_peak(self, batch: int) -> int | None:
        """Return the measured peak of a planned step in bytes; None if the device has too little free memory for it."""
        network = self.network(batch)
        sequence = network.compute_sequence()
        if self.agreed(plan_of(network).budget.peak_bytes(sequence) - available_bytes(network.device)) > 0:
            return None
        # With several processes on the CPU, the profiler misses frees by other threads, so peaks come out too high.
        peaks = []
        for _ in range(_SEVERAL if network.device.type == "cpu" and several_processes() else 1):
            with self._stepping(batch) as step, step.taken(network) as peak:
                peaks.append(peak)
        return int(self.agreed(min(peaks)))

    def missing_bytes(self, batch: int, mem_limit: int) -> int:
        """Return the bytes that a plan would reserve beyond a simulated device's memory; 0 if the device is real."""
        return 0

    def seconds_in_turns(self, among: Iterable[int]) -> dict[int, float]:
        """Return each batch's least seconds of `_TURNS` steps, no optimizer; in turns, so that load hits all alike."""
        found: dict[int, list[float]] = {batch: [] for batch in among}
        for _ in range(_TURNS):
            for batch, seconds in found.items():
                with self._stepping(batch) as step:
                    seconds.append(step.seconds(self.network(batch)))
        return {batch: self.agreed(min(seconds)) for batch, seconds in found.items()}

    @contextmanager
    def _stepping(self, batch: int) -> Iterator[TrainingStep]:
        network = self.network(batch)
        step = TrainingStep(
            network.model,
            self._sample_of(batch),
            self._loss,
            self._optimizer,
            network.device,
            fresh_grads=self.fresh_grads,
            forwards=network.forwards_in_flight,
        )
        with state_restored(network, self._optimizer):
            yield step

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

        # Pass the limit already here: the constructor refuses an invalid one before anything is measured.
        return Checkpointable(
            self._model,
            mem_limit=self.limit,
            loss=self._loss,
            optimizer=self._optimizer,
            fresh_grads=self.fresh_grads,
            progress=None if progress is None else tell,
            **self._options,
        )

    def _measure(self, network: Checkpointable, batch: int, sample: Any) -> None:
        network.measure(sample)


class PredictedBatches(MeasuredBatches):
    """Costs of a step predicted for simulated `devices`; `autocast`: dtype of autocast in forward and loss, or None."""

    predicted: ClassVar[bool] = True

    def __init__(
        self,
        devices: SimulatedDevices,
        autocast: torch.dtype | None,
        model: nn.Module,
        sample_of: Callable[[int], Any],
        limit: float | str | None,
        **options: Any,
    ) -> None:
        super().__init__(model, sample_of, limit, **{**options, "cache": False})
        self._devices, self._autocast = devices, autocast

    @property
    def optimizer_seconds(self) -> float:
        """Predicted seconds of `optimizer.step()`; zero without an optimizer. Call `of` first."""
        if self._optimizer is None:
            return 0.0
        step = self._step(self._any, next(iter(self.costs)))
        with step.state_restored(), stopwatch(self._any.device) as watch:
            step.prepare()  # also allocates the optimizer's state, so it is not timed
            watch.start()
            step.prepare()
            watch.lap()
            return watch.stop()[0]

    def step_peak(self, batch: int) -> None:
        """Return None: no step runs on a simulated device, so only predicted bytes decide whether the batch fits."""

    def missing_bytes(self, batch: int, mem_limit: int) -> int:
        network = self.network(batch)
        network.compute_sequence(mem_limit)
        return self._devices.reserve(self._step(network, batch), keep_limit=True).missing_bytes

    def _measure(self, network: Checkpointable, batch: int, sample: Any) -> None:
        with region(self._autocast):
            super()._measure(network, batch, sample)
        self._devices.follow(self._step(network, batch))

    def _step(self, network: Checkpointable, batch: int) -> SimulatedStep:
        sample = self._sample_of(batch)
        return SimulatedStep(network, sample, self._loss, self._optimizer, self.fresh_grads, self._autocast)
