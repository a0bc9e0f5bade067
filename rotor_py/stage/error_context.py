"""Say in an error which stage was doing what, and recognize an out-of-memory error."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from rotor_profiling.storage import tensors_in
from rotor_py.errors import record_fields

_CPU = "DefaultCPUAllocator: can't allocate memory"
"""The CPU's allocator has no error of its own: it raises a RuntimeError, whose text alone tells what it is."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of PyTorch raised `error`, because it had no memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _CPU in str(error))


def asked_bytes(error: BaseException) -> int:
    """What the allocation that failed had asked for; 0 if the error does not say so. CUDA rounds it to 1 %."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0


# What a stage is doing now: told to whoever watches, and noted on an error that leaves it.
#
# The error stays the user's own: the same object, with its type, arguments and traceback. The note adds which stage it
# came from, and what was being done with that stage.



BACKWARD = "backward"

_log = logging.getLogger("rotor_py")

Watcher = Callable[[str, str, bool], None]
"""Called with what is done ("forward", "recomputation" or "backward"), the stage's name, and whether it begins or ends.

The backward of a stage that is part of the caller's graph begins when its gradient arrives. Its end is not told: the
engine runs it, and calls nobody when it is through.
"""

_watchers: list[Watcher] = []


# Not per thread: the engine runs backwards on CUDA devices in threads of its own.
@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of everything that stages do in this process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def is_watched() -> bool:
    """Whether anybody watches what stages do."""
    return bool(_watchers)


class During:
    """A context in which something is done with a stage.

    Watchers are told when it begins and when it ends. Any exception that leaves it gets a note that says what was being
    done with which stage.
    """

    # Not a generator with `contextmanager`, which costs more: this is entered for every run of every stage.
    __slots__ = ("doing", "name")

    def __init__(self, doing: str, name: str) -> None:
        self.doing = doing
        self.name = name

    def __enter__(self) -> None:
        if _watchers:
            _tell(self.doing, self.name, True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _watchers:
            _tell(self.doing, self.name, False)
        if error is not None:
            add_note(error, f"in the {self.doing} of stage {self.name!r}")


def tell_of_backward(output: Any, name: str) -> None:
    """Tell of the backward of a stage that was run in the caller's graph, once it begins."""
    # Hooks cost time in every step, and almost always nobody watches.
    if _watchers and torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _tell(BACKWARD, name, True))


def _tell(doing: str, name: str, begins: bool) -> None:
    for watcher in _watchers:
        watcher(doing, name, begins)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, once. Before Python 3.11, whose tracebacks show no notes, it is logged as well."""
    if text in getattr(error, "__notes__", ()):
        return
    with contextlib.suppress(Exception):  # an exception that takes no note is still the user's
        if hasattr(error, "add_note"):
            error.add_note(text)
            return
        error.__notes__ = [*getattr(error, "__notes__", ()), text]
    _log.error("%s: %s", type(error).__name__, text, extra=record_fields("note"))
