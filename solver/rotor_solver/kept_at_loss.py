"""What a plan keeps for the backward, stage by stage, at the moment when the loss runs."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.moments import moments
from rotor_solver.operations import Loss
from rotor_solver.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one stage, the output and what its backward needs, at the moment when the loss runs.

    `kept_bytes` are in memory. `not_kept_bytes` are not, but would be in plain training.
    """

    name: str
    kept_bytes: int
    not_kept_bytes: int


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """What is in memory when the loss runs, before the first backward, and what a plan saves there.

    `input_bytes` are the chain's input. `beside_bytes` are carried past the chain (an encoder's output, a skip
    connection). Both are in memory with every plan, so the sums leave them out.
    """

    stages: tuple[StageMemory, ...]
    input_bytes: int = 0
    beside_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(stage.kept_bytes for stage in self.stages)

    @property
    def not_kept_bytes(self) -> int:
        return sum(stage.not_kept_bytes for stage in self.stages)

    @property
    def share_saved(self) -> float:
        """The part of all bytes, kept or not, that is not kept: in [0, 1]."""
        whole = self.kept_bytes + self.not_kept_bytes
        return self.not_kept_bytes / whole if whole else 0.0


def plan_memory(chain: Chain, sequence: Sequence, beside_bytes: int = 0) -> PlanMemory:
    """What `sequence` keeps of `chain`, and what storing everything would. ValueError if `sequence` is not valid."""
    kept, plain = _kept(chain, sequence), _kept(chain, store_all(chain))
    stages = tuple(
        StageMemory(stage.name, here, max(0, there - here))
        for stage, here, there in zip(chain, kept, plain, strict=True)
    )
    return PlanMemory(stages, chain.input_bytes, beside_bytes)


def _kept(chain: Chain, sequence: Sequence) -> list[int]:
    """For every stage, the bytes of its output and its ā that are there when the loss begins."""
    before = None
    for moment in moments(chain, sequence):
        if isinstance(moment.operation, Loss):
            break
        before = moment
    if before is None:  # the loss comes first: the chain has no stages
        return []
    return [before.inputs.get(i + 1, 0) + before.attached.get(i + 1, 0) for i in range(len(chain))]
