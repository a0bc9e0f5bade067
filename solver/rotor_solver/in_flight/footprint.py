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
    return max((beside + each.peak for beside, each in zip(_beside(footprints), footprints, strict=True)), default=0)


PEAKS = {"any": peak_in_any_order, "reverse": peak_in_reverse}
"""The most that forwards hold, by the order in which their backwards may come."""


def busiest_of(footprints: Many[Footprint], order: str) -> tuple[int, int]:
    """The number of the forward while which runs the most is held, and what the others hold meanwhile."""
    if order == "reverse":
        beside = _beside(footprints)
        number = max(range(len(beside)), key=lambda at: beside[at] + footprints[at].peak)
        return number, beside[number]
    number = max(range(len(footprints)), key=lambda at: footprints[at].working)
    return number, sum(each.waiting for each in footprints) - footprints[number].waiting


def most_while_one_begins(footprints: Many[Footprint], order: str) -> int:
    """The most that all but one hold while that one begins; it is the last to begin where backwards come in reverse."""
    if order == "reverse":
        return sum(each.kept for each in footprints[:-1])
    return sum(each.waiting for each in footprints) - min(each.waiting for each in footprints)


def _beside(footprints: Many[Footprint]) -> list[int]:
    """What the others hold while each of them runs, if the backwards come in reverse."""
    found, before, after = [], 0, sum(each.left for each in footprints)
    for each in footprints:
        after -= each.left
        found.append(before + after)
        before += each.kept
    return found


def with_room_at_loss(chain: Chain, room: int) -> Chain:
    """The chain, with a loss that needs `room` bytes at least.

    A plan of it within a limit keeps no more than the limit less `room` from its forward to its backward, for others
    to run in between.
    """
    return replace(chain, loss_temp=max(chain.loss_temp, room))
