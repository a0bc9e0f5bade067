"""Report the progress of a long computation to a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int, str], None]
"""Called with the amount done, the total amount, and a description of the work."""

_watching: ContextVar[Progress | None] = ContextVar("rotor_solver.watching", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Call `progress(done, total, what)` now and then during solves in this block and thread.

    `done` and `total` count estimated pairs of slots while a table is filled, and limits for a frontier.
    """
    token = _watching.set(progress)
    try:
        yield
    finally:
        _watching.reset(token)


def watcher() -> Progress | None:
    return _watching.get()
