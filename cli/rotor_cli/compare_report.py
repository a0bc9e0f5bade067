"""The table of all strategies at one limit, for people."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from rotor_cli.compare import Row
from rotor_py.report.text import format_seconds
from rotor_py.units import format_bytes


def comparison(rows: tuple[Row, ...]) -> Table:
    """One row for each strategy: what is predicted, and beside it what was measured, where anything was."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("strategy", overflow="fold")
    table.add_column("fits")
    measured = any(row.verified is not None for row in rows)
    headings = ("predicted peak", "time", "overhead")
    for heading in (*headings, "measured peak", "time") if measured else headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [format_bytes(row.peak_bytes), format_seconds(row.step_seconds), f"{row.overhead - 1:+.1%}"]
        if measured and row.verified is not None:
            cells += [
                format_bytes(row.verified.measured_peak_bytes),
                format_seconds(row.verified.measured_step_seconds),
            ]
        fits = Text("yes", style="green") if row.fits else Text("no", style="red")
        table.add_row(row.strategy, fits, *cells, style="" if row.fits else "dim")
    return table
