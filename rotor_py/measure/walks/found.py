"""What walks through a chain find of a kind of stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rotor_profiling import StageBytes
from rotor_profiling.stage.seconds import StageRun


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the second walk finds: bytes of the stage stored whole, then in each of the `ways`; bytes of what it
    decides; buffers that it changes, by position; whether it is known to decide nothing.
    """

    bytes: tuple[StageBytes, ...]
    decided_bytes: int
    moving: frozenset[int]
    ways: tuple[str, ...] = ()
    undecided: bool = False


Runs = Sequence[StageRun]
"""What the other walks find."""
