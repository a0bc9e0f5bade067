"""What a training step takes, by whichever sequence it goes: what is fixed, the chain, and what is beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.units import format_bytes
from rotor_solver import Backward, Chain, Loss, Sequence, simulate
from rotor_solver.in_flight import PEAKS, Footprint, busiest_of, most_while_one_begins
from rotor_solver.moving import Link, simulate_moves

_SLOWEST = Link(1e-9, 1e-9)
"""A link over which no copy ends before it is waited for."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step around the chain.

    Beside the fixed part, `before_bytes` are there while the layers before the chain run, and `stepping_bytes` while
    the optimizer steps: the chain's input, its output, and fresh gradients. The step itself needs `step_bytes` more;
    None if nothing is known about the optimizer. `snapshot_bytes` are needed as soon as anything is computed twice.

    `forwards` are in flight at once; their backwards come in `backward_order`, one of `rotor_solver.in_flight.ORDERS`.
    A sequence says what the first of them follows, and has those of the others beside it. Each of the others holds what
    its chain keeps from forward to backward and `held_beside` more. Its snapshots are its own.
    """

    fixed: FixedMemory
    chain: Chain
    before_bytes: int = 0
    snapshot_bytes: int = 0
    stepping_bytes: int = 0
    step_bytes: int | None = None
    forwards: int = 1
    held_beside: int = 0
    backward_order: str = "any"
    in_nodes: bool = False
    """Whether the backward of a stored stage takes what that of one that was run again takes."""
    freed_gradients: int = 0
    """Bytes of gradients that the backward frees, each as soon as it has stepped the parameter."""
    link: Link | None = None
    """How fast activations go to another tier and back, where they may; None where nothing moves."""
    link_name: str = ""
    """What that tier is called."""

    @property
    def optimizer_peak_bytes(self) -> int:
        """What is in memory while the optimizer steps, as far as the optimizer is known."""
        return self.fixed.total + self.stepping_bytes + (self.step_bytes or 0)

    def peak_bytes(self, sequence: Sequence) -> int:
        """The predicted peak of a whole step that follows `sequence`."""
        if self.forwards == 1:
            before, running = self.fixed.total, self.beside_chain(sequence) + peak_of(self.chain, sequence)
        else:
            forwards = self.footprints(sequence)
            before = self.fixed.total - self.held_beside + most_while_one_begins(forwards, self.backward_order)
            running = self.bytes_together(forwards)
        return max(before + self.before_bytes, self.optimizer_peak_bytes, running)

    def beside_chain(self, sequence: Sequence) -> int:
        """What is in memory beside the chain of the `busiest` forward: the fixed part, snapshots, other forwards."""
        return self.busiest(sequence)[1]

    def busiest(self, sequence: Sequence) -> tuple[Sequence, int]:
        """What that forward follows of which the step's peak is, and what is in memory beside its chain then."""
        if self.forwards == 1:
            return sequence, self.fixed.total + self._snapshot(sequence)
        number, others = busiest_of(self.footprints(sequence), self.backward_order)
        chosen = sequence.of_forwards(self.forwards)[number]
        return chosen, self.fixed.total + others + self._snapshot(chosen)

    def makespan(self, sequence: Sequence) -> float:
        """Seconds of all forwards in flight, their losses and their backwards."""
        if sequence.moves is not None:
            assert self.link is not None
            # Where no plan has room for several forwards in flight, each follows that of one.
            return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, self.link).makespan
        return sum(simulate(self.chain, each).makespan for each in sequence.of_forwards(self.forwards))

    def moved_bytes(self, sequence: Sequence) -> int:
        """Bytes that a step by `sequence` moves to another tier, and back."""
        if sequence.moves is None:
            return 0
        return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, _SLOWEST).moved

    def footprints(self, sequence: Sequence) -> list[Footprint]:
        """What each of the forwards in flight costs the others."""
        return [self.footprint(each) for each in sequence.of_forwards(self.forwards)]

    def footprint(self, sequence: Sequence) -> Footprint:
        """What one forward by `sequence` costs others, with all that it holds beside its chain."""
        found, more = Footprint.of(self.chain, sequence), self.held_beside + self._snapshot(sequence)
        return replace(found, kept=found.kept + more, left=found.left + more, peak=found.peak + more)

    def bytes_together(self, forwards: list[Footprint]) -> int:
        """The most that is in memory while these forwards are in flight, whoever of them runs."""
        return self.fixed.total - self.held_beside + PEAKS[self.backward_order](forwards)

    def _snapshot(self, sequence: Sequence) -> int:
        return self.snapshot_bytes if recomputes(sequence) else 0

    def chain_limit(self, mem_limit: int) -> int:
        """What is left for the chain, its input included, if something is computed twice; for that of all forwards."""
        others = (self.forwards - 1) * (self.held_beside + self.snapshot_bytes)
        return mem_limit - self.fixed.total - self.snapshot_bytes - others

    def split(self) -> str:
        """The fixed part in words."""
        parts = self.parts()
        forwards = f" with {self.forwards} forwards in flight" if self.forwards > 1 else ""
        forwards += " whose backwards come in reverse" if forwards and self.backward_order == "reverse" else ""
        freed = f"; {self.gradients_freed()}" if self.freed_gradients else ""
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "") + forwards + freed

    def gradients_freed(self) -> str:
        """What the backward frees, in words; for a step whose backward steps parameters."""
        return f"{format_bytes(self.freed_gradients)} of gradients are freed in the backward, which steps parameters"

    def moved_in_words(self, sequence: Sequence) -> str:
        """What a step by `sequence` moves, or that it moves nothing although it might; empty where nothing may move."""
        if self.link is None:
            return ""
        if nbytes := self.moved_bytes(sequence):
            return f"{format_bytes(nbytes)} of activations are moved to {self.link_name} and back"
        return f"nothing is moved to {self.link_name}: no plan within the limit would be faster for it"

    def parts(self) -> str:
        """What the fixed part consists of, in words."""
        return self.fixed.in_words()


def peak_of(chain: Chain, sequence: Sequence) -> int:
    """The most bytes that `sequence` takes, what it moves included."""
    if sequence.moves is None:
        return simulate(chain, sequence).peak
    # Memory of what has left is let go of where the sequence waits for it, so as if the link were as slow as can be.
    return simulate_moves(chain, sequence, sequence.moves, _SLOWEST).peak


def recomputes(sequence: Sequence) -> bool:
    """Whether a forward runs after the loss."""
    operations = list(sequence)
    return any(not isinstance(operation, Backward) for operation in operations[operations.index(Loss()) + 1 :])
