"""Compute coordinates for two pictures of the page: time by memory limit, and samples per second by batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace

from rotor_py.report.numbers import ReportFacts
from rotor_py.report.sweep import BatchChoice, BatchPoint, Point, Sweep, format_rate, format_share
from rotor_py.units import format_bytes, format_seconds

# Picture widths in pixels, labels included, for a screen and for a phone 390 pixels wide. A page has each picture in
# both widths and shows the one that fits: scaled to a phone, the letters of the wide one would be too small to read.
SCREEN, PHONE = 804, 354


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return the multiples of d from `low` to `high`, for the least d of 1, 2 or 5 · 10ⁿ that has at most `most`."""
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    for scale in (power, power + 1):
        for factor in (1, 2, 5):
            step = factor * 10.0**scale
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first < most:
                return [step * at for at in range(first, last + 1)]
    raise AssertionError


# Time by memory limit: a step function, with a mark for the report's plan, and a letter for each strategy. The time
# axis is logarithmic: a plan of least memory may take many times the plain time, but 10 % more must stay visible.


HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 240, 64, 28, 32, 44
_LABEL = 90  # width of a size label on the memory axis in pixels, padding included
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)
_APART, _FINEST = 20, 0.02  # least pixels between time labels; first labelled share of curves below 10 % more time


def curve_picture(facts: ReportFacts, sweep: Sweep, room: float = SCREEN) -> SimpleNamespace | None:
    """Return the shapes that the template draws for `sweep`, `room` pixels wide; None if the curve has one point.

    In the result, `width` is the length of the memory axis, and `limit_x` is None without a limit inside the picture.
    """
    points = sweep.points
    if len(points) < 2:
        return None
    width = room - LEFT - RIGHT
    plan = Point("", facts.peak_bytes, facts.step_seconds, facts.overhead, facts.sequence)
    least, most = min(points[0].mem_limit, plan.mem_limit), max(points[-1].mem_limit, plan.mem_limit)
    margin = 0.04 * (most - least)
    left, right = least - margin, most + margin
    highest = max(*(math.log(point.overhead) for point in (*points, plan)), math.log1p(_FINEST))
    # Strategies over twice as high as the curve (in logarithms) are only in the legend: they would flatten the curve.
    others = [math.log(point.overhead) for point in sweep.strategies]
    highest = 1.08 * max(highest, *(other for other in others if other <= 2 * highest), 0.0)

    def x(size: float) -> float:
        return LEFT + width * (size - left) / (right - left)

    def y(overhead: float) -> float:
        return TOP + HEIGHT * (1 - math.log(max(1.0, overhead)) / highest)

    def inside(point: Point) -> bool:
        return left <= point.mem_limit <= right and y(point.overhead) >= TOP

    limit = facts.mem_limit
    limit_x = x(limit) if limit is not None and left <= limit <= right else None
    sizes = round_numbers(left, right, max(2, int(width / _LABEL)))
    marks, legend = [], []
    for letter, point in sweep.lettered():
        where = "" if inside(point) else " (outside the picture)"
        cost = f"{format_bytes(point.mem_limit)}, {point.overhead - 1:+.1%} time"
        legend.append((letter, f"{point.name}: {cost}{where}"))
        if inside(point):
            marks.append((letter, x(point.mem_limit), y(point.overhead), f"{point.name}: {_cost(sweep, point)}"))
    return SimpleNamespace(
        width=width,
        line=f"M{x(points[0].mem_limit):.1f} {TOP}V{y(points[0].overhead):.1f}"
        + "".join(f"H{x(point.mem_limit):.1f}V{y(point.overhead):.1f}" for point in points[1:])
        + f"H{LEFT + width:.0f}",
        columns=tuple(_columns(sweep, [x(point.mem_limit) for point in points], LEFT + width)),
        sizes=tuple((x(size), format_bytes(int(size))) for size in sizes),
        shares=tuple((y(1 + share), f"+{share:.0%}" if share else "0%") for share in _shares(highest)),
        plan=SimpleNamespace(x=x(plan.mem_limit), y=y(plan.overhead), title=f"this plan: {_cost(sweep, plan)}"),
        limit_x=limit_x,
        marks=tuple(_placed(marks, [(x(plan.mem_limit), y(plan.overhead))], limit_x, width)),
        legend=legend,
    )


