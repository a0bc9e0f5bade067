"""Choose a batch: `largest_batch` and `best_batch`."""

# Note [Choosing a batch]
#
#  1. Two small batches are measured stage by stage: 2 and 4, or smaller ones if 4 might not fit. Lines through the
#     measured bytes of a step choose the next batch to measure, until `largest` has found two: the largest batch that
#     fits, and the largest that fits without recomputation. No step runs, as one that fails would hang other processes.
#  2. The search for the batch with the most samples a second interpolates costs between measured batches (`Curve`), and
#     measures the batch that it finds, up to `_ROUNDS` times. The answer is always a measured batch.
#  3. A real training step runs with the batch found. If its peak exceeds the limit, only smaller batches remain
#     candidates, and rules 1 and 2 are repeated. For "best", steps of the two batches of rule 1 run, too; the batch
#     with the most samples a second in these steps is chosen.
#  4. Processes that train together replace each cost by its maximum over all of them (`agreed_costs`). So all of them
#     measure the same batches and choose the same one.

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from rotor_py.batch_size.measured_batches import MeasuredBatches, PredictedBatches
from rotor_py.batch_size.search import Curve, Largest, interpolated, largest
from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Device, Devices
from rotor_py.errors import InfeasibleError, InvalidValueError, record_fields
from rotor_py.estimation.device_table import devices_of
from rotor_py.estimation.simulated_target import SimulatedDevices
from rotor_py.report.sweep import Aim, BatchChoice
from rotor_py.stage.user_state import user_state_kept
from rotor_py.units import exact_bytes, limit_text
from rotor_solver.described_error import check_count
from rotor_solver.watching import Progress

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("rotor_py")
_MOST = 2**16  # default of `most`: the largest batch that may be chosen
# Upper bound of repeated searches while a simulated device would run out of memory. A guess: too few may not fit.
_LOWERED = 3
# Upper bound of batches measured to find the fastest, as noisy times prolong the search. A guess: too few miss it.
_ROUNDS = 4
_TOLERANCE = 0.005  # Predicted gain in speed, as a share, above which another batch is measured; plans err by as much
_ROUNDED = 4 * 512  # Bytes per stage by which CUDA's rounding to 512 may raise a line. A guess: too few miss batches.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch(BatchChoice):
    """A chosen batch, and `network`: the model, planned for this batch and ready to train."""

    network: Checkpointable


