"""What a training step takes, by whichever sequence it goes: what is fixed, the chain, and what is beside it."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.units import format_bytes
from rotor_solver import Backward, Chain, Loss, Sequence, simulate
from rotor_solver.in_flight import Footprint


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step around the chain.

    Beside the fixed part, `before_bytes` are there while the layers before the chain run, and `stepping_bytes` while
    the optimizer steps: the chain's input, its output, and fresh gradients. The step itself needs `step_bytes` more;
    None if nothing is known about the optimizer. `snapshot_bytes` are needed as soon as anything is computed twice.

    `forwards` are in flight at once, all by one sequence. Each of the others holds what its chain keeps from forward to
    backward and `held_beside` more. Its snapshots are its own.
    """

    fixed: FixedMemory
    chain: Chain
    before_bytes: int = 0
    snapshot_bytes: int = 0
    stepping_bytes: int = 0
    step_bytes: int | None = None
    forwards: int = 1
    held_beside: int = 0
    in_nodes: bool = False
    """Whether the backward of a stored stage takes what that of one that was run again takes."""

    @property
    def floor_bytes(self) -> int:
        """What the step needs whatever the plan is: for the layers before the chain, or for the optimizer."""
        return max(self.fixed.total + self.before_bytes, self.optimizer_peak_bytes)

    @property
    def optimizer_peak_bytes(self) -> int:
        """What is in memory while the optimizer steps, as far as the optimizer is known."""
        return self.fixed.total + self.stepping_bytes + (self.step_bytes or 0)

    def peak_bytes(self, sequence: Sequence) -> int:
        """The predicted peak of a whole step that follows `sequence`."""
        others = self.others_bytes(sequence)
        running = simulate(self.chain, sequence).peak
        if self.forwards > 1:  # one that is over leaves its output, which may be more than it took itself
            running = max(running, Footprint.of(self.chain, sequence).waiting)
        before = self.fixed.total + others + self.before_bytes
        return max(before, self.optimizer_peak_bytes, self.beside_chain(sequence) + running)

    def beside_chain(self, sequence: Sequence) -> int:
        """What is in memory beside the chain while it follows `sequence`: the fixed part, snapshots, other forwards."""
        snapshots = self.forwards * self.snapshot_bytes if recomputes(sequence) else 0
        return self.fixed.total + snapshots + self.others_bytes(sequence)

    def others_bytes(self, sequence: Sequence) -> int:
        """What the other forwards in flight hold if they follow `sequence`, but for their snapshots."""
        if self.forwards == 1:
            return 0
        return (self.forwards - 1) * (Footprint.of(self.chain, sequence).waiting + self.held_beside)

    def chain_limit(self, mem_limit: int) -> int:
        """What is left for the chain, its input included, if something is computed twice; for that of all forwards."""
        others = (self.forwards - 1) * (self.held_beside + self.snapshot_bytes)
        return mem_limit - self.fixed.total - self.snapshot_bytes - others

    def split(self) -> str:
        """The fixed part in words."""
        parts = self.parts()
        forwards = f" with {self.forwards} forwards in flight" if self.forwards > 1 else ""
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "") + forwards

    def parts(self) -> str:
        """What the fixed part consists of, in words."""
        return self.fixed.in_words()


def recomputes(sequence: Sequence) -> bool:
    """Whether a forward runs after the loss."""
    operations = list(sequence)
    return any(not isinstance(operation, Backward) for operation in operations[operations.index(Loss()) + 1 :])
