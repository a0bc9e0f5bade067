"""Planning happens in turns: of all threads of a process, one at a time measures and solves."""

from __future__ import annotations

from threading import RLock

planning = RLock()
"""Held while a model is measured, captured or solved for.

PyTorch's profiler can run once in a process, times would be those of two models at once, and the threads of some of
Numba's layers must not be used by two callers.
"""
