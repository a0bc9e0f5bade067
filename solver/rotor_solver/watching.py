"""Report the progress of a long computation to a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int, str], None]
"""Called with the amount of work done, the total amount (0 if unknown), and a description of the work."""

_watching: ContextVar[Progress | None] = ContextVar("rotor_solver.watching", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Inside this context and thread, solvers call `progress(done, total, what)` from time to time.

    `done` and `total` count steps of filling a table, limits of a frontier, or parts of a pipeline, as `what` says.
    """
    token = _watching.set(progress)
    try:
        yield
    finally:
        _watching.reset(token)


def watcher() -> Progress | None:
    return _watching.get()
