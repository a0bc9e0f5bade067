"""What walks through a chain find of a kind of stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rotor_profiling import Layouts, StageBytes
from rotor_profiling.stage.seconds import StageRun
from rotor_py.stage.graph_effects import GraphEffects


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the first walk finds: `layouts` are those of the gradients of the stage's input."""

    effects: GraphEffects
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the second walk finds: bytes of the stage stored whole, then in each of the `ways`; bytes of what it
    decides; buffers that it changes, by position.
    """

    bytes: tuple[StageBytes, ...]
    decided_bytes: int
    moving: frozenset[int]
    ways: tuple[str, ...] = ()


Runs = Sequence[StageRun]
"""What the other walks find."""
