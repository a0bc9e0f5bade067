"""The report for a terminal: a verdict first, then memory, time, the stages and the sequence."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_py.report.prose import Prose
from rotor_py.report.report import Report
from rotor_py.report.stage_table import StageTable
from rotor_py.units import format_bytes
from rotor_py.units import format_seconds as format_seconds
from rotor_solver import Operation, Sequence

_WIDEST = 100


def plain_text(report: Report, width: int | None = None) -> str:
    """The report as text without colours, as wide as the terminal, and not wider than 100."""
    file = io.StringIO()
    if width is None:
        width = min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns)
    Console(file=file, width=width, highlight=False, color_system=None).print(Group(*parts(report)))
    return file.getvalue().rstrip()


def parts(report: Report) -> list[RenderableType]:
    """The whole report, part by part."""
    reason = report.peak_reason()
    why = [] if reason is None else [Prose(reason)]
    return [Prose(verdict(report)), *why, "", amounts(report), "", StageTable(report), "", sequence(report.sequence)]


def verdict(report: Report) -> Text:
    """One sentence: does it fit, and at what price."""
    begin, rest = report.verdict()
    return Text.assemble((begin, "bold green" if report.fits else "bold red"), rest)


def amounts(report: Report) -> Table:
    """The memory line and the time line."""
    table = Table.grid(padding=(0, 2))
    least = report.budget.least_bytes()
    memory = (
        ("limit", "none" if report.mem_limit is None else format_bytes(report.mem_limit)),
        ("fixed", format_bytes(report.budget.fixed.total)),
        ("least possible", format_bytes(least)),
        ("store-all", format_bytes(report.store_all_bytes)),
        ("planned", format_bytes(report.peak_bytes)),
    )
    time: tuple[tuple[str, str], ...] = (
        ("store-all", format_seconds(report.store_all_seconds)),
        ("planned", format_seconds(report.step_seconds)),
        ("overhead", f"{report.overhead - 1:+.1%}"),
    )
    gap = report.gap
    if gap is not None:
        time += (("from the optimum", "0 %" if gap < 5e-5 else f"at most {gap:.2%}"),)
    table.add_row(Text("memory", style="bold"), Prose(_pairs(memory)))
    table.add_row(Text("time", style="bold"), Prose(_pairs(time)))
    table.add_row(Text("fixed", style="bold"), Prose(report.budget.parts() or "nothing"))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def sequence(operations: Sequence) -> Text:
    """The sequence in short notation; runs of one kind are folded to their ends."""
    text = Text("sequence  ", style="bold")
    text.append(", ".join(folded(operations)), style="not bold")
    return text


def folded(operations: Iterable[Operation]) -> Iterator[str]:
    """`Fe_3, Fe_4, Fe_5` becomes `Fe_3…5`; nothing else changes."""
    run: list[Operation] = []
    for operation in operations:
        if run and not _continues(run, operation):
            yield _fold(run)
            run = []
        run.append(operation)
    if run:
        yield _fold(run)


def _continues(run: list[Operation], operation: Operation) -> bool:
    last = run[-1]
    if type(operation) is not type(last) or not hasattr(operation, "stage") or not hasattr(last, "stage"):
        return False
    if getattr(operation, "option", 0) or getattr(last, "option", 0):
        return False
    step = operation.stage - last.stage
    return step in (1, -1) and (len(run) < 2 or step == last.stage - getattr(run[-2], "stage", 0))


def _fold(run: list[Operation]) -> str:
    if len(run) < 3:
        return ", ".join(map(str, run))
    return f"{run[0]}…{str(run[-1]).rpartition('_')[2]}"
