"""What surrounds planning: one thread of a process plans at a time, the others wait for their turn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, RLock

planning = RLock()
"""Held while a model is measured, captured or solved for.

PyTorch's profiler cannot run twice in a process; two models that run at once would slow each other down, and be
measured so; and some of Numba's threading layers must not be used by two callers. Reentrant, because what measures
holds it and then solves, which takes it as well.
"""

_aside = Event()
"""Whether objects are aside that `freeze_gc` has put there."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """As long as this lasts, Python's garbage collector does not walk through what is there already.

    To capture a graph makes objects by the hundred thousand, which have the collector look at all that there are: those
    of torch and of libraries around it take it as long as ten steps of a small model. What was garbage already is found
    afterwards.
    """
    if gc.get_freeze_count():  # what somebody else has put aside would be taken back
        yield
        return
    _put_aside()
    _aside.set()
    try:
        yield
    finally:
        _aside.clear()
        gc.unfreeze()


def freeze_new_objects() -> None:
    """Where old objects are aside, those that were made since go with them: a captured graph stays to the end."""
    if _aside.is_set():
        _put_aside()


def _put_aside() -> None:
    gc.collect(1)  # what is young, and may hold tensors
    gc.freeze()
