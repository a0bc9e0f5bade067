"""Serialize planning: one thread of a process plans at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

planning = RLock()
"""Held while a model is measured, captured or solved for.

PyTorch's profiler cannot run twice in a process; two models at once would distort each other's times; and some of
Numba's threading layers allow one caller only. Reentrant, because measuring holds it and then solves, which takes it
too.
"""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude existing objects from Python's garbage collector inside this context.

    Capturing a graph makes objects by the hundred thousand, so the collector would scan those of torch repeatedly, as
    long as ten steps of a small model. Existing garbage is collected afterwards.
    """
    if gc.get_freeze_count():  # the caller's own frozen objects would be unfrozen
        yield
        return
    gc.collect(1)  # young garbage, which may hold tensors
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