def _columns(sweep: Sweep, starts: list[float], right: float) -> Iterator[SimpleNamespace]:
    least = f"no plan needs less than {format_bytes(sweep.points[0].mem_limit)}"
    yield SimpleNamespace(x=LEFT, width=starts[0] - LEFT, title=least)
    sizes = [format_bytes(point.mem_limit) for point in sweep.points]
    limits = [*(f"from {size} to {above}" for size, above in pairwise(sizes)), f"of {sizes[-1]} or more"]
    for point, limit, (start, end) in zip(sweep.points, limits, pairwise((*starts, right)), strict=True):
        yield SimpleNamespace(x=start, width=end - start, title=f"a limit {limit}: {_cost(sweep, point)}")


def _cost(sweep: Sweep, point: Point) -> str:
    return (
        f"peak {format_bytes(point.mem_limit)}, {format_seconds(point.step_seconds)} a step, "
        f"{point.overhead - 1:+.1%} time, {format_share(sweep.saved(point))} of activation memory saved"
    )


def _shares(highest: float) -> list[float]:
    found = [0.0]
    for share in (_FINEST, *_SHARES) if highest < math.log1p(0.1) else _SHARES:
        height = math.log1p(share)
        if height <= highest and HEIGHT * (height - math.log1p(found[-1])) >= _APART * highest:
            found.append(share)
    return found


def _placed(
    points: list[tuple[str, float, float, str]], others: list[tuple[float, float]], wall: float | None, width: float
) -> Iterator[SimpleNamespace]:
    """Yield a mark for each point, its letter near by, clear of `others`, of letters and of a line at x = `wall`."""
    taken = [*others, *((x, y) for _, x, y, _ in points)]
    around = product(range(-70, 71, 10), range(-65, 66, 13))
    offsets = sorted(around, key=lambda by: (by[0] - 10) ** 2 + (by[1] + 13) ** 2)

    def free(x: float, y: float) -> bool:
        inside = LEFT + 6 <= x <= LEFT + width + RIGHT - 8 and TOP <= y <= TOP + HEIGHT - 6
        clear = wall is None or abs(x - wall) >= 8
        return inside and clear and all(abs(x - a) >= 10 or abs(y - b) >= 13 for a, b in taken)

    for letter, x, y, title in points:
        places = ((x + across, y + down) for across, down in offsets if across or down)
        place = next((place for place in places if free(*place)), (x, y))
        taken.append(place)
        yield SimpleNamespace(x=x, y=y, title=title, letter=letter, letter_x=place[0], letter_y=place[1])


# Samples per second by batch: a line for the fastest plans, one for storing everything, a mark for the chosen batch.
# The batch axis is logarithmic: samples per second change most between small batches, in which fixed costs dominate.


_BATCH_LABEL = 32  # least pixels between the centres of two labels of the batch axis


def batch_picture(choice: BatchChoice, room: float = SCREEN) -> SimpleNamespace | None:
    """Return the shapes that the template draws for `choice`, `room` pixels wide; None if there is one point only.

    In the result, `width` is the length of the batch axis; `stored`, the line for storing everything, may be "".
    """
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

    fastest = [f"{x(point.batch):.1f} {y(point.samples_per_second):.1f}" for point in points]
    rates = [(point.batch, point.stored_per_second) for point in points]
    stored = [f"{x(batch):.1f} {y(rate):.1f}" for batch, rate in rates if rate is not None]
    borders = [LEFT, *((x(one.batch) + x(other.batch)) / 2 for one, other in pairwise(points)), LEFT + width]

    def mark(point: BatchPoint, said: str = "") -> SimpleNamespace:
        return SimpleNamespace(x=x(point.batch), y=y(point.samples_per_second), title=said + _words(point))

    return SimpleNamespace(
        width=width,
        line="M" + "L".join(fastest),
        stored="M" + "L".join(stored) if len(stored) > 1 else "",
        columns=tuple(
            SimpleNamespace(x=begin, width=end - begin, title=_words(point))
            for point, (begin, end) in zip(points, pairwise(borders), strict=True)
        ),
        batches=tuple(_apart([(x(point.batch), str(point.batch)) for point in points])),
        rates=tuple((y(rate), format_rate(rate) if rate else "0") for rate in round_numbers(0, highest, 6)),
        measured=tuple(mark(point) for point in points if point.measured),
        chosen=mark(choice.point(choice.batch), "chosen: "),
    )


def _apart(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    kept = labels[-1:]
    for label in reversed(labels[:-1]):
        if kept[-1][0] - label[0] >= _BATCH_LABEL:
            kept.append(label)
    return kept[::-1]


def _words(point: BatchPoint) -> str:
    stored = "does not fit" if point.stored_per_second is None else format_rate(point.stored_per_second)
    rate, known = format_rate(point.samples_per_second), "" if point.measured else " (predicted)"
    return f"batch {point.batch}: {rate} samples a second, storing everything {stored}{known}"
