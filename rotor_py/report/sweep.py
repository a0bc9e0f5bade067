"""Two curves as data and in words: time by memory limit, and samples per second by batch size."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

from rotor_py.units import format_bytes, format_seconds, limit_text
from rotor_solver import Backward, ForwardEnable, Loss, Moment, Operation, Sequence


@dataclass(frozen=True, slots=True)
class Point:
    """A plan, its step's peak `mem_limit` in bytes, its predicted seconds, and `overhead`, their ratio to store-all's.

    `name` is that of a strategy, such as "level 3"; it is empty for a point of the curve of optimal plans.
    """

    name: str
    mem_limit: int
    step_seconds: float
    overhead: float
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Sweep:
    """Curve of time against memory: `points` are the fastest plans, by increasing limit of the whole step.

    `fixed_bytes` are in memory throughout the step, whatever the plan; the rest counts as activation memory.
    `store_all_bytes` is the peak of plain training. `strategies` are other plans, each at its least memory.
    """

    fixed_bytes: int
    store_all_bytes: int
    points: tuple[Point, ...]
    strategies: tuple[Point, ...] = ()

    def least_for(self, overhead: float) -> Point:
        """Return the point of least memory that takes at most the share `overhead` longer than storing everything."""
        return next((point for point in self.points if point.overhead <= 1 + overhead), self.points[-1])

    def saved(self, point: Point) -> float:
        """Return the share of plain training's activation memory that `point` saves."""
        activations = self.store_all_bytes - self.fixed_bytes
        return (self.store_all_bytes - point.mem_limit) / activations if activations > 0 else 0.0

    def lettered(self) -> list[tuple[str, Point]]:
        """Return pairs of a strategy's letter in pictures and the strategy."""
        return list(zip(ascii_uppercase, self.strategies, strict=False))


USUAL = 0.10  # overhead for which reports say how much memory it saves, unless the user names another
_LEAST_SHOWN = 0.0005  # least share of saved memory that is not printed as "0.0 %"


def label(operation: Operation, names: abc.Sequence[str]) -> str:
    """Name an operation and its stage, as in `Fe_3 layers.3` and `L loss`."""
    return f"{operation} {'loss' if isinstance(operation, Loss) else names[operation.stage]}"


def kind(moment: Moment) -> str:
    """Name the kind of operation: "loss", "backward", "again" (recomputed), "keep" (with graph) or "pass" (without)."""
    kinds = {Loss: "loss", Backward: "backward", ForwardEnable: "keep"}
    return "again" if moment.again else kinds.get(type(moment.operation), "pass")


def sentence(moment: Moment, names: abc.Sequence[str], beside_bytes: int) -> str:
    """Describe an operation: its time, and memory during and after it, with the `beside_bytes` outside the chain."""
    return (
        f"{label(moment.operation, names)}{' (recompute)' if moment.again else ''}: {format_seconds(moment.seconds)}, "
        f"{format_bytes(beside_bytes + moment.during)} while it runs, {format_bytes(beside_bytes + moment.after)} after"
    )


def saving(sweep: Sweep, overhead: float = USUAL) -> str:
    """Say how much memory a plan saves in at most `overhead` more time; if none, describe the fastest that saves."""
    least, point, stored = sweep.points[0], sweep.least_for(overhead), format_bytes(sweep.store_all_bytes)
    saving_ones = [each for each in sweep.points if sweep.saved(each) >= _LEAST_SHOWN]
    if not saving_ones:
        return f"No plan needs {'noticeably ' if sweep.saved(least) > 0 else ''}less than storing everything: {stored}."
    if point not in saving_ones:
        point = saving_ones[-1]  # the plan that saves least
    text = (
        f"{format_share(point.overhead - 1)} more time saves {format_share(sweep.saved(point))} of activation memory: "
        f"a limit of {limit_text(point.mem_limit)} instead of {stored}."
    )
    if point == least:
        return f"{text} Less is not possible."
    price = format_share(least.overhead - 1)
    return f"{text} The least possible is {limit_text(least.mem_limit)}, at {price} more time."


def format_share(share: float) -> str:
    """Format a share with one decimal below a tenth, such as `7.5 %`, else with none, such as `12 %`."""
    return f"{100 * share:.{1 if abs(share) < 0.1 else 0}f} %"


