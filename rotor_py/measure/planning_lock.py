"""Let only one thread of a process plan at a time, and keep the garbage collector from slowing it down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

planning = RLock()
"""Lock held while a thread captures or measures a model, or solves for a plan.

A process can run only one PyTorch profiler, two measurements at once would distort each other's times, and some of
Numba's threading layers allow one caller only. Reentrant, since code that holds it calls the solver, which takes it.
"""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude objects that exist now from Python's garbage collection inside this context.

    Capturing a graph makes hundreds of thousands of objects, so the collector would scan all of torch's objects again
    and again, which takes as long as ten steps of a small model.
    """
    if gc.get_freeze_count():  # do nothing: on exit, `unfreeze` would unfreeze objects that the caller has frozen
        yield
        return
    gc.collect(1)  # free recent garbage, which may hold tensors
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
