"""The lowest level whose training step stays inside a limit, measured, beside the optimal plan for the same limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from rotor_profiling import RandomState, leaves_of, measured_peak, tensors_in
from rotor_py.by_hand.levels import LEVELS
from rotor_py.by_hand.strategy import ByHand
from rotor_py.checkpointable import Checkpointable, arguments_of
from rotor_py.errors import InfeasibleError
from rotor_py.measure.device import limit_bytes
from rotor_py.transparent import in_training
from rotor_py.units import format_bytes
from rotor_solver import Sequence, simulate

_RUNS = 3


@dataclass(frozen=True, slots=True)
class StepCost:
    """One way to train a step: its peak in bytes and its seconds, predicted from measured stages, and measured.

    Measured is a step without the optimizer's, which is in the predicted peak.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The lowest level that stays inside `mem_limit`, what it costs, and what the optimal plan for the limit costs.

    `peaks` are the predicted peaks of all levels, from 0 to 5.
    """

    level: int
    mem_limit: int
    chosen: StepCost
    optimal: StepCost
    peaks: tuple[int, ...]


def best_level(model: nn.Module, batch: Any, mem_limit: int | str, **options: Any) -> LevelChoice:
    """The lowest level with which a step of `model` on `batch` has a measured peak of at most `mem_limit`.

    `batch` is a tensor, a tuple of positional or a dict of keyword arguments; `options` are those of `Checkpointable`,
    such as `loss`, `optimizer` and `fresh_grads`. Steps are trained to measure them, after which gradients, buffers and
    the random state are put back; hooks of parameters are called. InfeasibleError if no level fits: its `min_bytes` is
    the least peak of all levels, and the optimal plan may fit where they do not.
    """
    planned = Checkpointable(model, batch, **options)
    assert planned.budget is not None
    limit = limit_bytes(mem_limit, planned.device)
    found = {level: ByHand(level=level).sequence(model, planned.budget, None) for level in LEVELS}
    peaks = {level: planned.budget.peak_bytes(sequence) for level, sequence in found.items()}
    for level, sequence in found.items():
        if peaks[level] > limit:
            continue
        chosen = _cost(planned, sequence, batch)
        if chosen.measured_peak_bytes <= limit:
            optimal = _cost(planned, planned.compute_sequence(limit), batch)
            return LevelChoice(level, limit, chosen, optimal, tuple(peaks.values()))
    least = min(peaks.values())
    raise InfeasibleError(
        f"no level fits: the least, level {min(peaks, key=lambda level: peaks[level])}, needs {format_bytes(least)} "
        f"({least} bytes) for a step; the limit is {format_bytes(limit)} ({limit} bytes). The optimal plan needs "
        f"{format_bytes(planned.budget.least_bytes())} at least: leave the level out.",
        min_bytes=least,
        mem_limit=limit,
    )


def _cost(planned: Checkpointable, sequence: Sequence, batch: Any) -> StepCost:
    """Train steps by `sequence`, in such a way that nothing is left of them."""
    assert planned.budget is not None
    planned.sequence = sequence
    with in_training(planned), torch.enable_grad(), _left_alone(planned):
        peak, seconds = _measured(planned, batch)
    return StepCost(
        predicted_peak_bytes=planned.budget.peak_bytes(sequence),
        measured_peak_bytes=peak,
        predicted_seconds=simulate(planned.budget.chain, sequence).makespan,
        measured_seconds=seconds,
    )


def _measured(planned: Checkpointable, batch: Any) -> tuple[int, float]:
    """The peak, and the median of the seconds, of steps after the first, which finds the gradients that it left."""
    model = planned.model
    clock = torch.get_device_module(planned.device)
    seconds = []
    for _ in range(1 + _RUNS):
        if planned._fresh_grads:
            model.zero_grad(set_to_none=True)
        clock.synchronize(planned.device)
        begin = time.perf_counter()
        _step(planned, batch)
        clock.synchronize(planned.device)
        seconds.append(time.perf_counter() - begin)
    if planned._fresh_grads:
        model.zero_grad(set_to_none=True)
    optimizer = planned._optimizer
    state = [] if optimizer is None else tensors_in([list(entry.values()) for entry in optimizer.state.values()])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    present = [*model.parameters(), *model.buffers(), *gradients, *state, *tensors_in(batch)]
    peak = measured_peak(lambda: _step(planned, batch), present, planned.device)
    return peak, median(seconds[1:])


def _step(planned: Checkpointable, batch: Any) -> None:
    args, kwargs = arguments_of(leaves_of(batch))
    output = planned(*args, **kwargs)
    if planned._loss is not None:
        planned._loss(output).backward()
        return
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    losses = [tensor for tensor in tensors if tensor.dim() == 0] or tensors
    torch.stack([tensor.sum() for tensor in losses]).sum().backward()


@contextmanager
def _left_alone(planned: Checkpointable) -> Iterator[None]:
    """Put gradients, buffers, the random state and the plan in use back afterwards."""
    model, state = planned.model, RandomState.now((planned.device,))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
        state.restore()
