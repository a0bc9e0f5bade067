"""Let only one thread of a process plan at a time, and keep the garbage collector from slowing the planning."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

planning = RLock()
"""Lock of the thread that captures or measures a model, or solves for a plan.

A process can run one PyTorch profiler only, simultaneous measurements would slow each other, and some of Numba's
threading layers allow one caller only. Reentrant, since code that has acquired it calls code that acquires it again.
"""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Inside this context, exclude objects that exist on entry from Python's garbage collection.

    Capturing a graph makes hundreds of thousands of objects, so that the collector scans all of torch's objects many
    times, which takes as long as ten steps of a small model.
    """
    if gc.get_freeze_count():  # do nothing, since `unfreeze` would also unfreeze what the caller has frozen
        yield
        return
    _freezes.append(None)
    try:
        freeze_again()
        yield
    finally:
        _freezes.clear()
        gc.unfreeze()


_freezes: list[None] = []  # has an entry inside `freeze_gc`, unless the caller has frozen objects


def freeze_again() -> None:
    """Inside `freeze_gc`, exclude objects that exist now, such as those of a capture: a scan would spoil a timing."""
    if _freezes:
        gc.collect(1)  # free recent garbage, which may hold tensors
        gc.freeze()
