"""One thread of a process plans at a time; the others wait for their turn."""

from __future__ import annotations

from threading import RLock

planning = RLock()
"""Held while a model is measured, captured or solved for.

PyTorch's profiler cannot run twice in a process; two models that run at once would slow each other down, and be
measured so; and some of Numba's threading layers must not be used by two callers. Reentrant, because what measures
holds it and then solves, which takes it as well.
"""
