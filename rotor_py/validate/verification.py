"""Verify a plan by real steps: its peak and time, and that gradients and buffers are those of plain training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_profiling.isolate import set_meanwhile
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InvalidValueError, UnsupportedModelError
from rotor_py.plan.planned_model import plan_of
from rotor_py.stage.compression import rounded_stages
from rotor_py.validate.steps import Network, TimedOperation, TrainingStep, state_restored
from rotor_solver import Sequence, store_all
from rotor_solver.watching import Progress


def measured(model: nn.Module, sample: Any, options: dict[str, Any], *, closely: bool = False) -> Checkpointable:
    """Return `model` if it is a `Checkpointable`; else make one with `options`, and measure it on `sample`."""
    if isinstance(model, Checkpointable):
        if sample is not None or options:
            message = "pass a Checkpointable without sample and options: it has its own"
            raise InvalidValueError(message, kind="sample_given_twice")
        return model
    if sample is None:
        message = "a model has to be measured on a sample: pass one as the second argument"
        raise InvalidValueError(message, kind="no_sample")
    if not closely:
        return Checkpointable(model, sample, **options)
    network = Checkpointable(model, **options)
    network.measure(sample, closely=True)
    return network


def default_loss(output: Any) -> torch.Tensor:
    """Return `output.loss` or `output["loss"]` if it requires a gradient, else the mean square of the output.

    The mean squares of several tensors are summed. Raises UnsupportedModelError if no tensor requires a gradient.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own
    parts = [tensor.square().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        message = "the model's output does not depend on anything that needs a gradient, so there is nothing to train"
        raise UnsupportedModelError(message, kind="no_gradient")
    return sum(parts[1:], parts[0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Peak and seconds of one network's steps, and `results`: copies of gradients and buffers after one, on the CPU."""

    peak_bytes: int
    seconds: float
    results: list[torch.Tensor]
    buffers: int  # number of buffers, which come last in the results
    loss: float


def measure_outcome(step: TrainingStep, network: Network) -> Outcome:
    with step.taken(network) as peak:
        results = [tensor.detach().to("cpu", copy=True) for tensor in step.results()]  # copies take no device memory
    return Outcome(peak, step.seconds(network), results, len(list(step.model.buffers())), step.last_loss)


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest absolute difference of two elements; infinite if a tensor is missing, or only one is NaN."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if torch.equal(a, b) or (
            a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        ):
            continue
        distance = (a.double() - b.double()).abs().max().item()
        worst = max(worst, distance if distance == distance else float("inf"))  # NaN on one side only
    return worst


@dataclass(frozen=True, slots=True)
class Rounded:
    """Errors of a step whose plan rounds stored activations to the format `word`: "bf16", "fp8" or "int8" (`keep=`)."""

    word: str
    # Norm of all gradients' differences from the plain step's, divided by the norm of the plain step's gradients. If
    # parameters are stepped in the backward, the same of parameters after the step.
    gradient_error: float
    buffer_difference: float  # largest absolute difference of a buffer from the plain step's; forwards do not round


def compare_rounded(found: Outcome, plain: Outcome, word: str) -> Rounded:
    count = len(plain.results) - plain.buffers
    exact = torch.stack([each.double().norm() for each in plain.results[:count]]).norm()
    pairs = zip(found.results[:count], plain.results[:count], strict=True)
    apart = torch.stack([(one.double() - other.double()).norm() for one, other in pairs]).norm()
    error = 0.0 if not apart else float(apart / exact)
    return Rounded(word, error, difference(found.results[count:], plain.results[count:]))


def word_of_plan(network: Checkpointable) -> str | None:
    plan = plan_of(network)
    return plan.measurement.fewer_bits if rounded_stages(plan.budget.chain, plan.followed) else None


@dataclass(frozen=True, slots=True)
class Verification:
    """Results of real training steps, planned and plain, in bytes and seconds.

    Seconds are those of forward, loss and backward; peaks include the optimizer step. `max_grad_difference` is the
    largest absolute difference of a gradient or buffer from the plain step, or of a parameter after the step if
    parameters are stepped in the backward. This difference and `plain_*` are None if the plain step ran out of memory.
    """

    measured_peak_bytes: int
    measured_step_seconds: float
    max_grad_difference: float | None
    plain_peak_bytes: int | None
    plain_step_seconds: float | None
    noise: float = 0.0
    """Largest absolute difference between two plain steps: operators may sum in another order each time."""
    eager_difference: float | None = None
    """Largest absolute difference between the compiled step that stores everything and a step of the uncompiled model.

    If stages are compiled, the plain step runs the same compiled stages with everything stored, since compiled code
    rounds differently. None if nothing is compiled, or if one of the two steps ran out of memory.
    """
    operations: tuple[TimedOperation, ...] = ()
    """Operations of a planned step in order; () unless requested."""
    loss: float | None = None
    """Loss of the planned step. If it is not finite, gradients may be equal because all are NaN."""
    rounded: Rounded | None = None
    """Errors of gradients and buffers if the plan rounds stored activations (`keep=`), else None."""

    def problem(self, mem_limit: int) -> str | None:
        """Describe a peak over `mem_limit` bytes, or gradients or buffers unlike the plain step's; None if neither."""
        if self.measured_peak_bytes > mem_limit:
            return f"the measured peak of {self.measured_peak_bytes} bytes is over the limit of {mem_limit} bytes"
        # Allow four times the difference of plain steps. A guess: a lower factor reports noise, a higher hides errors.
        if (low := self.rounded) is not None:
            if not math.isfinite(low.gradient_error):
                return f"gradients of stages kept in {low.word} are not finite, or plain ones are zero or not finite"
            if not low.buffer_difference <= 4 * self.noise:
                return f"buffers differ from plain training by up to {low.buffer_difference:g}; the forward is exact"
        elif self.max_grad_difference is not None and not self.max_grad_difference <= 4 * self.noise:
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
    """Train steps of `model` with and without its plan, from the same state, and compare peak, time and gradients.

    The first result is the plan's; one for each of `others` follows. Afterwards, the model has its parameters, buffers,
    gradients, optimizer state, random state, mode and plan from before.

    Args:
        model: a `Checkpointable`, whose plan is verified (its first step makes a missing plan); or any model that
            `Checkpointable` takes, which is planned first.
        sample: a batch on the model's device: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: a function of the output that returns a scalar; None: the output's `loss`, else its mean square.
        optimizer: the optimizer, as given to the `Checkpointable`; steps whose peak is measured include it. It may be
            left out if it steps in the backward; parameters are then compared instead of gradients.
        fresh_grads: whether gradients are freed between steps; None: as given to the `Checkpointable`.
        others: other sequences for the same stages; steps by each are compared in the same way.
        operations: take two more planned steps, for the time and memory of each operation.
        progress: called with (number of measurements done, number of all, name of the next).
        options: other options of `Checkpointable`, such as `mem_limit`, for a plain model.

    Raises:
        ValueError: `model` is a `Checkpointable`, and `options` are given.
        UnsupportedModelError: the output depends on nothing that needs a gradient, or the model cannot be planned.
        InfeasibleError: the network has no plan yet, and none fits.
        torch.OutOfMemoryError: a planned step runs out of memory. A plain step that does is left out.
    """
    others = list(others)
    if isinstance(model, Checkpointable):
        network = measured(model, None, options)
    else:
        given = {"loss": loss or default_loss, "optimizer": optimizer, "fresh_grads": bool(fresh_grads), **options}
        network = measured(model, sample, given)
    in_backward = network.step_in_backward
    optimizer = optimizer if in_backward is None else in_backward
    freed = network.fresh_grads if fresh_grads is None else fresh_grads
    step = TrainingStep(network.model, sample, loss or default_loss, optimizer, network.device, freed)
    step.forwards, step.in_backward = network.forwards_in_flight, in_backward is not None

    def tell(done: int, name: str) -> None:
        if progress is not None:
            progress(done, 3 + len(others), name)

    with state_restored(network, optimizer):
        tell(0, "a step with the plan")
        with_plan = measure_outcome(step, network)
        word = word_of_plan(network)
        tell(1, "a plain step")
        plain: Outcome | None = None
        noise = 0.0
        with suppress(torch.OutOfMemoryError):  # many models are planned because the plain step does not fit
            found = measure_outcome(step, network.model)
            tell(2, "a plain step again")
            # A captured graph may round differently from the model's code. So the second plain step runs the graph, and
            # what differs from the first step counts as noise.
            second: Network = network.model
            if network.captured:
                from rotor_py.capture.captured_forward import run_as_captured  # importing TorchDynamo takes long

                second = run_as_captured(network.model)
            noise, plain = difference(measure_outcome(step, second).results, found.results), found
        eager: float | None = None
        if network.compiled:
            storing_all = set_meanwhile((network, {"sequence": store_all(network.build_chain())}))
            with suppress(torch.OutOfMemoryError), storing_all, network.compiled_without_budget():
                stored, again = (measure_outcome(step, network) for _ in range(2))
                eager = None if plain is None else difference(stored.results, plain.results)
                noise, plain = difference(stored.results, again.results), stored
        results = [replace(_compared(with_plan, plain, noise, word), eager_difference=eager)]
        del with_plan  # free its gradients on the CPU, which are as large as the model
        if operations:
            timed = step.operations(network, plan_of(network).followed, network.names)
            results[0] = replace(results[0], operations=timed)
        for number, sequence in enumerate(others):
            tell(3 + number, f"a step with {sequence.algorithm or 'another plan'}")
            with set_meanwhile((network, {"sequence": sequence})):
                results.append(_compared(measure_outcome(step, network), plain, noise, word_of_plan(network)))
    return tuple(results)


def _compared(found: Outcome, plain: Outcome | None, noise: float, word: str | None) -> Verification:
    if plain is None:
        return Verification(found.peak_bytes, found.seconds, None, None, None, loss=found.loss)
    compared = (difference(found.results, plain.results), plain.peak_bytes, plain.seconds, noise)
    rounded = None if word is None else compare_rounded(found, plain, word)
    return Verification(found.peak_bytes, found.seconds, *compared, loss=found.loss, rounded=rounded)
