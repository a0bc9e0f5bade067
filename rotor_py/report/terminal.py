"""Render the report for a terminal: verdict, memory, time, stages and sequence."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rotor_py.report.numbers import HEADINGS, ReportFacts, stage_rows
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import Operation

# Keep a number and its unit on one line. No-break spaces do not suffice: rich breaks at them.


_SPACE = re.compile(r"(?<!\d) +|(?<=\d) +(?!(?:[kMGT]?B\b|[mµ]?s\b|%))")


class Prose:
    """A text wrapped between words, but not inside an amount or at a no-break space."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.divide(self._ends(options.max_width)):
            line.rstrip()
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, _SPACE.split(self.text.plain))), len(self.text))

    def _ends(self, width: int) -> Iterator[int]:
        plain = self.text.plain
        begin = last = 0
        for found in (*_SPACE.finditer(plain), None):
            end = len(plain) if found is None else found.start()
            if end - begin > width and last > begin:
                yield last
                begin = last
            if found is not None:
                last = found.end()


_GAP = "  "
_STYLES = {
    "kept": "",
    "part": "cyan",
    "packed": "green",
    "rounded": "magenta",
    "elsewhere": "bright_blue",
    "input": "yellow",
    "": "yellow",
}
"""Styles by kind of storage; adjacent words say the same."""
_PIECE = re.compile(r"[^.+_-]*[.+_-]+|[^.+_-]+")


class StageTable:
    """Cost and action of each stage; with `costs_alone`, without a plan, costs only."""

    def __init__(self, facts: ReportFacts, *, costs_alone: bool = False) -> None:
        rows = list(stage_rows(facts))
        self.costs_alone = costs_alone
        self.names = [row.name for row in rows]
        self.actions = [Text() if costs_alone else Text(row.action, style=_STYLES[row.kind]) for row in rows]
        self.numbers = [(*map(format_seconds, row.seconds), *map(format_bytes, row.bytes)) for row in rows]
        self.widths = [max(map(len, column)) for column in zip(HEADINGS, *self.numbers, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Numbers never break; the name and the action share the remaining width and may break.
        room = options.max_width - sum(self.widths) - len(_GAP) * (len(HEADINGS) + 1)
        action = max(len(word) for text in ("happens", *map(str, self.actions)) for word in text.split())
        piece = max(len(part) for name in ("stage", *self.names) for part in _PIECE.findall(name))
        if piece + action <= room:
            name = min(max(map(len, ("stage", *self.names))), room - action)
            yield self._lines(name, room - name)
        else:
            yield from self._blocks(options.max_width)

    def _lines(self, name: int, action: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
        table.add_column("stage", max_width=name)
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("" if self.costs_alone else "what happens", max_width=action)
        for text, numbers, happens in zip(self.names, self.numbers, self.actions, strict=True):
            table.add_row(Text("\n".join(broken(text, name))), *numbers, happens)
        return table

    def _blocks(self, width: int) -> Iterator[Text]:
        yield Text("stage" if self.costs_alone else "stage, and what happens", style="bold")
        yield Text(self._columns(HEADINGS), style="bold", no_wrap=True)
        for name, numbers, happens in zip(self.names, self.numbers, self.actions, strict=True):
            *above, last = broken(name, width)
            yield from map(Text, above)
            if len(last) + len(_GAP) + len(happens) <= width:
                yield Text.assemble(last, _GAP if happens else "", happens)
            else:
                yield Text(last)
                yield happens
            yield Text(self._columns(numbers), no_wrap=True)

    def _columns(self, cells: Iterable[str]) -> str:
        return _GAP + _GAP.join(f"{cell:>{width}}" for cell, width in zip(cells, self.widths, strict=True))


def broken(name: str, width: int) -> list[str]:
    """Break a name into lines of at most `width` characters, between its parts if they fit."""
    lines, width = [""], max(1, width)
    for piece in _PIECE.findall(name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


_WIDEST = 100


def plain_text(facts: ReportFacts, width: int | None = None) -> str:
    """The report without colours, as wide as the terminal, at most 100."""
    file = io.StringIO()
    if width is None:
        width = min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns)
    Console(file=file, width=width, highlight=False, color_system=None).print(Group(*parts(facts)))
    return file.getvalue().rstrip()


def parts(facts: ReportFacts) -> list[RenderableType]:
    begin, rest = facts.verdict()
    verdict = Prose(Text.assemble((begin, "bold green" if facts.fits else "bold red"), rest))
    sequences = [
        Text.assemble((f"{name}  ", "bold"), ", ".join(folded(each))) for name, each in facts.by_forwards().items()
    ]
    return [verdict, *map(Prose, facts.remarks()), "", _amounts(facts), "", StageTable(facts), "", *sequences]


def _amounts(facts: ReportFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    memory = (
        ("limit", "none" if facts.mem_limit is None else format_bytes(facts.mem_limit)),
        ("fixed", format_bytes(facts.budget.fixed.total)),
        ("least possible", format_bytes(facts.budget.least_bytes())),
        ("store-all", format_bytes(facts.store_all_bytes)),
        ("planned", format_bytes(facts.peak_bytes)),
        *facts.followed_step(),
    )
    overhead = ("overhead", f"{facts.overhead - 1:+.1%}")
    # If seconds are assumptions, the reliable numbers come first.
    time = [overhead, *facts.times()] if facts.basis else [*facts.times()[::-1], overhead]
    time += facts.quality()
    table.add_row(Text("memory", style="bold"), Prose(_pairs(memory)))
    table.add_row(Text("time", style="bold"), Prose(_pairs(time)))
    table.add_row(Text("fixed", style="bold"), Prose(facts.budget.fixed.in_words() or "nothing"))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("   " if index else "")
        text.append(name.replace(" ", "\N{NO-BREAK SPACE}") + "\N{NO-BREAK SPACE}", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def folded(operations: Iterable[Operation]) -> Iterator[str]:
    """Fold `Fe_3, Fe_4, Fe_5` to `Fe_3…5`."""
    run: list[Operation] = []
    for operation in (*operations, None):
        if run and (operation is None or not _continues(run, operation)):
            # Folding two saves nothing.
            folds = len(run) > 2
            yield f"{run[0]}…{str(run[-1]).rpartition('_')[2]}" if folds else ", ".join(map(str, run))
            run = []
        if operation is not None:
            run.append(operation)


def _continues(run: list[Operation], operation: Operation) -> bool:
    last = run[-1]
    if type(operation) is not type(last) or not hasattr(operation, "stage") or not hasattr(last, "stage"):
        return False
    # `Fe_3'` stores its stage in part; a fold would hide that.
    if getattr(operation, "option", 0) or getattr(last, "option", 0):
        return False
    step = operation.stage - last.stage
    return step in (1, -1) and (len(run) < 2 or step == last.stage - getattr(run[-2], "stage", 0))
