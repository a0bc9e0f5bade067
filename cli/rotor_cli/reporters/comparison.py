"""The table of all strategies at one limit, for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rotor_py.report.terminal.stage_table import broken
from rotor_py.trials.comparison import ComparedStrategy
from rotor_py.units import format_bytes, format_seconds

_ANY = 10**4
"""Characters: more than any table is wide."""
_Part = Callable[["ComparedStrategy | None", str], "list[str | Text]"]


class Comparison:
    """One row for each strategy: what is predicted, and beside it what was measured, where anything was.

    In a narrow terminal, what was measured stands in a second table below.
    """

    def __init__(self, rows: tuple[ComparedStrategy, ...]) -> None:
        self.rows = rows
        self.measured = tuple(row for row in rows if row.verified is not None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def excess(table: Table) -> int:
            return Measurement.get(console, options.update(max_width=_ANY), table).maximum - options.max_width

        whole = _table(self.rows, (_predicted, _measured) if self.measured else (_predicted,), " ")
        if excess(whole) <= 0:
            yield whole
            return
        longest = max(len(row.strategy) for row in self.rows)
        predicted = _table(self.rows, (_predicted,), "\n")
        yield _table(self.rows, (_predicted,), "\n", longest - max(0, excess(predicted)))
        if self.measured:
            yield ""
            yield _table(self.measured, (_measured,), "\n", longest - max(0, excess(predicted)))


def _table(rows: tuple[ComparedStrategy, ...], parts: tuple[_Part, ...], gap: str, names: int = _ANY) -> Table:
    """A table of these parts, with names of at most `names` characters in a line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("strategy")
    for heading in (cell for part in parts for cell in part(None, gap)):
        table.add_column(heading, justify="left" if heading == "fits" else "right", no_wrap=True)
    for row in rows:
        cells = [cell for part in parts for cell in part(row, gap)]
        table.add_row("\n".join(broken(row.strategy, max(1, names))), *cells, style="" if row.fits else "dim")
    return table


def _predicted(row: ComparedStrategy | None, gap: str) -> list[str | Text]:
    """The cells of a row; the headings, their words `gap` apart, without one."""
    if row is None:
        return ["fits", f"predicted{gap}peak", "time", "overhead"]
    fits = Text("yes", style="green") if row.fits else Text("no", style="red")
    return [fits, format_bytes(row.peak_bytes), format_seconds(row.step_seconds), f"{row.overhead - 1:+.1%}"]


def _measured(row: ComparedStrategy | None, gap: str) -> list[str | Text]:
    if row is None:
        return [f"measured{gap}peak", f"measured{gap}time"]
    found = row.verified
    if found is None:
        return ["", ""]
    return [format_bytes(found.measured_peak_bytes), format_seconds(found.measured_step_seconds)]
