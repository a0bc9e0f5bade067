"""Take real training steps, planned and plain, and compare peak, time and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotor_py.checkpointable import Checkpointable
from rotor_py.trials.default_loss import default_loss
from rotor_py.trials.measured import measured
from rotor_py.trials.operations import TimedOperation
from rotor_py.trials.outcome import Outcome, difference, measure_outcome
from rotor_py.trials.restore import left_alone
from rotor_py.trials.rounded import Rounded, rounded_beside, word_of_plan
from rotor_py.trials.step import TrainingStep
from rotor_solver import Sequence, store_all
from rotor_solver.progress import Progress


@dataclass(frozen=True, slots=True)
class Verification:
    """What a real training step showed, in bytes and seconds.

    Times are of forward, loss and backward; the optimizer's step is in the peaks. `max_grad_difference` is the largest
    absolute difference of a gradient or buffer from the plain step, or of a parameter after the step where parameters
    are stepped in the backward. It and `plain_*` are None where the plain step did not fit into the device.
    """

    measured_peak_bytes: int
    measured_step_seconds: float
    max_grad_difference: float | None
    plain_peak_bytes: int | None
    plain_step_seconds: float | None
    noise: float = 0.0
    """By how much two plain steps differ: operators may sum in another order each time."""
    eager_difference: float | None = None
    """Where stages run compiled, the plain step is that of the same stages with everything stored: compiled code rounds
    otherwise than the model's own. This is by how much that step differs from one of the model uncompiled; None where
    nothing is compiled, or where that step does not fit into the device."""
    operations: tuple[TimedOperation, ...] = ()
    """What the step with the plan did one after the other, if that was asked for."""
    loss: float | None = None
    """The loss of the step with the plan. Where it is not finite, equal gradients say little."""
    rounded: Rounded | None = None
    """How far gradients are from exact ones, where the plan keeps stages in fewer bits (`keep=`)."""

    def problem(self, mem_limit: int) -> str | None:
        """What is wrong with the step for a limit of `mem_limit` bytes, in words; None if nothing is."""
        if self.measured_peak_bytes > mem_limit:
            return f"the measured peak of {self.measured_peak_bytes} bytes is over the limit of {mem_limit} bytes"
        if self.rounded is not None:
            return self.rounded.problem()
        # One measured difference is no bound on the noise, so four times as much is allowed. The factor is a guess.
        if self.max_grad_difference is not None and not self.max_grad_difference <= 4 * self.noise:
            plain = "plain training" if self.eager_difference is None else "the compiled step that stores everything"
            return f"gradients or buffers differ from {plain} by up to {self.max_grad_difference:g}"
        return None


def verify(
    model: nn.Module,
    sample: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool | None = None,
    others: Iterable[Sequence] = (),
    operations: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Verification, ...]:
    """Train steps of `model` with its plan and without, from the same state, and compare them.

    The first result is that of the plan; then follows one for each of `others`. Parameters, buffers, gradients, the
    optimizer's state, the random state, the mode and the plan in use are afterwards what they were.

    Args:
        model: a `Checkpointable`, whose plan is verified; without one, the first step makes it. Or any model that it
            takes, which is planned for that.
        sample: a batch on the model's device: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: a function of the output that returns a single number; `default_loss` if it is not given.
        optimizer: takes its step in the steps whose peak is measured. Give what the `Checkpointable` was given. One
            that steps in the backward is known, and parameters are compared instead of gradients.
        fresh_grads: gradients are freed between steps. None: as the `Checkpointable` was told.
        others: sequences to be followed instead of the plan.
        operations: take two more steps with the plan, for the time and the memory of each of its operations.
        progress: called with (steps compared, all of them, what the next one is).
        options: other options of `Checkpointable`, such as `mem_limit`, for a model that is none yet.

    Raises:
        ValueError: a `Checkpointable` is given options.
        UnsupportedModelError: the output depends on nothing that needs a gradient, or the model cannot be planned.
        InfeasibleError: the network has no plan yet, and none fits.
        torch.OutOfMemoryError: a step with a plan does not fit into the device. A plain step that does not is no error.
    """
    others = list(others)
    if isinstance(model, Checkpointable):
        network = measured(model, None, options)
    else:
        given = {"loss": loss or default_loss, "optimizer": optimizer, "fresh_grads": bool(fresh_grads), **options}
        network = measured(model, sample, given)
    in_backward = network.step_in_backward
    optimizer = optimizer if in_backward is None else in_backward
    step = TrainingStep(
        network.model,
        sample,
        loss or default_loss,
        optimizer,
        network.device,
        fresh_grads=network.fresh_grads if fresh_grads is None else fresh_grads,
        forwards=network.forwards_in_flight,
        in_backward=in_backward is not None,
    )

    def tell(done: int, what: str) -> None:
        if progress is not None:
            progress(done, 3 + len(others), what)

    with left_alone(network, optimizer), _not_watched(network):
        tell(0, "a step with the plan")
        with_plan = measure_outcome(step, network)
        word = word_of_plan(network)
        tell(1, "a plain step")
        plain: Outcome | None = None
        noise = 0.0
        with suppress(torch.OutOfMemoryError):  # people come here because the plain step may not fit
            found = measure_outcome(step, network.model)
            tell(2, "a plain step again")
            # A captured graph may round in another way than the model's own code. That is no fault of the plan, so
            # the second plain step runs the graph, and the difference counts as noise.
            second = _as_captured(network.model) if network.captured else network.model
            noise, plain = difference(measure_outcome(step, second).results, found.results), found
        eager: float | None = None
        if network.compiled:
            with suppress(torch.OutOfMemoryError), _same_plan_afterwards(network), network.compiled_without_budget():
                assert network.chain is not None
                network.sequence = store_all(network.chain)
                stored, again = (measure_outcome(step, network) for _ in range(2))
                eager = None if plain is None else difference(stored.results, plain.results)
                noise, plain = difference(stored.results, again.results), stored
        results = [replace(_compared(with_plan, plain, noise, word), eager_difference=eager)]
        del with_plan  # its gradients, on the CPU, are as large as the model
        if operations:
            assert network.sequence is not None
            ran = step.operations(network, network.sequence, network.names)
            results[0] = replace(results[0], operations=ran)
        with _same_plan_afterwards(network):
            for number, sequence in enumerate(others):
                tell(3 + number, f"a step with {sequence.algorithm or 'another plan'}")
                network.sequence = sequence
                results.append(_compared(measure_outcome(step, network), plain, noise, word_of_plan(network)))
    return tuple(results)


def _as_captured(model: nn.Module) -> Callable[..., Any]:
    from rotor_py.capture.captured_forward import run_as_captured  # TorchDynamo takes as long as half of torch

    return run_as_captured(model)


def _compared(found: Outcome, plain: Outcome | None, noise: float, word: str | None) -> Verification:
    if plain is None:
        return Verification(found.peak_bytes, found.seconds, None, None, None, loss=found.loss)
    compared = (difference(found.results, plain.results), plain.peak_bytes, plain.seconds, noise)
    rounded = None if word is None else rounded_beside(found, plain, noise, word)
    return Verification(found.peak_bytes, found.seconds, *compared, loss=found.loss, rounded=rounded)


@contextmanager
def _not_watched(network: Checkpointable) -> Iterator[None]:
    """Have the plan stay what it is, even if a step shows that it needs more than the limit."""
    watch, network.watch = network.watch, False
    try:
        yield
    finally:
        network.watch = watch


@contextmanager
def _same_plan_afterwards(network: Checkpointable) -> Iterator[None]:
    sequence = network.sequence
    try:
        yield
    finally:
        network.sequence = sequence
