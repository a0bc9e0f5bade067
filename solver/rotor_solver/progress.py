"""Progress of a long computation, for those who watch it: how much is done, of how much, and of what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int, str], None]
"""Called with what is done, all that there is, and what is worked on now."""

_watching: ContextVar[Progress | None] = ContextVar("watching", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Call `progress(done, total, what)` now and then while something is solved in this block and thread.

    A table counts pairs of slots, as far as they are known beforehand; a frontier counts limits.
    """
    token = _watching.set(progress)
    try:
        yield
    finally:
        _watching.reset(token)


def watcher() -> Progress | None:
    """The function that `watched` was given; None outside of it."""
    return _watching.get()
