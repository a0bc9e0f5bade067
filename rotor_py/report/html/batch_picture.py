"""Samples a second over the batch, as shapes: a line for the fastest plans, one for storing everything, and the choice.

Batches are drawn by their logarithm: from one to the next, what a step costs in any case is shared by as many times
more samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from rotor_py.report.batch_choice import BatchChoice, BatchPoint, format_rate
from rotor_py.report.html.axis import SCREEN, Column, round_numbers
from rotor_py.report.html.curve_picture import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Mark

__all__ = ["BOTTOM", "HEIGHT", "LEFT", "RIGHT", "TOP", "WIDTH", "BatchPicture", "batch_picture"]

_LABEL = 32
"""Pixels from the middle of one batch's number to that of the next, at least."""


@dataclass(frozen=True, slots=True)
class BatchPicture:
    """In pixels; `width` is that between the axes. `stored` is empty where storing everything fits no batch, or one."""

    width: float
    line: str
    stored: str
    columns: tuple[Column, ...]
    batches: tuple[tuple[float, str], ...]
    rates: tuple[tuple[float, str], ...]
    measured: tuple[Mark, ...]
    chosen: Mark


def batch_picture(choice: BatchChoice, room: float = SCREEN) -> BatchPicture | None:
    """The points of a choice in `room` pixels; None where there is but one batch."""
    points = choice.points
    if len(points) < 2:
        return None
    width = room - LEFT - RIGHT
    first, last = math.log(points[0].batch), math.log(points[-1].batch)
    highest = 1.08 * max(*(point.samples_per_second for point in points), *(p.stored_per_second or 0.0 for p in points))

    def x(batch: float) -> float:
        return LEFT + width * (math.log(batch) - first) / (last - first)

    def y(rate: float) -> float:
        return TOP + HEIGHT * (1 - rate / highest)

    stored = [(x(point.batch), y(point.stored_per_second)) for point in points if point.stored_per_second is not None]
    borders = [LEFT, *((x(one.batch) + x(other.batch)) / 2 for one, other in pairwise(points)), LEFT + width]
    chosen = choice.point(choice.batch)
    return BatchPicture(
        width=width,
        line=_line((x(point.batch), y(point.samples_per_second)) for point in points),
        stored=_line(stored) if len(stored) > 1 else "",
        columns=tuple(
            Column(begin, end - begin, _words(point))
            for point, (begin, end) in zip(points, pairwise(borders), strict=True)
        ),
        batches=tuple((x(batch), str(batch)) for batch in _apart(_powers(points[0].batch, points[-1].batch), x)),
        rates=tuple((y(rate), format_rate(rate) if rate else "0") for rate in round_numbers(0, highest, 6)),
        measured=tuple(
            Mark(x(point.batch), y(point.samples_per_second), _words(point)) for point in points if point.measured
        ),
        chosen=Mark(x(chosen.batch), y(chosen.samples_per_second), f"chosen: {_words(chosen)}"),
    )


def _line(corners: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)


def _powers(least: int, most: int) -> list[int]:
    """The powers of two in a range, and its ends where they are not close to one."""
    powers = [2**at for at in range(most.bit_length()) if least <= 2**at <= most]
    ends = [end for end in (least, most) if all(abs(math.log2(end / power)) > 0.3 for power in powers)]
    return sorted({*powers, *ends})


def _apart(batches: list[int], x: Callable[[float], float]) -> list[int]:
    """The largest batch, and of the others those whose labels have room beside the next one's."""
    kept = batches[-1:]
    for batch in reversed(batches[:-1]):
        if x(kept[-1]) - x(batch) >= _LABEL:
            kept.append(batch)
    return kept[::-1]


def _words(point: BatchPoint) -> str:
    stored = "does not fit" if point.stored_per_second is None else f"{format_rate(point.stored_per_second)}"
    return (
        f"batch {point.batch}: {format_rate(point.samples_per_second)} samples a second, storing everything {stored}"
        + ("" if point.measured else " (predicted)")
    )
