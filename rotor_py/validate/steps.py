"""Take real training steps, planned and plain, measure them, and restore the model's state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import nn

from rotor_profiling import RandomState, has_loss, leaves_of, measured_peak, measured_phases, tensors_in
from rotor_profiling.attributes import attributes_kept
from rotor_profiling.isolate import gradients_of, set_meanwhile, undoing
from rotor_profiling.optimizer import with_inner
from rotor_profiling.value_tree import tree_flatten, tree_map_only, tree_unflatten
from rotor_py.checkpointable import Checkpointable
from rotor_py.plan.step_spec import arguments_of
from rotor_py.stage.error_context import BACKWARD, watched
from rotor_py.stage.user_state import optimizer_kept, user_state_kept
from rotor_py.transparent import in_training
from rotor_solver import Backward, Loss, Operation, Sequence


@dataclass(frozen=True, slots=True)
class TimedOperation:
    """A measured operation of a step, its seconds, and the bytes then allocated on the device."""

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
    """Call `step` twice, to measure time and then memory of the operations of `sequence`, which it follows.

    `names` are those of the chain's stages, `present` the tensors on the device before a step. `between` is called
    after the first. Autograd's work after an operation counts as its part. Backwards that autograd skips are left out.
    """
    times: list[float] = []
    found: list[tuple[Operation, bool]] = []

    def clock() -> None:
        # Kernels run after their launch returns: without this, the clock would time launches only.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    def timed(operation: Operation, again: bool) -> None:
        clock()
        found.append((operation, again))

    clock()  # the step begins
    _follow(step, sequence, names, timed)
    clock()
    between()
    # Measure memory in another step, since measuring it makes a step slower.
    marks = map(str, count())
    phases = measured_phases(
        lambda mark: _follow(step, sequence, names, lambda operation, again: mark(next(marks))), present, device
    )
    operations = []
    for number, ((operation, again), (begin, end)) in enumerate(zip(found, pairwise(times[1:]), strict=True)):
        phase = phases[str(number)]
        operations.append(TimedOperation(operation, again, begin - times[0], end - begin, phase.peak, phase.end))
    return tuple(operations)


def _follow(
    step: Callable[[], object], sequence: Sequence, names: list[str], begins: Callable[[Operation, bool], None]
) -> None:
    """Run `step`; as each operation begins, call `begins` with it and whether it recomputes its stage.

    Forwards come in the order of `sequence`, backwards from the last stage to the first, and the loss begins when the
    last forward before it ends.
    """
    forwards = [operation for operation in sequence if not isinstance(operation, Backward | Loss)]
    before_loss = sequence.index(Loss())
    ran: list[str] = []
    waiting = list(names)  # stages whose backward has not begun

    def note(doing: str, name: str, begun: bool) -> None:
        if doing == BACKWARD:
            # The backward of a stage with several output tensors begins once for each of them: count the first only.
            if begun and name in waiting:
                del waiting[waiting.index(name) :]
                begins(Backward(len(waiting)), False)
        elif begun:
            begins(forwards[len(ran)], name in ran)
            ran.append(name)
        elif len(ran) == before_loss:
            begins(Loss(), False)

    with watched(note):
        step()


@contextmanager
def state_restored(network: Checkpointable, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Drop gradients and set training mode; after the context, restore modes, gradients, optimizer and random state.

    Inside, a step over the limit does not change the plan. `TrainingStep` itself restores the model and the loss.
    """
    # The first step would add to present gradients.
    dropped = set_meanwhile(*((parameter, {"grad": None}) for parameter in network.model.parameters()))
    restored = nullcontext() if optimizer is None else optimizer_restored(optimizer)
    watch = set_meanwhile((network, {"watch": False}))
    with in_training(network), torch.enable_grad(), restored, watch, dropped, undoing() as undo:
        undo.append(RandomState.now((network.device,)).restore)
        yield


@contextmanager
def values_restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    # Copies go to the CPU: on a CUDA device, they would count in measured peaks.
    saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in saved:
                before = copy.to(tensor.device)
                # Skip unchanged tensors: `copy_` raises an error for an expanded buffer.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


