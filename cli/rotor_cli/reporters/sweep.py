"""Memory against time, for people: what a tenth more time saves, a chart, and the strategies on it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rotor_cli.reporters.chart import ARROWS, chart
from rotor_py.report.sweep import Sweep
from rotor_py.report.terminal.prose import Prose
from rotor_py.report.wording import USUAL, format_share, saving
from rotor_py.units import format_bytes

_HEIGHT, _WIDEST = 14, 100


def curve(sweep: Sweep, title: str, overhead: float | None = None) -> RenderableType:
    """The sentence about `overhead` more time, 10 % unless given, the chart, and what its letters stand for."""
    parts: list[RenderableType] = [Prose(f"{title}: {saving(sweep, USUAL if overhead is None else overhead)}")]
    if len(sweep.points) > 1:
        parts += ["", _Chart(sweep)]
    return Group(*parts, "", strategies(sweep))


def strategies(sweep: Sweep) -> Table:
    """The letters of the chart: each strategy at the least memory that it needs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("at its least", overflow="fold")
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("overhead", justify="right", no_wrap=True)
    for letter, point in sweep.lettered():
        table.add_row(letter, point.name, format_bytes(point.mem_limit), f"{point.overhead - 1:+.1%}")
    return table


def plot(sweep: Sweep, path: str | Path, title: str) -> None:
    """Draw the same into an image file."""
    from rotor_solver.frontier import draw

    points = [(point.name, point.mem_limit, point.overhead - 1) for point in sweep.strategies]
    limits, overheads = zip(*((point.mem_limit, point.overhead - 1) for point in sweep.points), strict=True)
    draw(path, limits, overheads, points=points, title=title)


class _Chart:
    """The chart, as wide as the console."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        points = self.sweep.points
        lines = chart(
            [(point.mem_limit, point.overhead - 1) for point in points],
            [(letter, point.mem_limit, point.overhead - 1) for letter, point in self.sweep.lettered()],
            width=min(options.max_width, _WIDEST),
            height=_HEIGHT,
            top=format_share(points[0].overhead - 1),
            ends=(format_bytes(points[0].mem_limit), format_bytes(points[-1].mem_limit)),
        )
        outside = any(arrow in line for line in lines for arrow in ARROWS)
        arrows = "; arrows: further out than the chart" if outside else ""
        yield Text(f"more time, by the limit of the whole step{arrows}", style="dim")
        yield Text("\n".join(lines), no_wrap=True)
