"""Time against memory over all limits, as data and in words."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from string import ascii_uppercase

from rotor_py.units import format_bytes, format_seconds, limit_text
from rotor_solver import Backward, ForwardEnable, Loss, Moment, Operation, Sequence


@dataclass(frozen=True, slots=True)
class Point:
    """A plan for a step of at most `mem_limit` bytes, and the ratio of its predicted time to the plain one.

    `name` is set for a strategy set by hand, and empty on the curve.
    """

    name: str
    mem_limit: int
    step_seconds: float
    overhead: float
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Sweep:
    """A step function: as limits of the whole step increase, times fall to that of storing everything.

    `fixed_bytes` is in memory under every plan; the rest is activation memory. `store_all_bytes` is the peak of plain
    training. `strategies` are other plans, each at its least memory.
    """

    fixed_bytes: int
    store_all_bytes: int
    points: tuple[Point, ...]
    strategies: tuple[Point, ...] = ()

    def least_for(self, overhead: float) -> Point:
        """The least limit with at most `overhead` more time than storing everything: 0.1 for a tenth."""
        return next((point for point in self.points if point.overhead <= 1 + overhead), self.points[-1])

    def saved(self, point: Point) -> float:
        """Share of plain activation memory that `point` saves."""
        activations = self.store_all_bytes - self.fixed_bytes
        return (self.store_all_bytes - point.mem_limit) / activations if activations > 0 else 0.0

    def lettered(self) -> list[tuple[str, Point]]:
        """The strategies with their letters in a picture."""
        return list(zip(ascii_uppercase, self.strategies, strict=False))


USUAL = 0.10
"""Default overhead in reports."""
_LEAST_SHOWN = 0.0005
"""Least saved share that does not read "0.0 %"."""


def label(operation: Operation, names: abc.Sequence[str]) -> str:
    """`Fe_3 layers.3`: operation and stage name; `L loss`."""
    return f"{operation} {'loss' if isinstance(operation, Loss) else names[operation.stage]}"


def kind(moment: Moment) -> str:
    """The kind of operation: "loss", "backward", "again", "keep" (a forward that saves) or "pass"."""
    match moment.operation:
        case Loss():
            return "loss"
        case Backward():
            return "backward"
        case ForwardEnable():
            return "again" if moment.again else "keep"
    return "again" if moment.again else "pass"


def sentence(moment: Moment, names: abc.Sequence[str], beside_bytes: int) -> str:
    """The operation with its time and the memory of the whole step, fixed part included."""
    return (
        f"{label(moment.operation, names)}{' (recompute)' if moment.again else ''}: {format_seconds(moment.seconds)}, "
        f"{format_bytes(beside_bytes + moment.during)} while it runs, {format_bytes(beside_bytes + moment.after)} after"
    )


def saving(sweep: Sweep, overhead: float = USUAL) -> str:
    """Memory saved by at most `overhead` more time; if none, the price of the first saving."""
    least, point, stored = sweep.points[0], sweep.least_for(overhead), format_bytes(sweep.store_all_bytes)
    saving_ones = [each for each in sweep.points if sweep.saved(each) >= _LEAST_SHOWN]
    if not saving_ones:
        return f"No plan needs {'noticeably ' if sweep.saved(least) > 0 else ''}less than storing everything: {stored}."
    if point not in saving_ones:
        point = saving_ones[-1]  # the first saving
    text = (
        f"{format_share(point.overhead - 1)} more time saves {format_share(sweep.saved(point))} of activation memory: "
        f"a limit of {limit_text(point.mem_limit)} instead of {stored}."
    )
    if point == least:
        return f"{text} Less is not possible."
    price = format_share(least.overhead - 1)
    return f"{text} The least possible is {limit_text(least.mem_limit)}, at {price} more time."


def format_share(share: float) -> str:
    """`7.5 %` below a tenth, else `12 %`."""
    return f"{100 * share:.{1 if abs(share) < 0.1 else 0}f} %"
