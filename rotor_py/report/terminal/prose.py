"""Sentences in which no line ends between a number and its unit.

No-break spaces alone do not do it: rich ends a line at them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_SPACE = re.compile(r"(?<!\d) +|(?<=\d) +(?!(?:[kMGT]?B\b|[mµ]?s\b|%))")


class Prose:
    """A text that is wrapped between words, but not inside an amount or at a no-break space."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.divide(self._ends(options.max_width)):
            line.rstrip()
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, _SPACE.split(self.text.plain))), len(self.text))

    def _ends(self, width: int) -> Iterator[int]:
        """Where every line but the first begins."""
        plain = self.text.plain
        begin = last = 0
        for found in (*_SPACE.finditer(plain), None):
            end = len(plain) if found is None else found.start()
            if end - begin > width and last > begin:
                yield last
                begin = last
            if found is not None:
                last = found.end()
