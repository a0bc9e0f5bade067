"""Show long work in one line of the terminal, with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock, Timer
from typing import TYPE_CHECKING

from rotor_solver.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class TimeLeft:
    """The seconds that work still takes, at its pace so far.

    Work of another name or total, or with fewer parts done than before, is other work: the estimate begins anew.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what: Hashable = None
        self._first = self._done = 0
        self._begin = 0.0

    def update(self, name: str, done: int, total: int) -> float | None:
        """Seconds left when `done` of `total` parts are done; None until a part has been finished."""
        now = self._clock()
        if self._what != (name, total) or done < self._done:
            self._what, self._first, self._begin = (name, total), done, now
        self._done = done
        if done <= self._first:
            return None
        # From what was done when the work was first told of: it may not have been nothing.
        return (now - self._begin) * (total - done) / (done - self._first)


def in_words(seconds: float | None) -> str:
    """`about 12 s left`; an empty text where nothing is known."""
    if seconds is None:
        return ""
    # Two digits at most: an estimate that shows more would seem to be exact.
    for most, divisor, unit in ((99.5, 1, "s"), (99.5 * 60, 60, "min")):
        if seconds < most:
            return f"about {max(1, round(seconds / divisor))} {unit} left"
    return f"about {round(seconds / 3600)} h left"


PATIENCE_SECONDS = 1.0
"""Work that takes less shows nothing: a line that is gone at once only disturbs. The second is a guess."""
_REDRAWN_SECONDS = 0.1
"""The least time between two drawings: some work tells of its progress far more often."""
_COUNTED = 10_000
"""Work of more parts is shown in percent. The number is a guess: five digits are hard to read while they change."""
_BAR = 16


@contextmanager
def activities(*, quiet: bool = False) -> Iterator[Activities]:
    """A line on stderr that appears once the work in the block has taken a moment, and is gone at the end.

    Nothing is shown where stderr is not a terminal, or with `quiet`.
    """
    found = Activities(shown=not quiet and sys.stderr.isatty())
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """`activities` for measuring alone: something to be called with (done, total, name); None if nothing is shown."""
    with activities() as found:
        yield found.doing("measuring") if found.shown else None


class Activities:
    """The line, which shows one kind of work at a time."""

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown = shown
        self._clock = clock
        self._left = TimeLeft(clock)
        self._begin = self._drawn = 0.0
        self._line = ("", "", 0, 0)
        self._bar: Bar | None = None
        self._timer: Timer | None = None
        self._lock = RLock()  # the timer draws in a thread of its own

    def doing(self, verb: str) -> Progress:
        """A function of the parts done, all parts and the name of the next; the line then says `measuring layer.3`."""
        return partial(self._tell, verb) if self.shown else _silent

    def stop(self) -> None:
        """Take the line away."""
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
                # Nobody calls while the first part of the work runs, and it may be long: only a timer can draw then.
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


def _silent(done: int, total: int, name: str) -> None:
    """Stands in where nothing is to be shown."""


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
        auto_refresh=False,  # a thread that draws would run while times are measured
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe goes there
    )
