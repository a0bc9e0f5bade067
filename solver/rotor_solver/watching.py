"""Report the progress of a long computation to a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int, str], None]
"""Called with (amount of work done, total amount or 0 if unknown, description of the work)."""

_watching: ContextVar[Progress | None] = ContextVar("rotor_solver.watching", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Inside this context and thread, solvers call `progress(done, total, what)` from time to time.

    `done` and `total` are numbers of pairs of slots in a table, limits of a frontier, or parts of a pipeline; `what`
    tells which. `total` is 0 if unknown.
    """
    token = _watching.set(progress)
    try:
        yield
    finally:
        _watching.reset(token)


def watcher() -> Progress | None:
    return _watching.get()