_CLOSE = 0.01  # Least possible gain by another batch, as a share, that is mentioned. A guess; more hides small gains.
Aim = Literal["max", "best"]  # "max": the largest batch that fits. "best": the batch with the highest throughput.


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Samples per second of a batch within the limit, predicted: by the fastest plan, and with everything stored.

    Both include the optimizer step. `stored_per_second` is None if storing everything does not fit; `measured` says
    whether stages were measured with this batch; else, their costs are interpolated.
    """

    batch: int
    samples_per_second: float
    stored_per_second: float | None
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The batch chosen for `mem_limit` bytes, its cost, and the alternatives.

    `step_seconds` is the time of forward, loss and backward of a batch, `optimizer_seconds` that of `optimizer.step()`
    and `zero_grad()`. `overhead` is the ratio of `step_seconds` to the time of storing everything. Times of steps are
    predicted from times of stages.
    """

    aim: Aim
    batch: int
    mem_limit: int
    step_seconds: float
    optimizer_seconds: float
    overhead: float
    samples_per_second: float
    largest: int
    """Largest batch that fits with any plan."""
    largest_stored: int | None
    """Largest batch that fits without recomputation; None if none does."""
    points: tuple[BatchPoint, ...]
    gap: float | None = None
    """Share by which an unmeasured batch might have more samples a second, by interpolated costs. None for "max"."""
    beyond: int | None = None
    """Next candidate after `largest`, which does not fit; None if `largest` is the last candidate."""
    beyond_bytes: int = 0
    """Bytes that `beyond` needs: measured if `beyond_measured`, else a lower bound predicted from smaller batches."""
    beyond_measured: bool = False
    effective_batch: int | None = None
    """Number of samples in an optimizer step; None if it was not given."""
    measured_peak_bytes: int | None = None
    """Measured peak of a real step with the chosen batch; None if no step was taken."""
    measured_per_second: tuple[tuple[int, float], ...] = ()
    """Pairs of batch and samples per second in real steps, optimizer step included; the batches took turns."""

    predicted: bool = False
    """Whether the device is simulated, so that every number is predicted."""

    @property
    def accumulation_steps(self) -> int:
        """Number of batches in an optimizer step."""
        return 1 if self.effective_batch is None else self.effective_batch // self.batch

    def __str__(self) -> str:
        return " ".join(self.sentences())

    def sentences(self) -> tuple[str, ...]:
        """Return sentences about the chosen batch, other batches and the steps that were taken to choose."""
        found = [self._answer(), self._others()]
        if self.effective_batch is not None:
            batches = "one batch" if self.accumulation_steps == 1 else f"{self.accumulation_steps} batches"
            found.append(f"Step the optimizer after {batches} of {self.batch}: {self.effective_batch} samples.")
        return (*found, self._tried())

    def point(self, batch: int) -> BatchPoint:
        return next(point for point in self.points if point.batch == batch)

    def _answer(self) -> str:
        inside = f"inside {format_bytes(self.mem_limit)}"
        rate = f"{format_rate(self.samples_per_second)} samples a second"
        price = f"at {self.overhead - 1:+.1%} time compared with storing everything"
        price = "with nothing recomputed" if self.overhead == 1.0 else price
        if self.aim == "best":
            real = dict(self.measured_per_second).get(self.batch)
            rate = f"{rate} predicted" + (f", {format_rate(real)} in real steps" if real is not None else "")
            return f"A batch of {self.batch} has the most samples a second {inside}: {rate}, {price}."
        rate += " predicted" if self.predicted else ""
        return f"A batch of {self.batch} is the largest {inside}: {rate}, {price}."

    def _others(self) -> str:
        found = []
        if self.aim == "best":
            assert self.gap is not None
            if self.gap > _CLOSE:
                found.append(f"An unmeasured batch might have {self.gap:.1%} more: times vary.")
            if self.largest != self.batch:
                rate = format_rate(self.point(self.largest).samples_per_second)
                found.append(f"The largest that fits is {self.largest}, with {rate} samples a second.")
        if self.beyond is not None:
            known = "measured" if self.beyond_measured else "predicted"
            # Print the difference: with three digits, the size itself may read like the limit.
            more = format_bytes(self.beyond_bytes - self.mem_limit)
            found.append(f"A batch of {self.beyond} would need {more} more than the limit ({known}).")
        else:
            found.append(f"No batch larger than {self.largest} was a candidate.")
        if self.largest_stored is None:
            found.append("Without recomputation, no batch fits.")
        elif self.largest_stored == self.batch:
            found.append("It is also the largest without recomputation.")
        else:
            stored = self.point(self.largest_stored).stored_per_second
            assert stored is not None
            rate = format_rate(stored)
            found.append(f"Without recomputation the largest is {self.largest_stored}, with {rate} samples a second.")
        return " ".join(found)

    def _tried(self) -> str:
        if self.predicted:
            return "All numbers are predicted for a simulated device: no step was taken, and no batch was measured."
        if self.measured_peak_bytes is None:
            return "No step was taken: the device has too little free memory now."
        tried = f"A real step of {self.batch} had a peak of {format_bytes(self.measured_peak_bytes)}."
        if not self.measured_per_second:
            return tried
        rates = ", ".join(f"{format_rate(rate)} with {batch}" for batch, rate in self.measured_per_second)
        return f"{tried} Samples a second in real steps, taken in turns: {rates}."


def format_rate(per_second: float) -> str:
    """Format samples per second with three significant digits, at most three decimals: 1254 as 1,250; 83.21 as 83.2."""
    digits = max(0, 2 - len(str(int(per_second))) + 1) if per_second >= 1 else 3
    return f"{float(f'{per_second:.3g}'):,.{digits}f}"
