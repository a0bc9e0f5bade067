"""The exact simulator for several forwards of one chain: what they hold together, in any order of their parts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.operations import Loss, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import Machine, last_reads, simulate, skipped_outputs


@dataclass(frozen=True, slots=True)
class ForwardsSimulation:
    """Makespan in seconds, and peak in bytes; every forward's a_0 is counted."""

    makespan: float
    peak: int


def nested(forwards: int) -> list[int]:
    """The order of a sum of losses: all forwards, all losses, and the backwards from the last forward to the first."""
    there = list(range(forwards))
    return [*there, *there, *reversed(there)]


def simulate_forwards(
    chain: Chain, sequences: Many[Sequence], order: Iterable[int] | None = None
) -> ForwardsSimulation:
    """Run one forward of `chain` by each of `sequences`.

    `order` names a forward three times: its forward, its loss and its backward come where it is named. Without it, the
    order is `nested`. What a forward leaves after its backward, its input and output among it, stays to the end.

    ValueError if a sequence is not valid, or if `order` does not name every forward three times.
    """
    for each in sequences:
        simulate(chain, each)  # for its errors, which name the operation
    order = nested(len(sequences)) if order is None else list(order)
    if sorted(order) != sorted(3 * list(range(len(sequences)))):
        raise ValueError(f"the order {order} does not name each of {len(sequences)} forwards three times")
    running: dict[int, _Forward] = {}
    peak = 0
    for number in order:
        if number not in running:
            running[number] = _Forward(chain, sequences[number])
        beside = sum(each.held for other, each in running.items() if other != number)
        peak = max(peak, beside + running[number].go_on())
    return ForwardsSimulation(sum(each.machine.seconds for each in running.values()), peak)


class _Forward:
    """One forward: its machine, and the operations of its three parts that are still to come."""

    def __init__(self, chain: Chain, sequence: Sequence) -> None:
        self.machine, self._chain = Machine(chain), chain
        self._reads, self._skipped = last_reads(sequence), skipped_outputs(sequence)
        operations = list(enumerate(sequence))
        loss = list(sequence).index(Loss())
        self._parts = iter((operations[:loss], operations[loss : loss + 1], operations[loss + 1 :]))

    def go_on(self) -> int:
        """Run the next part; the most bytes that this forward holds meanwhile."""
        return max([self.held, *(self._run(*each) for each in next(self._parts))])

    @property
    def held(self) -> int:
        """Bytes in memory now. The machine forgets a_0 with the first stage's backward; its caller does not."""
        return self.machine.held + (self._chain.input_bytes if 0 in self.machine.deltas and len(self._chain) else 0)

    def _run(self, position: int, operation: Operation) -> int:
        most = self.machine.run(operation, skip_output=position in self._skipped)
        if position in self._reads:
            self.machine.release_input(self._reads[position])
        return most
