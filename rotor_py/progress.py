"""A progress bar on the terminal for measuring, where that takes longer than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rotor_py.measurement import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PATIENCE_SECONDS = 1.5


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Something to be called with (done, total, name): a bar on stderr that appears after a moment and goes at the end.

    None, and no bar, where stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = _LateBar()
    try:
        yield bar
    finally:
        bar.stop()


class _LateBar:
    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: Bar | None = None

    def __call__(self, done: int, total: int, name: str) -> None:
        if self._bar is None and time.monotonic() - self._begin >= PATIENCE_SECONDS:
            self._bar = _bar()
            self._bar.add_task("", total=total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=name)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)
