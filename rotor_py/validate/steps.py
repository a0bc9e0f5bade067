"""Run real training steps, planned and plain, and restore the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling import RandomState, has_loss, leaves_of, measured_peak, measured_phases, tensors_in
from rotor_profiling.attributes import attributes_kept
from rotor_profiling.value_tree import tree_flatten, tree_map_only, tree_unflatten
from rotor_py.checkpointable import Checkpointable
from rotor_py.plan.step_spec import arguments_of
from rotor_py.stage.error_context import BACKWARD, watched
from rotor_py.transparent import in_training
from rotor_solver import Backward, Loss, Operation, Sequence


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """An operation of a step, its times and the bytes on the device."""

    operation: Operation
    again: bool  # whether it recomputes its stage
    begin: float  # in seconds since the step began
    seconds: float
    during: int  # peak bytes while it runs
    after: int  # bytes at its end


def measured_operations(
    step: Callable[[], object],
    sequence: Sequence,
    names: list[str],
    present: Iterable[torch.Tensor],
    device: torch.device,
    between: Callable[[], object] = lambda: None,
) -> tuple[TimedOperation, ...]:
    """Take `step` twice, once for time and once for memory; it follows `sequence` in a chain of stages called `names`.

    `present` are the tensors on the device before the step. An operation lasts until the next one begins, so it
    includes autograd's work in between. Backwards without gradient are not in the result.
    """
    times: list[float] = []

    def clock() -> None:
        # CUDA runs asynchronously: without synchronization, the clock would time kernel launches only.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    clock()  # the step begins
    # Measure time and memory in separate steps: counting memory slows a step.
    events = _events(step, clock)
    clock()
    between()
    marks = iter(range(len(events)))

    def with_marks(mark: Callable[[str], None]) -> None:
        found = _events(step, lambda: mark(str(next(marks))))
        assert found == events, "the same step did something else the second time"

    phases = measured_phases(with_marks, present, device)
    bounds = [moment - times[0] for moment in times[1:]]
    begins = list(_begins(events, sequence, names))
    ends = [*(at for at, _, _ in begins[1:]), len(events)]
    operations = []
    for (at, operation, again), end in zip(begins, ends, strict=True):
        within = [phases[str(each)] for each in range(at, end)]
        during, seconds = max(phase.peak for phase in within), bounds[end] - bounds[at]
        operations.append(TimedOperation(operation, again, bounds[at], seconds, during, within[-1].end))
    return tuple(operations)


def _events(step: Callable[[], object], also: Callable[[], None]) -> list[tuple[str, str, bool]]:
    """Run `step`; return an event (forward or backward, stage, whether it begins) each time a stage begins or ends."""
    found: list[tuple[str, str, bool]] = []

    def note(doing: str, name: str, begins: bool) -> None:
        found.append((doing, name, begins))
        also()

    with watched(note):
        step()
    return found


def _begins(
    events: list[tuple[str, str, bool]], sequence: Sequence, names: list[str]
) -> Iterator[tuple[int, Operation, bool]]:
    """Yield each operation, the index of the event at which it begins, and whether it recomputes its stage.

    Forwards come in the sequence's order, backwards from the last stage to the first, the loss after the last forward
    before it.
    """
    forwards = [operation for operation in sequence if not isinstance(operation, Backward | Loss)]
    before_loss = list(sequence).index(Loss())
    backward, forward = len(names), 0
    ran: set[str] = set()
    for at, (doing, name, begins) in enumerate(events):
        if doing == BACKWARD:
            # A stage with several output tensors reports each gradient: only the first begins its backward.
            if begins and name in names[:backward]:
                backward = names.index(name)
                yield at, Backward(backward), False
        elif begins:
            yield at, forwards[forward], name in ran
            ran.add(name)
            forward += 1
        elif forward == before_loss:
            yield at, Loss(), False


@contextmanager
def state_restored(network: Checkpointable, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Enter training mode without gradients; restore modes, gradients and the optimizer's state afterwards.

    Keeps the plan even if a step exceeds the limit. `TrainingStep` restores parameters and buffers itself.
    """
    gradients = [(parameter, parameter.grad) for parameter in network.model.parameters()]
    watch, network.watch = network.watch, False
    restored = nullcontext() if optimizer is None else optimizer_restored(optimizer)
    with in_training(network), torch.enable_grad(), restored:
        # Otherwise the first step would add to these gradients.
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            network.watch = watch
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextmanager
def values_restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    # Copy to the CPU: copies on a CUDA device would count in the measured peaks.
    saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in saved:
                before = copy.to(tensor.device)
                # Write changed buffers only: an expanded buffer cannot be written to.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


