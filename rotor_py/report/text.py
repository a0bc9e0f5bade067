"""The report for a terminal: a verdict first, then memory, time, the stages and the sequence."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotor_py.report.report import Report
from rotor_py.units import format_bytes
from rotor_solver import Operation, Sequence


def plain_text(report: Report, width: int = 100) -> str:
    """The report as text without colours."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None).print(Group(*parts(report)))
    return file.getvalue().rstrip()


def parts(report: Report) -> list[RenderableType]:
    """The whole report, part by part."""
    reason = report.peak_reason()
    why = [] if reason is None else [Text(reason)]
    return [verdict(report), *why, "", amounts(report), "", stages(report), "", sequence(report.sequence)]


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
    table.add_row(Text("memory", style="bold"), _pairs(memory))
    table.add_row(Text("time", style="bold"), _pairs(time))
    table.add_row(Text("fixed", style="bold"), Text(report.budget.parts() or "nothing"))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def stages(report: Report) -> Table:
    """What every stage costs, and what happens to it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("stage", overflow="fold")
    for heading in ("forward", "backward", "output", "kept", "scratch"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what happens", overflow="fold")
    rows = zip(report.measurement.names, report.measurement.stages, report.actions(), strict=True)
    for name, cost, action in rows:
        table.add_row(
            Text(name),
            format_seconds(cost.forward_seconds),
            format_seconds(cost.backward_seconds),
            format_bytes(cost.activation_bytes),
            format_bytes(cost.saved_bytes),
            format_bytes(max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes)),
            Text(action, style="" if action == "stored" else "yellow"),
        )
    return table


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


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        scaled = seconds * factor
        if scaled >= 0.9995 or unit == "µs":
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    raise AssertionError