def choose_batch(
    aim: Aim,
    /,
    model: nn.Module,
    sample_of: Callable[[int], Any],
    mem_limit: float | str | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool = False,
    multiple: int = 1,
    effective_batch: int | None = None,
    most: int = _MOST,
    progress: Progress | None = None,
    device: str | Device | Devices | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> PlannedBatch:
    options |= {"loss": loss, "fresh_grads": fresh_grads, "progress": progress}
    among: dict[str, Any] = {"multiple": multiple, "effective_batch": effective_batch, "most": most}
    if device is None:
        if autocast is not None:
            message = "autocast= needs a simulated device=; for a real device, call this inside torch.autocast"
            raise InvalidValueError(message, kind="device_elsewhere", name="autocast")
        return choose_among(aim, MeasuredBatches(model, sample_of, mem_limit, optimizer=optimizer, **options), **among)
    simulated = SimulatedDevices(devices_of(device))
    fakes = simulated.fakes
    with user_state_kept(model, None, loss, optimizer), simulated.together():
        fake = simulated.model(model).train()
        with simulated.measuring():
            options["optimizer"] = None if optimizer is None else fakes.optimizer(optimizer)
            batches = PredictedBatches(
                simulated, autocast, fake, lambda batch: fakes.value(sample_of(batch)), mem_limit, **options
            )
            return choose_among(aim, batches, keep_limit=mem_limit is not None, **among)


def choose_among(
    aim: Aim,
    batches: MeasuredBatches,
    *,
    multiple: int = 1,
    effective_batch: int | None = None,
    most: int = _MOST,
    keep_limit: bool = True,
) -> PlannedBatch:
    """Choose a batch for `aim`. Unless `keep_limit`, lower the limit while a simulated device would run out."""
    candidates = _candidates(multiple, effective_batch, most, fresh_grads=batches.fresh_grads)
    found = _chosen(aim, batches, candidates, effective_batch)
    for _ in range(_LOWERED):
        missing = 0 if keep_limit else batches.missing_bytes(found.batch, found.mem_limit)
        if not missing:
            break
        batches.limit = found.mem_limit - missing
        found = _chosen(aim, batches, candidates, effective_batch)
    return found


def _chosen(aim: Aim, batches: MeasuredBatches, among: Sequence[int], effective_batch: int | None) -> PlannedBatch:
    if not _probe(batches) and among[0] == 1 and len(among) > 1:
        among = among[1:]
    limit = batches.mem_limit
    curve: Curve | None = None
    over: Largest | None = None  # smallest batch that was predicted to fit, but whose real step exceeded the limit
    while True:
        fits, stored = _largest(batches, among, limit, stored=False), _largest(batches, among, limit, stored=True)
        if fits is None:
            raise _infeasible(batches, among[0], limit)
        if over is not None:
            fits = replace(fits, beyond=over.batch, beyond_bytes=over.needs, beyond_measured=True)
        if curve is None:  # only now: `optimizer_seconds` runs an optimizer step, which fits if a batch does
            curve = Curve(batches.costs, limit, batches.optimizer_seconds, effective_batch, batches.slots)
        chosen, gap, tried = fits.batch, None, {fits.batch}
        if aim == "best":
            chosen, gap = _best(batches, [batch for batch in among if batch <= fits.batch], curve)
            tried |= {chosen} if stored is None else {chosen, stored.batch}
        peaks = {batch: batches.step_peak(batch) for batch in sorted(tried)}
        beyond = [(batch, peak) for batch, peak in peaks.items() if peak is not None and peak > limit]
        if not beyond:
            break
        over = Largest(*beyond[0])
        _log.warning(
            "a step of %d samples has a peak of %d bytes, beyond the limit of %d: looking for smaller batches",
            over.batch, over.needs, limit,
            extra=record_fields("over_limit", batch=over.batch, peak_bytes=over.needs, mem_limit=limit),
        )  # fmt: skip
        if over.batch == among[0]:
            raise _infeasible(batches, among[0], limit)
        among = among[: among.index(over.batch)]
    rates: dict[int, float] = {}
    if len(peaks) > 1 and None not in peaks.values():
        seconds = batches.seconds_in_turns(peaks)
        rates = {batch: 1 / curve.with_optimizer(each, batch) for batch, each in seconds.items()}
        chosen = max(rates, key=rates.__getitem__)
    curve.planned.clear()
    points = curve.points(among, fits.batch, {chosen, *((stored.batch,) if stored else ())})
    stored_seconds = batches.of(chosen).stored_seconds
    return PlannedBatch(
        aim=aim,
        batch=chosen,
        mem_limit=limit,
        step_seconds=curve.seconds(chosen),
        optimizer_seconds=curve.optimizer_seconds,
        overhead=curve.seconds(chosen) / stored_seconds if stored_seconds else 1.0,
        samples_per_second=1 / curve.per_sample(chosen),
        largest=fits.batch,
        largest_stored=None if stored is None else stored.batch,
        points=tuple(replace(each, measured=each.measured and not batches.predicted) for each in points),
        gap=gap,
        beyond=fits.beyond,
        beyond_bytes=fits.beyond_bytes,
        beyond_measured=fits.beyond_measured and not batches.predicted,
        predicted=batches.predicted,
        effective_batch=effective_batch,
        measured_peak_bytes=peaks[chosen],
        measured_per_second=tuple(sorted(rates.items())),
        network=batches.network(chosen),
    )


def _probe(batches: MeasuredBatches) -> bool:
    """Measure two small batches, to predict others by lines. Return whether a batch of one sample may be chosen."""
    # Do not start with one sample: BatchNorm may refuse it, and TorchDynamo compiles size 1 specially.
    first = batches.of(2)
    fixed, limit = first.budget.fixed.total, batches.mem_limit
    for second in (4, 3):
        # Upper bound of a step's bytes, as if all but the fixed ones grew with the batch. Measuring stages needs less.
        if fixed + (first.least_bytes - fixed) * second // 2 <= limit:
            batches.of(second)
            return True
    if batches.trains_on(1):
        return True
    batches.of(3)
    return False


def _largest(batches: MeasuredBatches, among: Sequence[int], mem_limit: int, *, stored: bool) -> Largest | None:
    """Find the largest of the batches `among` that fits: without recomputation if `stored`, else with any plan."""

    def needs(batch: int) -> int:
        costs = batches.of(batch)
        return costs.stored_bytes if stored else costs.least_bytes

    known = {batch: needs(batch) for batch in batches.costs}
    slack = _ROUNDED * len(next(iter(batches.costs.values())).stages) if batches.on_cuda else 0
    return largest(among, needs, known, mem_limit, slack)


def _best(batches: MeasuredBatches, inside: list[int], curve: Curve) -> tuple[int, float]:
    """Return the fastest measured batch `inside`, and the share by which an unmeasured one may be faster per sample."""
    for left in range(_ROUNDS, -1, -1):
        curve.planned.clear()  # planned from costs that were interpolated without the batch measured last
        seen = curve.best(inside)
        best = min((batch for batch in batches.costs if batch in inside), key=curve.per_sample)
        gap = max(0.0, curve.per_sample(best) / curve.per_sample(seen) - 1)
        # A smaller predicted gain may be an error of the plans.
        if gap <= _TOLERANCE or not left:
            return best, gap
        if not batches.trains_on(seen):
            inside.remove(seen)
    raise AssertionError


def _infeasible(batches: MeasuredBatches, batch: int, mem_limit: int) -> InfeasibleError:
    costs = interpolated(batches.costs, batch) or batches.of(batch)
    least = costs.least_bytes
    message = (
        f"try a limit of {limit_text(least)}: not even a batch of {batch} fits {exact_bytes(mem_limit)}; it needs "
        f"{exact_bytes(least)} at least, of which {costs.budget.split()}"
    )
    return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, kind="no_batch_fits")


