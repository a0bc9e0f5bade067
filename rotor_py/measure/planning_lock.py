"""What surrounds planning: one thread of a process plans at a time, and what is the caller's stays out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, RLock
from typing import Any

from torch._C import _autograd

planning = RLock()
"""Held while a model is measured, captured or solved for.

PyTorch's profiler cannot run twice in a process; two models that run at once would slow each other down, and be
measured so; and some of Numba's threading layers must not be used by two callers. Reentrant, because what measures
holds it and then solves, which takes it as well.
"""

_aside = Event()
"""Whether objects are aside that `old_objects_aside` has put there."""


@contextmanager
def old_objects_aside() -> Iterator[None]:
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


def new_objects_aside() -> None:
    """Where old objects are aside, those that were made since go with them: a captured graph stays to the end."""
    if _aside.is_set():
        _put_aside()


def _put_aside() -> None:
    gc.collect(1)  # what is young, and may hold tensors
    gc.freeze()


@contextmanager
def callers_hooks_aside() -> Iterator[None]:
    """As long as this lasts, hooks that the caller has on saved tensors see nothing.

    Those of `torch.utils.checkpoint` run the model again for the backward of a stage that is measured, which then is
    measured inside of measuring, without end. Before torch 2.8 nobody can tell which hooks there are, and they stay.
    """
    innermost = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    hooks: list[Any] = []
    while (found := innermost(True)) is not None:  # those too that are off while something is traced
        _autograd._pop_saved_tensors_default_hooks()
        hooks.append(found)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
