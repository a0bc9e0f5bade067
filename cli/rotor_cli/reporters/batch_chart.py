"""Samples a second over the batch, for a terminal."""

from __future__ import annotations

import math

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rotor_py.report.batch_choice import BatchChoice, format_rate

_HEIGHT, _WIDEST, _LABEL = 12, 100, 8
PLANNED, STORED, CHOSEN = "●", "○", "◆"


class BatchChart:
    """The points of a choice, as wide as the console; batches by their logarithm."""

    def __init__(self, choice: BatchChoice) -> None:
        self.choice = choice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            f"samples a second by the batch: {PLANNED} by the fastest plan, {STORED} storing everything, "
            f"{CHOSEN} this batch",
            style="dim",
        )
        yield Text("\n".join(batch_chart(self.choice, min(options.max_width, _WIDEST))), no_wrap=True)


def batch_chart(choice: BatchChoice, width: int) -> list[str]:
    """Lines of at most `width` characters."""
    points, columns = choice.points, width - _LABEL - 2
    first, last = math.log(points[0].batch), math.log(points[-1].batch)
    highest = max(max(point.samples_per_second, point.stored_per_second or 0.0) for point in points)
    cells = [[" "] * columns for _ in range(_HEIGHT)]

    def mark(batch: int, rate: float, sign: str) -> None:
        share = (math.log(batch) - first) / (last - first) if last > first else 0.0
        cells[_HEIGHT - 1 - round(rate / highest * (_HEIGHT - 1))][round(share * (columns - 1))] = sign

    for point in points:
        mark(point.batch, point.samples_per_second, PLANNED)
    for point in points:  # over the others: where both are, nothing has to be recomputed
        if point.stored_per_second is not None:
            mark(point.batch, point.stored_per_second, STORED)
    mark(choice.batch, choice.samples_per_second, CHOSEN)
    labels = [format_rate(highest), *[""] * (_HEIGHT - 2), "0"]
    ends = str(points[0].batch), str(points[-1].batch)
    return [
        *(f"{label:>{_LABEL}} │{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)),
        f"{'':{_LABEL}} └{'─' * columns}",
        f"{'':{_LABEL}}  {ends[0]}{ends[1]:>{columns - len(ends[0])}}",
    ]
