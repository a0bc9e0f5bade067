"""Telling that a model is measured: it takes a while, in the first step of a training that has said nothing yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rotor_py.errors import record_fields
from rotor_py.plan.settings import Settings
from rotor_py.report.progress import progress_bar
from rotor_py.units import format_seconds
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")
_LONGER = 3.0
"""How much longer all walks through a model take than the first one. A guess: the first has one run for a walk's."""


@contextmanager
def telling(settings: Settings, model: str) -> Iterator[Progress]:
    """Something to be called with (stages done, all stages, name of the next) while the class `model` is measured.

    The lines of the log are information, and for who asked to be told, with `verbosity` or `progress=True`, warnings:
    these are shown where logging is not set up.
    """
    given = settings.progress
    around = progress_bar() if given is None or given is True else nullcontext(given or None)
    level = logging.WARNING if settings.verbosity or given is True else logging.INFO
    _log.log(level, "planning for a step of %s", model, extra=record_fields("planning", name=model))
    with around as shown:
        lines = _Lines(level, shown)
        yield lines
        lines.end()


class _Lines:
    """One line of the log when measuring begins, and one when it is done."""

    def __init__(self, level: int, shown: Progress | None) -> None:
        self._level, self._shown = level, shown
        self._created = time.monotonic()
        self._began: float | None = None
        self._stages = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if done == 1 and not self._stages:  # by now, every stage has run
            self._stages = total
            _log.log(
                self._level, "measuring %d stages, about %s", total, format_seconds(_LONGER * (now - self._began)),
                extra=record_fields("measuring", stages=total),
            )  # fmt: skip
        if self._shown is not None:
            self._shown(done, total, name)

    def end(self) -> None:
        """All is measured."""
        if self._began is not None:
            now = time.monotonic()
            took, whole = format_seconds(now - self._began), format_seconds(now - self._created)
            _log.log(
                self._level, "measured %d stages in %s, %s in all", self._stages, took, whole,
                extra=record_fields("measured", stages=self._stages, seconds=now - self._began),
            )  # fmt: skip
