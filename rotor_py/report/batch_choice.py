"""How large a batch, as data and in words: the batch that was chosen, and samples a second over all batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rotor_py.units import format_bytes

_CLOSE = 0.01
"""A gap that is not worth a word. A guess."""
Aim = Literal["max", "best"]
"""The largest batch that fits, or the one with the most samples a second."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """What a batch is worth inside the limit: predicted samples a second, by the fastest plan and with everything
    stored.

    The optimizer's step is in their time. `stored_per_second` is None where storing everything does not fit.
    """

    batch: int
    samples_per_second: float
    stored_per_second: float | None
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The batch that was chosen for `mem_limit` bytes, what it costs, and what others would.

    `step_seconds` are those of forward, loss and backward of one batch, `optimizer_seconds` those of the optimizer's
    step and of clearing gradients; `overhead` is the ratio of the first to storing everything. All of them are
    predicted from measured stages.
    """

    aim: Aim
    batch: int
    mem_limit: int
    step_seconds: float
    optimizer_seconds: float
    overhead: float
    samples_per_second: float
    largest: int
    """The largest batch that fits, recomputation included."""
    largest_stored: int | None
    """The largest batch that fits with everything stored; None if none does."""
    points: tuple[BatchPoint, ...]
    gap: float | None = None
    """The share of samples a second that another batch seems to have more, by costs interpolated between the measured
    batches. None for "max"."""
    beyond: int | None = None
    """The next batch after `largest`, which does not fit; None if none was to be looked at."""
    beyond_bytes: int = 0
    """What it needs at least: measured, or else predicted."""
    beyond_measured: bool = False
    effective_batch: int | None = None
    """The samples in a step of the optimizer, if they were given."""
    measured_peak_bytes: int | None = None
    """The peak of a real step of the batch; None where no step was taken."""
    measured_per_second: tuple[tuple[int, float], ...] = ()
    """Batches and their samples a second in real steps, which took turns, the optimizer's share included."""

    predicted: bool = False
    """Whether all of this is for a device that is not here, where nothing is measured."""

    @property
    def accumulation_steps(self) -> int:
        """How many batches there are in a step of the optimizer."""
        return 1 if self.effective_batch is None else self.effective_batch // self.batch

    def __str__(self) -> str:
        return " ".join(self.sentences())

    def sentences(self) -> tuple[str, ...]:
        """The answer, what is said beside it, and what was tried."""
        found = (self._answer(), self._beside(), self._accumulated(), self._tried())
        return tuple(each for each in found if each is not None)

    def point(self, batch: int) -> BatchPoint:
        """What a batch is worth. StopIteration if it is none of `points`."""
        return next(point for point in self.points if point.batch == batch)

    def _answer(self) -> str:
        inside = f"inside {format_bytes(self.mem_limit)}"
        rate = f"{format_rate(self.samples_per_second)} samples a second"
        if self.overhead == 1.0:
            price = "with nothing recomputed"
        else:
            price = f"at {self.overhead - 1:+.1%} time compared with storing everything"
        if self.aim == "best":
            real = dict(self.measured_per_second).get(self.batch)
            rate = f"{rate} predicted" + (f", {format_rate(real)} in real steps" if real is not None else "")
            return f"A batch of {self.batch} has the most samples a second {inside}: {rate}, {price}."
        rate += " predicted" if self.predicted else ""
        return f"A batch of {self.batch} is the largest {inside}: {rate}, {price}."

    def _beside(self) -> str:
        found = []
        if self.aim == "best":
            assert self.gap is not None
            if self.gap > _CLOSE:
                found.append(f"Between measured batches, one might have {self.gap:.1%} more: times vary here.")
            if self.largest != self.batch:
                rate = format_rate(self.point(self.largest).samples_per_second)
                found.append(f"The largest that fits is {self.largest}, with {rate} samples a second.")
        if self.beyond is not None:
            known = "measured" if self.beyond_measured else "predicted"
            # Not the size itself: in three digits, it would look like the limit.
            more = format_bytes(self.beyond_bytes - self.mem_limit)
            found.append(f"One of {self.beyond} would need {more} more than there is ({known}).")
        else:
            found.append(f"Larger batches than {self.largest} were not asked about.")
        if self.largest_stored is None:
            found.append("Without recomputation, no batch fits.")
        elif self.largest_stored == self.batch:
            found.append("It is also the largest without recomputation.")
        else:
            stored = self.point(self.largest_stored).stored_per_second
            assert stored is not None
            found.append(
                f"Without recomputation the largest is {self.largest_stored}, with {format_rate(stored)} samples a "
                "second."
            )
        return " ".join(found)

    def _accumulated(self) -> str | None:
        if self.effective_batch is None:
            return None
        steps = self.accumulation_steps
        batches = "one batch" if steps == 1 else f"{steps} batches"
        return f"Step the optimizer after {batches} of {self.batch}: {self.effective_batch} samples."

    def _tried(self) -> str | None:
        if self.predicted:
            return "No step was taken, and no batch was measured: the device is not here, so all of this is predicted."
        if self.measured_peak_bytes is None:
            return "No step was taken: this machine has no room for it now."
        tried = f"A real step of {self.batch} had a peak of {format_bytes(self.measured_peak_bytes)}."
        if not self.measured_per_second:
            return tried
        rates = ", ".join(f"{format_rate(rate)} with {batch}" for batch, rate in self.measured_per_second)
        return f"{tried} Samples a second in real steps, taken in turns: {rates}."


def format_rate(per_second: float) -> str:
    """Three significant digits, without a power of ten: 1,250, 83.2, 0.052."""
    digits = max(0, 2 - len(str(int(per_second))) + 1) if per_second >= 1 else 3
    return f"{float(f'{per_second:.3g}'):,.{digits}f}"
