"""Name the stage and the pass (forward, recomputation, backward) in errors, and recognize out-of-memory errors."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from rotor_py.errors import record_fields
from rotor_py.stage.saved_tensors import hook_gradients

# The CPU's allocator raises a RuntimeError; only its message shows that memory ran out.
_CPU = "DefaultCPUAllocator: can't allocate memory"
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _CPU in str(error))


def asked_bytes(error: BaseException) -> int:
    """Return the bytes of the failed allocation; 0 if the message lacks them. Those in CUDA's messages are rounded."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0


BACKWARD = "backward"

_log = logging.getLogger("rotor_py")

# Called with the pass ("forward", "recomputation" or "backward"), the stage's name, and True when the pass begins, or
# False when it ends. For the backward of a stage in the caller's graph, a tensor hook reports only the begin.
Watcher = Callable[[str, str, bool], None]

watchers: list[Watcher] = []


# All threads share the list of watchers, since autograd runs CUDA backwards in other threads.
@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


class During:
    """Context for one pass of a stage: calls the `watchers` at its begin and end, and adds a note to an exception."""

    # A class: every run of every stage enters this context, and a `contextmanager` generator would take longer.
    __slots__ = ("doing", "name")

    def __init__(self, doing: str, name: str) -> None:
        self.doing = doing
        self.name = name

    def __enter__(self) -> None:
        if watchers:
            _tell(self.doing, self.name, True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if watchers:
            _tell(self.doing, self.name, False)
        if error is not None:
            add_note(error, f"in the {self.doing} of stage {self.name!r}")


def tell_of_backward(output: Any, name: str) -> None:
    # Register hooks only for watchers, which are rare: hooks take time in every step.
    if watchers and torch.is_grad_enabled():
        hook_gradients(output, lambda _: _tell(BACKWARD, name, True))


def _tell(doing: str, name: str, begins: bool) -> None:
    for watcher in watchers:
        watcher(doing, name, begins)


def stage_of(error: BaseException) -> str | None:
    """Return the name of the first stage that a note of `During` names; None if there is none."""
    names = (str(note).partition(" of stage ")[2].strip("'") for note in getattr(error, "__notes__", ()))
    return next(filter(None, names), None)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception unless it has it. Log it, too, before Python 3.11, whose tracebacks show no notes."""
    if text in getattr(error, "__notes__", ()):
        return
    with contextlib.suppress(Exception):  # an exception that takes no note still reaches the user
        error.__notes__ = [*getattr(error, "__notes__", ()), text]
        if hasattr(error, "add_note"):
            return
    _log.error("%s: %s", type(error).__name__, text, extra=record_fields("note"))