def _candidates(multiple: int, effective_batch: int | None, most: int, *, fresh_grads: bool) -> Sequence[int]:
    for name, number in (("multiple", multiple), ("effective_batch", effective_batch), ("most", most)):
        if number is not None:
            check_count(number, name)
    if effective_batch is None:
        if multiple > most:
            message = f"raise most or lower multiple: no multiple of {multiple} is at most {most}"
            raise InvalidValueError(message, kind="no_batch", name="multiple", multiple=multiple, most=most)
        return range(multiple, most + 1, multiple)
    if fresh_grads:
        message = "leave out fresh_grads, which frees gradients, or effective_batch, which adds them up over batches"
        raise InvalidValueError(message, kind="excluded_together", name="fresh_grads")
    found = [b for b in range(multiple, min(most, effective_batch) + 1, multiple) if effective_batch % b == 0]
    if not found:
        message = f"choose another effective_batch: no multiple of {multiple} up to {most} divides {effective_batch}"
        raise InvalidValueError(message, kind="not_divisible", name="effective_batch")
    return found


def _for_one_aim(choose: Callable[Concatenate[Aim, P], R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the parameters of `choose` except the first, `aim`, for type checkers, `help` and editors."""

    def decorated(function: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(choose)
        function.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values()][1:])
        return function

    return decorated


@_for_one_aim(choose_batch)
def largest_batch(*args: Any, **kwargs: Any) -> PlannedBatch:
    """Find the largest batch for which a planned training step of `model` stays within `mem_limit`.

    Measures some batches stage by stage, which needs less memory than a step, then runs a real step with the one found.
    Restores parameters, gradients, buffers, optimizer and random state. Processes that train together choose the same.

    Args:
        model: any model that `Checkpointable` takes.
        sample_of: a function of the batch size that returns a sample on the model's device: a tensor, a tuple of
            positional or a dict of keyword arguments.
        mem_limit: limit of a whole step's peak: bytes, or a text such as "4GB", "512MiB", "80%". None is 90 % of the
            device memory available to this process.
        loss: a function of the model's output that returns the loss; None: the output's `loss`, else its mean square.
        optimizer: the optimizer, whose state counts toward the limit, and whose step counts toward the time.
        fresh_grads: whether gradients are freed between steps, as by `optimizer.zero_grad()`.
        multiple: only multiples of this number of samples may be chosen.
        effective_batch: samples per optimizer step, accumulated over batches. Only its divisors may be chosen. Not with
            `fresh_grads`, which would free the accumulated gradients.
        most: the largest batch that may be chosen.
        progress: called while measuring with (number of stages measured, number of all stages, next stage and batch).
        device: a device to simulate, such as "h100", as for `estimate`. Then all costs are predicted with a copy of
            the model on fake tensors, and no step runs.
        autocast: with `device`, forward and loss run under `torch.autocast` with this dtype.
        options: further arguments of `Checkpointable`, except `compile`, `plan`, `custom_input`, `step_in_backward`,
            `level`, `every_n_layers` and `max_checkpoints`.

    Raises:
        InfeasibleError: not even the smallest batch fits; `min_bytes` is the least limit within which it would.
        ValueError: an argument is invalid.
        UnsupportedModelError: the model cannot be planned, or `sample_of` returns no more bytes for a larger batch.
    """
    return choose_batch("max", *args, **kwargs)


@_for_one_aim(choose_batch)
def best_batch(*args: Any, **kwargs: Any) -> PlannedBatch:
    """Find the batch with the most samples a second within `mem_limit`, recomputation and optimizer step included.

    Arguments and errors are those of `largest_batch`. The result's `gap` is a prediction, from costs interpolated
    between measured batches: 0.02 means that an unmeasured batch may have up to 2 % more samples a second.
    """
    return choose_batch("best", *args, **kwargs)