@contextmanager
def optimizer_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """After the context, the optimizer and those inside it have their state from before, and nothing else is left."""
    # Not `load_state_dict`, which casts state to the dtype of its parameter: float32 state would lose digits.
    states = [each.state for each in with_inner(optimizer)]
    entries = [[(parameter, *tree_flatten(dict(entry))) for parameter, entry in state.items()] for state in states]
    tensors = tensors_in([leaves for each in entries for _, leaves, _ in each])
    try:
        with optimizer_kept(optimizer), values_restored(tensors):
            yield
    finally:
        for state, before in zip(states, entries, strict=True):
            state.clear()
            state.update({parameter: tree_unflatten(leaves, spec) for parameter, leaves, spec in before})


def tensors_before_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, sample: Any) -> list[torch.Tensor]:
    state = [] if optimizer is None else tensors_in(list(optimizer.state.values()))
    parameters = list(model.parameters())
    return [*parameters, *gradients_of(parameters), *model.buffers(), *state, *tensors_in(sample)]


TIMED_STEPS = 3  # number of steps whose median time counts: the least for which one slow step does not matter

# What a step calls: the model itself, or a `Checkpointable` or compiled form of it with the same parameters.
Network = Callable[..., Any]


@dataclass(slots=True)
class TrainingStep:
    """Training steps of `model` on `sample`: `forwards` forwards, one backward of their summed losses, optimizer step.

    Each method begins with the same parameters, buffers, random state and user's objects, and restores them. Gradients
    and the optimizer's state stay from one method call to the next, as in training; `state_restored` restores them.
    """

    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    fresh_grads: bool  # whether gradients are freed between steps, instead of set to zero
    steps_optimizer: bool = True  # whether `optimizer.step()` is called; optimizer state counts as memory either way
    forwards: int = 1
    # Whether parameters may be stepped in the backward: then these are the results, since gradients do not remain.
    in_backward: bool = False
    last_loss: float = float("nan")  # loss of the last step that `taken` has measured

    @contextmanager
    def taken(self, network: Network) -> Iterator[int]:
        """Take two steps by `network`; yield the peak bytes of the second. Then restore parameters and buffers."""
        with self._same_state():
            with self._restored():
                self._clear()
                self._train(network)  # makes gradients and optimizer state, as there are before later steps
            with self._restored():
                self._clear()
                yield measured_peak(lambda: self._train(network), self._present(), self.device)

    def results(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        return [*(parameters if self.in_backward else gradients_of(parameters)), *self.model.buffers()]

    def seconds(self, network: Network) -> float:
        """Return the median seconds of forward, loss and backward; with `in_backward`, also of the optimizer step."""
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
        del held  # only here: a training loop holds output and loss until now, so they count

    def _forward_backward(self, network: Network, forwards: int | None = None) -> tuple[Any, torch.Tensor]:
        held: list[tuple[Any, Any]] = []
        losses: list[torch.Tensor] = []
        for number in range(self.forwards if forwards is None else forwards):
            # Each forward has its own batch, with new leaves, so that the caller's tensors get no gradient.
            given = self.sample if number == 0 else tree_map_only(torch.Tensor, torch.clone, self.sample)
            sample = tree_map_only(torch.Tensor, lambda each: leaves_of(each) if each.requires_grad else each, given)
            args, kwargs = arguments_of(sample, self.model)
            held.append((sample, network(*args, **kwargs)))
            if has_loss(held[-1][1]):  # the model returns its loss: the other outputs are dropped, as plans assume
                losses.append(self.loss(held[-1][1]))
                held[-1] = sample, losses[-1]
        losses = losses or [self.loss(output) for _, output in held]
        loss: torch.Tensor = sum(losses)  # type: ignore[assignment] # not an int
        losses.clear()  # a training loop holds only the sum of the losses
        loss.backward()
        return held, loss

    def _clear(self) -> None:
        self.model.zero_grad(set_to_none=self.fresh_grads or self.in_backward)

    def _present(self) -> list[torch.Tensor]:
        return tensors_before_step(self.model, self.optimizer, self.sample)

    def _same_state(self) -> AbstractContextManager[None]:
        """With `in_backward`, restore the optimizer's state after the context: the compared parameters depend on it."""
        return optimizer_restored(self.optimizer) if self.in_backward and self.optimizer is not None else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """After the context, restore parameters, buffers and attributes of the model, and what its steps change."""
        changing = [*(self.model.parameters() if self.steps_optimizer else ()), *self.model.buffers()]
        kept = user_state_kept(self.model, self.sample, self.loss)
        with undoing() as undo, values_restored(changing), attributes_kept(self.model), kept:
            undo.append(RandomState.now((self.device,)).restore)
            yield
