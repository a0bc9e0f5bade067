"""What one forward costs the others that are in flight beside it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from rotor_solver.chain import Chain
from rotor_solver.operations import Loss
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


@dataclass(frozen=True, slots=True)
class Footprint:
    """A sequence seen from outside, in bytes and seconds.

    `kept` is what it holds from the end of its forward to the beginning of its backward, the gradient of its output
    included. `left` is what is there of it after its backward: its input and output, which the caller holds, and the
    gradient of its input. `peak` is its own most.
    """

    kept: int
    left: int
    peak: int
    makespan: float

    @property
    def waiting(self) -> int:
        """The most that it holds while another forward runs."""
        return max(self.kept, self.left)

    @property
    def working(self) -> int:
        """What it needs beyond `waiting` while it runs."""
        return max(0, self.peak - self.waiting)

    @classmethod
    def of(cls, chain: Chain, sequence: Sequence) -> Footprint:
        """The footprint of `sequence`. ValueError if it is not valid for `chain`."""
        found = simulate(chain, sequence)
        loss = list(sequence).index(Loss())
        # With the gradient of the output: the backward of a sum of losses makes all of them before it goes on.
        kept = (found.after[loss - 1] if loss else chain.input_bytes) + chain.activation[-1]
        return cls(kept, found.after[-1] + chain.input_bytes, found.peak, found.makespan)


def peak_in_any_order(footprints: Many[Footprint]) -> int:
    """The most that these forwards hold, whichever of them runs while all others wait."""
    return sum(each.waiting for each in footprints) + max(each.working for each in footprints)


def peak_in_reverse(footprints: Many[Footprint]) -> int:
    """The most that they hold if their backwards come in reverse: while one runs, those before it wait."""
    most, before, after = 0, 0, sum(each.left for each in footprints)
    for each in footprints:
        after -= each.left
        most = max(most, before + each.peak + after)
        before += each.kept
    return most


def with_room_at_loss(chain: Chain, room: int) -> Chain:
    """The chain, with a loss that needs `room` bytes at least.

    A plan of it within a limit keeps no more than the limit less `room` from its forward to its backward, for others
    to run in between.
    """
    return replace(chain, loss_temp=max(chain.loss_temp, room))
