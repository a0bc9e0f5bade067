"""Stages that follow each other and are all stored whole, run as one in the graph around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rotor_profiling.storage import wait_for
from rotor_py.stage.protocol import RunThrough, offers_of

NamedStage = tuple[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """Several stages as one function. `shared` says how many values at the end of its input all stages share."""

    function: RunThrough
    names: list[str]
    shared: int
    last: bool
    """whether its output is that of the chain"""

    def __call__(self, values: list[Any], context: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the stages: what they share is their `context`, or is carried along at the end of what goes in.

        The elements of the first one's input are in a list, which is emptied, so that they are freed as soon as they
        were used.
        """
        carried = 0 if context else self.shared
        shared = values[len(values) - carried :]
        values += context
        made = self.function(values, self.names.__getitem__)
        wait_for(made)  # as `StageRunner` does: what was sent stays in memory until somebody waits
        return made if self.last or not carried else (*made, *shared)


def joined_run(stages: Sequence[NamedStage]) -> JoinedRun | None:
    """How to run stages as one; None if they cannot."""
    parts = [(part, name) for name, function in stages for part in offers_of(function).parts]
    run = parts[0][0].run_through([part for part, _ in parts[1:]]) if parts else None
    if run is None:
        return None
    return JoinedRun(run, [name for _, name in parts], parts[0][0].shared, parts[-1][0].last)
