"""What stages of one forward move out of memory and back, at the operations where the plan says so.

Waits and fetches happen once, in the order of the sequence, whatever runs the operations: the forward, or the engine
that comes to a stage. A pass that goes another way than the plan finds everything as well: what is read and has not
been fetched is fetched then (`offload.tier`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rotor_py.offload.offload_saved import LeavingMemory
from rotor_py.offload.tier import Tier
from rotor_py.stage.keepers.leaving import run_leaving
from rotor_py.stage.runner import StageRunner
from rotor_solver.moving import Moves


@dataclass(slots=True)
class Moving:
    """The moves of one forward and its backward, to `tier`. `position` is the first operation that is yet to come."""

    moves: Moves
    tier: Tier
    position: int = 0
    _away: dict[int, LeavingMemory] = field(default_factory=dict)

    def come_to(self, position: int) -> None:
        """The operation at this position of the sequence is about to begin. OffloadError if a copy out failed."""
        while self.position <= position:
            for stage in self.moves.wait_out[self.position]:
                if stage in self._away:
                    self._away[stage].wait_out()
            for stage in self.moves.fetch[self.position]:
                if stage in self._away:
                    self._away[stage].fetch()
            # Last: after an error, whoever comes here again is to find it again.
            self.position += 1

    def forward(self, runner: StageRunner, stage: int, value: Any, context: tuple[Any, ...]) -> Any:
        """Run a stage in the graph of plain training; what it saves begins to leave, if the plan moves it."""
        if stage not in self.moves.stages:
            return runner.forward(value, context)
        output, leaving = run_leaving(runner, value, context)
        leaving.leave(self.tier)
        self._away[stage] = leaving
        return output
