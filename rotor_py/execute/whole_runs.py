"""Stages that follow each other and are all stored whole, run as one in the graph around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rotor_profiling.storage import wait_for
from rotor_py.execute.runners import NamedStage
from rotor_py.stage.activity import is_watched
from rotor_py.stage.protocol import RunThrough, offers_of


def run_through(
    stages: Sequence[NamedStage], context: tuple[Any, ...]
) -> Callable[[list[Any]], tuple[Any, ...]] | None:
    """How to run stages, which share `context`, as one; None if somebody wants to see each of them, or if they cannot.

    It is called with the elements of the first one's input in a list, which it empties, so that they are freed as soon
    as they were used.
    """
    if is_watched():
        return None
    parts = [(part, name) for name, function in stages for part in offers_of(function).parts]
    run = parts[0][0].run_through([part for part, _ in parts[1:]]) if parts else None
    if run is None:
        return None
    first, last = parts[0][0], parts[-1][0]
    carried = 0 if context else first.shared
    return partial(_run, run, [name for _, name in parts], context, carried, last.last)


def _run(
    run: RunThrough, names: list[str], context: tuple[Any, ...], carried: int, last: bool, values: list[Any]
) -> tuple[Any, ...]:
    """Run stages: what they share is their `context`, or is `carried` along at the end of what goes in."""
    shared = values[len(values) - carried :]
    values += context
    made = run(values, names.__getitem__)
    wait_for(made)  # as `StageRunner` does: what was sent stays in memory until somebody waits
    return made if last or not carried else (*made, *shared)
