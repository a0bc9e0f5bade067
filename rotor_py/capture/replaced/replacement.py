"""Functions of libraries, replaced by others while a model is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the functions are replaced."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            self._captures += 1
            if self._originals:
                return
            for owner, name, function in self._found():
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, function)

    def _end(self) -> None:
        with self._lock:
            self._captures -= 1
            if self._captures:
                return
            for owner, name, original in self._originals:
                setattr(owner, name, original)
            self._originals = []
