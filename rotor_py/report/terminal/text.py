"""The report for a terminal: a verdict first, then memory, time, the stages and the sequence."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_py.report.facts import ReportFacts
from rotor_py.report.terminal.prose import Prose
from rotor_py.report.terminal.stage_table import StageTable
from rotor_py.report.wording import format_gap, spread_of_times
from rotor_py.units import format_bytes
from rotor_solver import Operation, Sequence

_WIDEST = 100


def plain_text(facts: ReportFacts, width: int | None = None) -> str:
    """The report as text without colours, as wide as the terminal, and not wider than 100."""
    file = io.StringIO()
    if width is None:
        width = min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns)
    Console(file=file, width=width, highlight=False, color_system=None).print(Group(*parts(facts)))
    return file.getvalue().rstrip()


def parts(facts: ReportFacts) -> list[RenderableType]:
    """The whole report, part by part."""
    sequences = [sequence(each, name) for name, each in facts.by_forwards().items()]
    remarks = map(Prose, facts.remarks())
    return [Prose(verdict(facts)), *remarks, "", amounts(facts), "", StageTable(facts), "", *sequences]


def verdict(facts: ReportFacts) -> Text:
    """One sentence: whether the plan fits, and at what price."""
    begin, rest = facts.verdict()
    return Text.assemble((begin, "bold green" if facts.fits else "bold red"), rest)


def amounts(facts: ReportFacts) -> Table:
    """The memory line and the time line."""
    table = Table.grid(padding=(0, 2))
    least = facts.budget.least_bytes()
    memory = (
        ("limit", "none" if facts.mem_limit is None else format_bytes(facts.mem_limit)),
        ("fixed", format_bytes(facts.budget.fixed.total)),
        ("least possible", format_bytes(least)),
        ("store-all", format_bytes(facts.store_all_bytes)),
        ("planned", format_bytes(facts.peak_bytes)),
        *facts.followed_step(),
    )
    overhead = ("overhead", f"{facts.overhead - 1:+.1%}")
    # Where seconds are assumptions, what can be relied on comes first.
    time = [overhead, *facts.times()] if facts.basis else [*facts.times()[::-1], overhead]
    gap = facts.gap
    if gap is not None:
        time.append(("from the optimum", format_gap(gap)))
    time += spread_of_times(facts.measurement.spread)
    table.add_row(Text("memory", style="bold"), Prose(_pairs(memory)))
    table.add_row(Text("time", style="bold"), Prose(_pairs(time)))
    table.add_row(Text("fixed", style="bold"), Prose(facts.budget.parts() or "nothing"))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def sequence(operations: Sequence, name: str = "sequence") -> Text:
    """The sequence in short notation; neighbours of one kind are folded to the first and the last."""
    text = Text(f"{name}  ", style="bold")
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
    """Whether `operation` is of the kind of `run`, and its stage is the next one up or down."""
    last = run[-1]
    if type(operation) is not type(last) or not hasattr(operation, "stage") or not hasattr(last, "stage"):
        return False
    # `Fe_3'` is a stage that is stored in part: in a fold, nobody would see which of the stages are.
    if getattr(operation, "option", 0) or getattr(last, "option", 0):
        return False
    step = operation.stage - last.stage
    return step in (1, -1) and (len(run) < 2 or step == last.stage - getattr(run[-2], "stage", 0))


def _fold(run: list[Operation]) -> str:
    if len(run) < 3:  # two operations are no longer than their fold
        return ", ".join(map(str, run))
    return f"{run[0]}…{str(run[-1]).rpartition('_')[2]}"
