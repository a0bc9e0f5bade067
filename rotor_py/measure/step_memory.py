"""Memory of a training step under any sequence: fixed memory, the chain, and memory outside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.units import format_bytes
from rotor_solver import Backward, Chain, Loss, Sequence, simulate
from rotor_solver.in_flight import PEAKS, Footprint, busiest_of, most_while_one_begins
from rotor_solver.moving import Link, simulate_moves

_SLOWEST = Link(1e-9, 1e-9)
"""a link too slow to finish any copy before its wait"""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step around the chain.

    Besides the fixed memory, `before_bytes` are held while the layers before the chain run, and `stepping_bytes` while
    the optimizer steps: the chain's input, its output, and fresh gradients. The optimizer's step takes `step_bytes`
    more; None if unknown. `snapshot_bytes` are held as soon as anything is recomputed.

    `forwards` are in flight at once, with backwards in `backward_order`, one of `rotor_solver.in_flight.ORDERS`. A
    sequence is that of the first, and holds those of the others. Each other forward keeps its chain's bytes from
    forward to backward, `held_beside` more, and its own snapshots.
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
    """Whether the backward of a stored stage takes as much as that of a recomputed one."""
    freed_gradients: int = 0
    """Bytes of gradients that the backward frees, each as soon as its parameter is stepped."""
    link: Link | None = None
    """Speed of offloading; None if nothing may be offloaded."""
    link_name: str = ""
    """name of the offload tier"""

    @property
    def optimizer_peak_bytes(self) -> int:
        """Bytes while the optimizer steps, as far as the optimizer is known."""
        return self.fixed.total + self.stepping_bytes + (self.step_bytes or 0)

    def peak_bytes(self, sequence: Sequence) -> int:
        """Return the predicted peak of a whole step under `sequence`."""
        if self.forwards == 1:
            before, running = self.fixed.total, self.beside_chain(sequence) + peak_of(self.chain, sequence)
        else:
            forwards = self.footprints(sequence)
            before = self.fixed.total - self.held_beside + most_while_one_begins(forwards, self.backward_order)
            running = self.bytes_together(forwards)
        return max(before + self.before_bytes, self.optimizer_peak_bytes, running)

    def beside_chain(self, sequence: Sequence) -> int:
        """Return bytes outside the chain of the `busiest` forward: fixed memory, snapshots, other forwards."""
        return self.busiest(sequence)[1]

    def busiest(self, sequence: Sequence) -> tuple[Sequence, int]:
        """Return the sequence of the forward that sets the step's peak, and the bytes outside its chain then."""
        if self.forwards == 1:
            return sequence, self.fixed.total + self._snapshot(sequence)
        number, others = busiest_of(self.footprints(sequence), self.backward_order)
        chosen = sequence.of_forwards(self.forwards)[number]
        return chosen, self.fixed.total + others + self._snapshot(chosen)

    def makespan(self, sequence: Sequence) -> float:
        """Return seconds of all forwards in flight, with losses and backwards."""
        if sequence.moves is not None:
            assert self.link is not None
            # If no plan fits several forwards in flight, each follows the plan for one.
            return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, self.link).makespan
        return sum(simulate(self.chain, each).makespan for each in sequence.of_forwards(self.forwards))

    def moved_bytes(self, sequence: Sequence) -> int:
        """Return bytes that a step under `sequence` offloads."""
        if sequence.moves is None:
            return 0
        return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, _SLOWEST).moved

    def footprints(self, sequence: Sequence) -> list[Footprint]:
        """Return the footprint of each forward in flight."""
        return [self.footprint(each) for each in sequence.of_forwards(self.forwards)]

    def footprint(self, sequence: Sequence) -> Footprint:
        """Return the footprint of one forward under `sequence`, with its bytes outside the chain."""
        found, more = Footprint.of(self.chain, sequence), self.held_beside + self._snapshot(sequence)
        return replace(found, kept=found.kept + more, left=found.left + more, peak=found.peak + more)

    def bytes_together(self, forwards: list[Footprint]) -> int:
        """Return the peak bytes while these forwards are in flight, whichever of them runs."""
        return self.fixed.total - self.held_beside + PEAKS[self.backward_order](forwards)

    def _snapshot(self, sequence: Sequence) -> int:
        return self.snapshot_bytes if recomputes(sequence) else 0

    def chain_limit(self, mem_limit: int) -> int:
        """Return the bytes left for the chains of all forwards, inputs included, if anything is recomputed."""
        others = (self.forwards - 1) * (self.held_beside + self.snapshot_bytes)
        return mem_limit - self.fixed.total - self.snapshot_bytes - others

    def split(self) -> str:
        """Return the fixed memory as text."""
        parts = self.parts()
        forwards = f" with {self.forwards} forwards in flight" if self.forwards > 1 else ""
        forwards += " whose backwards come in reverse" if forwards and self.backward_order == "reverse" else ""
        freed = f"; {self.gradients_freed()}" if self.freed_gradients else ""
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "") + forwards + freed

    def gradients_freed(self) -> str:
        """Return, as text, the gradients that a backward with parameter steps frees."""
        return f"{format_bytes(self.freed_gradients)} of gradients are freed in the backward, which steps parameters"

    def moved_in_words(self, sequence: Sequence) -> str:
        """Return, as text, the bytes that `sequence` offloads; empty if nothing may be offloaded."""
        if self.link is None:
            return ""
        if nbytes := self.moved_bytes(sequence):
            return f"{format_bytes(nbytes)} of activations are moved to {self.link_name} and back"
        return f"nothing is moved to {self.link_name}: no plan within the limit would be faster for it"

    def parts(self) -> str:
        """Return the parts of the fixed memory as text."""
        return self.fixed.in_words()


def peak_of(chain: Chain, sequence: Sequence) -> int:
    """Return the peak bytes of `sequence`, offloading included."""
    if sequence.moves is None:
        return simulate(chain, sequence).peak
    # Offloaded memory is freed where the sequence waits for the copy, as if the link were the slowest.
    return simulate_moves(chain, sequence, sequence.moves, _SLOWEST).peak


def recomputes(sequence: Sequence) -> bool:
    """Whether a forward runs after the loss."""
    operations = list(sequence)
    return any(not isinstance(operation, Backward) for operation in operations[operations.index(Loss()) + 1 :])
