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


def in_words(seconds: float) -> str:
    """Format a remaining time as in `about 12 s left`, with at most two digits, since it is a rough estimate."""
    for most, divisor, unit in ((99.5, 1, "s"), (99.5 * 60, 60, "min")):
        if seconds < most:
            return f"about {max(1, round(seconds / divisor))} {unit} left"
    return f"about {round(seconds / 3600)} h left"


PATIENCE_SECONDS = 1.0  # Shorter work shows no line, which would only flash. A guess: with more, programs seem to hang
_REDRAWN_SECONDS = 0.1  # least seconds between redraws: some work reports progress far more often
_COUNTED = 10_000  # least number of parts for which progress is in percent: a count of five digits is hard to read
_BAR = 16


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
        self._line = ("", "", 0, 0)
        self._first, self._since = 0, 0.0  # number of parts done, and the time, at the first report of the present work
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
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _tell(self, verb: str, done: int, total: int, name: str) -> None:
        with self._lock:
            if not self.shown:
                return
            now, other = self._clock(), (verb, total) != (self._line[0], self._line[3])
            if other or done < self._line[2]:
                self._first, self._since = done, now
            self._line = (verb, name, done, total)
            if self._timer is None:
                self._begin = now
                # A timer draws the line, since the first part of the work may take long before the next report.
                self._timer = Timer(PATIENCE_SECONDS, self._draw)
                self._timer.daemon = True
                self._timer.start()
            if now - self._begin >= PATIENCE_SECONDS and (other or now - self._drawn >= _REDRAWN_SECONDS):
                self._drawn = now
                pace = (now - self._since) / (done - self._first) if done > self._first else None
                self._draw("" if pace is None else in_words(pace * (total - done)))

    def _draw(self, left: str = "") -> None:
        with self._lock:
            if not self.shown:
                return
            bar = self._bar = self._bar or _bar()
            verb, name, done, total = self._line
            end = ", ".join(part for part in (_count(done, total), left) if part)
            text, room = f"{verb} {name}", bar.console.width - _BAR - len(end) - 4
            if len(text) > room:
                text = text[: max(0, room - 1)] + "…"
            bar.update(bar.task_ids[0], description=text, completed=done, total=total or None, end=end)
            bar.start()
            bar.refresh()


def _count(done: int, total: int) -> str:
    if total <= 1:
        return ""
    return f"{min(done + 1, total)} of {total}" if total < _COUNTED else f"{100 * done // total} %"


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR),
        TextColumn("{task.fields[end]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # a drawing thread would disturb measured times
        redirect_stdout=sys.stdout.isatty(),  # what goes into a pipe cannot disturb the line
    )
    bar.add_task("", end="")
    return bar
