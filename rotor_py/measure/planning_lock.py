"""Serialize planning: one thread of a process plans at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

planning = RLock()
"""Held while a model is captured or measured, or a plan is solved for.

A process can run only one PyTorch profiler, two measurements at once would distort each other's times, and some of
Numba's threading layers allow one caller only. Reentrant: measuring holds it and calls the solver, which takes it.
"""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude existing objects from Python's garbage collector inside this context.

    Capturing a graph makes hundreds of thousands of objects, so the collector would repeatedly scan torch's objects,
    for as long as ten steps of a small model. Garbage that exists now is collected after the context.
    """
    if gc.get_freeze_count():  # do nothing, since `unfreeze` would also unfreeze the caller's frozen objects
        yield
        return
    gc.collect(1)  # frees young garbage, which may hold tensors
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
