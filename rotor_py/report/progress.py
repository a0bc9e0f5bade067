"""Show long work in one terminal line, with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock, Timer
from typing import TYPE_CHECKING

from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class TimeLeft:
    """Estimate the seconds left from the pace so far.

    Restarts when the name or total changes, or when fewer parts are done than before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what: Hashable = None
        self._first = self._done = 0
        self._begin = 0.0

    def update(self, name: str, done: int, total: int) -> float | None:
        """Return the seconds left when `done` of `total` parts are done; None until one part is finished."""
        now = self._clock()
        if self._what != (name, total) or done < self._done:
            self._what, self._first, self._begin = (name, total), done, now
        self._done = done
        if done <= self._first:
            return None
        # Count from the first report, which need not have been zero.
        return (now - self._begin) * (total - done) / (done - self._first)


def in_words(seconds: float | None) -> str:
    """`about 12 s left`; an empty text if unknown."""
    if seconds is None:
        return ""
    # Two digits at most: more would look exact.
    for most, divisor, unit in ((99.5, 1, "s"), (99.5 * 60, 60, "min")):
        if seconds < most:
            return f"about {max(1, round(seconds / divisor))} {unit} left"
    return f"about {round(seconds / 3600)} h left"


PATIENCE_SECONDS = 1.0
"""Shorter work shows nothing: a line that flashes disturbs. A guess; too long looks like a hang."""
_REDRAWN_SECONDS = 0.1
"""Least time between redraws: some work reports progress far more often."""
_COUNTED = 10_000
"""Work of more parts is shown in percent: five changing digits are hard to read."""
_BAR = 16


@contextmanager
def activities(*, quiet: bool = False) -> Iterator[Activities]:
    """Show a line on stderr after a moment of work in the block, and clear it at the end.

    Shows nothing if stderr is not a terminal, or with `quiet`.
    """
    found = Activities(shown=not quiet and sys.stderr.isatty())
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """`activities` for measuring only: yields a callable (done, total, name), or None if nothing is shown."""
    with activities() as found:
        yield found.doing("measuring") if found.shown else None


class Activities:
    """The progress line, which shows one kind of work at a time."""

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self._clock = clock
        self._left = TimeLeft(clock)
        self._begin = self._drawn = 0.0
        self._line = ("", "", 0, 0)
        self._bar: Bar | None = None
        self._timer: Timer | None = None
        self._lock = RLock()  # the timer draws in its own thread

    def doing(self, verb: str) -> Progress:
        """Return a callable (done, total, name of the next part); the line then says `measuring layer.3`."""
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
            left, now = in_words(self._left.update(verb, done, total)), self._clock()
            other = (verb, total) != (self._line[0], self._line[3])
            self._line = (verb, name, done, total)
            if self._timer is None:
                self._begin = now
                # The first part of the work may be long and reports nothing: only a timer can draw then.
                self._timer = Timer(PATIENCE_SECONDS, self._draw)
                self._timer.daemon = True
                self._timer.start()
            if now - self._begin >= PATIENCE_SECONDS and (other or now - self._drawn >= _REDRAWN_SECONDS):
                self._drawn = now
                self._draw(left)

    def _draw(self, left: str = "") -> None:
        with self._lock:
            if not self.shown:
                return
            begin = self._bar is None
            bar = self._bar = self._bar or _bar()
            verb, name, done, total = self._line
            end = ", ".join(part for part in (_count(done, total), left) if part)
            text, room = f"{verb} {name}", bar.console.width - _BAR - len(end) - 4
            if len(text) > room:
                text = text[: max(0, room - 1)] + "…"
            if begin:
                bar.add_task(text, completed=done, total=total or None, end=end)
                bar.start()
            else:
                bar.update(bar.task_ids[0], description=text, completed=done, total=total or None, end=end)
                bar.refresh()


def _count(done: int, total: int) -> str:
    if total <= 1:
        return ""
    return f"{min(done + 1, total)} of {total}" if total < _COUNTED else f"{100 * done // total} %"


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR),
        TextColumn("{task.fields[end]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # a drawing thread would disturb measured times
        redirect_stdout=sys.stdout.isatty(),  # keep redirected stdout where it goes
    )
