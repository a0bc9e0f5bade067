"""Render the report for a terminal: whether the plan fits, memory, time, stages and sequence."""

from __future__ import annotations

import io
import re
from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from shutil import get_terminal_size

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rotor_py.report.numbers import HEADINGS, ReportFacts, stage_rows
from rotor_solver import Backward, Loss, Operation

# Matches the spaces at which a line may break: not those between a number and its unit, nor no-break spaces.
_SPACE = r"(?:(?<!\d) +|(?<=\d) +(?!(?:[kMGT]?B\b|[mµ]?s\b|%)))"


class Prose:
    """Text that rich prints with lines broken between words, but not between a number and its unit."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in re.finditer(rf"(?s)(.{{1,{options.max_width}}}|.+?)(?:{_SPACE}|$)", self.text.plain):
            yield self.text[line.start(1) : line.end(1)]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, re.split(_SPACE, self.text.plain))), len(self.text))


# Rich style of a stage's action, by its key of `WORDS`; "" is the key of a stage of which nothing is stored.
_STYLES = {
    "kept": "",
    "part": "cyan",
    "packed": "green",
    "rounded": "magenta",
    "elsewhere": "bright_blue",
    "input": "yellow",
    "": "yellow",
}


def plain_table(*headings: str, left: Container[str] = (), folded: Container[str] = ()) -> Table:
    """Make a table without lines. Columns named in `left` or `folded` are left-aligned; the latter wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        if heading in folded:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def stage_table(facts: ReportFacts, *, costs_alone: bool = False) -> Table:
    """Make a table of each stage's costs and of what the plan does with it; with `costs_alone`, of the costs only."""
    last = "" if costs_alone else "what happens"
    table = plain_table("stage", *HEADINGS, last, folded=("stage", last))
    for row in stage_rows(facts):
        action = Text() if costs_alone else Text(row.action, style=_STYLES[row.kind])
        table.add_row(Text(row.name), *(text for _, text in row.numbers), action)
    return table


_WIDEST = 100


def plain_text(facts: ReportFacts) -> str:
    """Return the report without colours, as wide as the terminal, at most 100 columns."""
    file, width = io.StringIO(), min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns)
    Console(file=file, width=width, highlight=False, color_system=None).print(Group(*parts(facts)))
    return file.getvalue().rstrip()


def parts(facts: ReportFacts) -> list[RenderableType]:
    begin, rest = facts.verdict()
    verdict = Prose(Text.assemble((begin, "bold green" if facts.fits else "bold red"), rest))
    sequences = [
        Text.assemble((f"{name}  ", "bold"), ", ".join(folded(each))) for name, each in facts.by_forwards().items()
    ]
    amounts = Table.grid(padding=(0, 2))
    for heading, pairs in facts.amounts().items():
        amounts.add_row(Text(heading, style="bold"), Prose(_pairs(pairs)))
    amounts.add_row(Text("fixed", style="bold"), Prose(facts.budget.fixed.in_words() or "nothing"))
    return [verdict, *map(Prose, facts.remarks()), "", amounts, "", stage_table(facts), "", *sequences]


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def folded(operations: Iterable[Operation]) -> Iterator[str]:
    """Yield operations as text: `Fe_3…5` for `Fe_3, Fe_4, Fe_5`; those with other options, as `Fe_3^1`, one by one."""

    def run_of(numbered: tuple[int, Operation]) -> object:
        number, operation = numbered
        if isinstance(operation, Loss) or getattr(operation, "option", 0) != 0:
            return number
        return type(operation), operation.stage + (number if isinstance(operation, Backward) else -number)

    for _, run in groupby(enumerate(operations), key=run_of):
        first, *others = (str(operation) for _, operation in run)
        if len(others) > 1:  # for two operations, the folded form is no shorter
            yield f"{first}…{others[-1].rpartition('_')[2]}"
        else:
            yield from (first, *others)
