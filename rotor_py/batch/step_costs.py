"""What a step of one batch costs: bytes and seconds, as they were measured or as a law says."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.measure.budget import Budget
from rotor_solver import Chain, InfeasibleError, Persistent, Sequence, store_all


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The memory of a step with its chain, and the seconds of the layers before the chain, which no plan changes."""

    budget: Budget
    before_chain_seconds: float = 0.0

    @property
    def chain(self) -> Chain:
        return self.budget.chain

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages: where they differ, nothing lies between two sizes."""
        return tuple(stage.name for stage in self.chain)

    @property
    def least_bytes(self) -> int:
        """The least limit for which there is a plan."""
        return self.budget.least_bytes()

    @property
    def stored_bytes(self) -> int:
        """The peak of a step that stores everything."""
        return self.budget.peak_bytes(store_all(self.chain))

    @property
    def stored_seconds(self) -> float:
        """Seconds of forward, loss and backward that store everything."""
        return self.seconds_of(store_all(self.chain))

    def seconds_of(self, sequence: Sequence) -> float:
        """Seconds of forward, loss and backward by `sequence`, of all forwards in flight."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    def plan(self, mem_limit: int, slots: int) -> Sequence | None:
        """The fastest sequence found within `mem_limit` bytes for the whole step; None if nothing fits."""
        try:
            return self.budget.solve(mem_limit, Persistent(slots))
        except InfeasibleError:
            return None