@contextmanager
def optimizer_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the optimizer's state: the same tensors with the same values, and no new ones."""
    # Do not use load_state_dict, which casts the state to the parameters' dtype and would lose digits.
    entries = [(parameter, *tree_flatten(dict(entry))) for parameter, entry in optimizer.state.items()]
    try:
        with values_restored(tensors_in([leaves for _, leaves, _ in entries])):
            yield
    finally:
        optimizer.state.clear()
        optimizer.state.update({parameter: tree_unflatten(leaves, spec) for parameter, leaves, spec in entries})


TIMED_STEPS = 3  # steps whose median time counts: the fewest whose median survives one disturbed step

# The callable that a step runs: the model itself, or a plan of it with the same parameters.
Network = Callable[..., Any]


@dataclass(slots=True)
class TrainingStep:
    """Forward, loss, backward and optimizer step of `model` on `sample`, with the losses of several forwards added up.

    Each method starts from the same parameters, buffers and random state, and restores them. Gradients and the
    optimizer's state persist from one method call to the next, as in training; `state_restored` restores them.
    """

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    fresh_grads: bool  # whether gradients are freed between steps, instead of set to zero
    steps_optimizer: bool = True  # whether the optimizer steps; its state counts as memory either way
    forwards: int = 1
    # Whether some networks step in the backward: results are then parameters, since no gradients remain.
    in_backward: bool = False
    last_loss: float = float("nan")  # loss of the last step of `taken`

    @contextmanager
    def taken(self, network: Network) -> Iterator[int]:
        """Yield the measured peak of a step, in bytes. Within the context, gradients and buffers are as after it."""
        with self._same_state():
            with self._restored():
                self._clear()
                self._train(network)  # the first step makes gradients and optimizer state, which later ones find
            with self._restored():
                self._clear()
                yield measured_peak(lambda: self._train(network), self._present(), self.device)

    def results(self) -> list[torch.Tensor]:
        return [*(self.model.parameters() if self.in_backward else self._gradients()), *self.model.buffers()]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def seconds(self, network: Network) -> float:
        """Median time of forward, loss and backward; with the optimizer step if some networks step in the backward."""
        times = []
        synchronize = torch.get_device_module(self.device).synchronize
        with self._same_state(), self._restored():
            for _ in range(TIMED_STEPS):
                self._clear()
                synchronize(self.device)
                begin = time.perf_counter()
                self._timed(network)
                synchronize(self.device)
                times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def operations(self, network: Network, sequence: Sequence, names: list[str]) -> tuple[TimedOperation, ...]:
        with self._same_state(), self._restored():
            self._clear()
            step = partial(self._timed, network, 1)
            return measured_operations(step, sequence, names, self._present(), self.device, between=self._clear)

    def _timed(self, network: Network, forwards: int | None = None) -> None:
        self._forward_backward(network, forwards)
        if self.in_backward and self.optimizer is not None:
            self.optimizer.step()

    def _train(self, network: Network) -> None:
        held = self._forward_backward(network)
        if self.steps_optimizer and self.optimizer is not None:
            self.optimizer.step()
        self.last_loss = held[1].item()
        del held  # not before: a training loop holds output and loss to the end of its step, so they count

    def _forward_backward(self, network: Network, forwards: int | None = None) -> tuple[Any, torch.Tensor]:
        held: list[tuple[Any, Any]] = []
        losses: list[torch.Tensor] = []
        for number in range(self.forwards if forwards is None else forwards):
            # Each forward gets its own copy of the batch with new leaves, so the caller's tensors get no gradient.
            given = self.sample if number == 0 else tree_map_only(torch.Tensor, torch.clone, self.sample)
            sample = tree_map_only(torch.Tensor, lambda each: leaves_of(each) if each.requires_grad else each, given)
            args, kwargs = arguments_of(sample, self.model)
            held.append((sample, network(*args, **kwargs)))
            if has_loss(held[-1][1]):  # the other outputs count as dropped
                losses.append(self.loss(held[-1][1]))
                held[-1] = sample, losses[-1]
        losses = losses or [self.loss(output) for _, output in held]
        loss: torch.Tensor = sum(losses)  # type: ignore[assignment] # not an int
        losses.clear()  # a training loop holds only their sum
        loss.backward()
        return held, loss

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=self.fresh_grads or self.in_backward)

    def _present(self) -> list[torch.Tensor]:
        state = [] if self.optimizer is None else tensors_in(list(self.optimizer.state.values()))
        return [*self.model.parameters(), *self._gradients(), *self.model.buffers(), *state, *tensors_in(self.sample)]

    def _same_state(self) -> AbstractContextManager[None]:
        """Restore the optimizer's state if parameters are compared: the next step must begin with the same state."""
        return optimizer_restored(self.optimizer) if self.in_backward and self.optimizer is not None else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore the random state and everything that a step changes in the model."""
        # Without the optimizer step no parameter changes, and copying all of them to the CPU takes time.
        changing = [*(self.model.parameters() if self.steps_optimizer else ()), *self.model.buffers()]
        state = RandomState.now((self.device,))
        try:
            with values_restored(changing), attributes_kept(self.model):
                yield
        finally:
            state.restore()
