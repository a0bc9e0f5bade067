"""The table of stages: a line for each, or, where the terminal is too narrow, a few lines for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from rotor_py.report.facts import ReportFacts
from rotor_py.report.stage_rows import HEADINGS, stage_rows
from rotor_py.units import format_bytes, format_seconds

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
"""By what is kept. The words beside them say the same."""
_PIECE = re.compile(r"[^.+_-]*[.+_-]+|[^.+_-]+")


class StageTable:
    """What every stage costs, and what happens to it; with `costs_alone`, where there is no plan, costs."""

    def __init__(self, facts: ReportFacts, *, costs_alone: bool = False) -> None:
        rows = list(stage_rows(facts))
        self.costs_alone = costs_alone
        self.names = [row.name for row in rows]
        self.actions = ["" if costs_alone else row.action for row in rows]
        self.styles = ["" if costs_alone else _STYLES[row.kind] for row in rows]
        self.numbers = [(*map(format_seconds, row.seconds), *map(format_bytes, row.bytes)) for row in rows]
        self.widths = [max(map(len, column)) for column in zip(HEADINGS, *self.numbers, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Numbers are never broken; what they leave is shared by the name and the action, which may be broken.
        room = options.max_width - sum(self.widths) - len(_GAP) * (len(HEADINGS) + 1)
        action = max((len(word) for text in ("happens", *self.actions) for word in text.split()), default=0)
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
        for text, numbers, happens in zip(self.names, self.numbers, self._happenings(), strict=True):
            table.add_row(Text("\n".join(broken(text, name))), *numbers, happens)
        return table

    def _blocks(self, width: int) -> Iterator[Text]:
        """The name of a stage and what happens to it, and its numbers in a line below."""
        yield Text("stage" if self.costs_alone else "stage, and what happens", style="bold")
        yield Text(self._columns(HEADINGS), style="bold", no_wrap=True)
        for name, numbers, happens in zip(self.names, self.numbers, self._happenings(), strict=True):
            *above, last = broken(name, width)
            yield from map(Text, above)
            if len(last) + len(_GAP) + len(happens) <= width:
                yield Text.assemble(last, _GAP if happens else "", happens)
            else:
                yield Text(last)
                yield happens
            yield Text(self._columns(numbers), no_wrap=True)

    def _happenings(self) -> Iterator[Text]:
        for action, style in zip(self.actions, self.styles, strict=True):
            yield Text(action, style=style)

    def _columns(self, cells: Iterable[str]) -> str:
        return _GAP + _GAP.join(f"{cell:>{width}}" for cell, width in zip(cells, self.widths, strict=True))


def broken(name: str, width: int) -> list[str]:
    """A name in lines of at most `width` characters; a line ends where a part of the name does, if the part fits."""
    lines, width = [""], max(1, width)
    for piece in _PIECE.findall(name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines
