"""An estimate of the time that is left, from the time that the finished part took."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


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
