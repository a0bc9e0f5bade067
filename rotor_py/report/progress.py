"""Show the progress of long work in one terminal line, with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock, Timer
from typing import TYPE_CHECKING

from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


PATIENCE_SECONDS = 1.0  # Shorter work shows no line, which would only flash. A guess: with more, programs seem to hang
_REDRAWN_SECONDS = 0.1  # least seconds between redraws: some work reports progress far more often
_BAR = 12


@contextmanager
def activities(*, quiet: bool = False) -> Iterator[Activities]:
    """Show a progress line on stderr if work in the block takes long, unless `quiet` or piped; clear it at the end."""
    found = Activities(shown=not quiet and sys.stderr.isatty())
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Show the progress of measuring: yields a callback like that of `Activities.doing`; None if stderr is piped."""
    with activities() as found:
        yield found.doing("measuring") if found.shown else None


class Activities:
    """The progress line, which shows one kind of work at a time."""

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self._clock = clock
        self._begin = self._drawn = 0.0
        self._work = ("", 0)  # verb and number of parts of the present work
        self._bar: Bar | None = None
        self._timer: Timer | None = None
        self._lock = RLock()  # the timer draws in its own thread

    def doing(self, verb: str) -> Progress:
        """Return a callback (parts done, all parts, name of the next) that shows verb and name: `measuring conv1`."""
        return partial(self._tell, verb) if self.shown else lambda done, total, name: None

    def stop(self) -> None:
        with self._lock:
            self.shown = False
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None and self._bar.live.is_started:
                self._bar.stop()

    def _tell(self, verb: str, done: int, total: int, name: str) -> None:
        with self._lock:
            if not self.shown:
                return
            now, bar = self._clock(), self._bar
            if bar is None:
                bar, self._begin = _bar(self._clock), now
                # A timer draws the line, since the first part of the work may take long before the next report.
                self._bar, self._timer = bar, Timer(PATIENCE_SECONDS, self._draw)
                self._timer.daemon = True
                self._timer.start()
            other = self._work != (verb, total) or done < bar.tasks[0].completed
            if other:  # with a new estimate of the time left
                self._work = (verb, total)
                for task in bar.task_ids:
                    bar.remove_task(task)
                bar.add_task("", total=total or None, completed=done)
            bar.update(bar.task_ids[0], description=f"{verb} {name}", completed=done)
            if now - self._begin >= PATIENCE_SECONDS and (other or now - self._drawn >= _REDRAWN_SECONDS):
                self._drawn = now
                self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self.shown and self._bar is not None:
                self._bar.start()
                self._bar.refresh()


def _bar(clock: Callable[[], float]) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    return Bar(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        BarColumn(bar_width=_BAR),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        expand=True,
        get_time=clock,
        auto_refresh=False,  # a drawing thread would disturb measured times
        redirect_stdout=sys.stdout.isatty(),  # what goes into a pipe cannot disturb the line
    )
