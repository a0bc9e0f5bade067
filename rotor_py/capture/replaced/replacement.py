"""Functions of libraries, replaced by others while a model is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Replaced = tuple[Any, str, Callable[..., Any]]
"""Who has the function, a module or a class; its name there; and what is to be there instead."""


class Replacement:
    """What `found` returns, in its place as long as any thread captures a model.

    Outside of traced code, what is put there has to do what was there before, so that other threads notice nothing.
    """

    def __init__(self, found: Callable[[], list[Replaced]]) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._captures = 0
        self._originals: list[Replaced] = []

    def in_place(self) -> Replacement:
        """A context in which the functions are replaced."""
        return self

    # Not a generator with `contextmanager`, which costs more: every step comes here.
    def __enter__(self) -> None:
        with self._lock:
            self._captures += 1
            if self._originals:
                return
            for owner, name, function in self._found():
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, function)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures:
                return
            for owner, name, original in self._originals:
                setattr(owner, name, original)
            self._originals = []
