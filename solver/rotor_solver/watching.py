"""Report the progress of a long computation to a callback, which a context variable holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int, int, str], None]
"""Called with (amount of work done, total amount or 0 if unknown, description of the work)."""

_watching: ContextVar[Progress | None] = ContextVar("rotor_solver.watching", default=None)


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside this context and thread, `variable` has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def watched(progress: Progress) -> AbstractContextManager[None]:
    """Inside this context and thread, solvers call `progress(done, total, what)` from time to time.

    `done` and `total` are numbers of pairs of slots in a table, limits of a frontier, or parts of a pipeline; `what`
    tells which. `total` is 0 if unknown.
    """
    return holding(_watching, progress)


def watcher() -> Progress | None:
    return _watching.get()
