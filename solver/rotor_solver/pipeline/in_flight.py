"""How many microbatches a schedule keeps in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rotor_solver.pipeline.schedules import Schedule


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most microbatches at once of one part of the chain, in a schedule.

    `forwards` have had their forward and not their backward, or are in progress. If backwards are `split`, that is the
    one for the inputs; and up to `weights` others wait for the one for the weights at the same time.
    """

    forwards: int
    weights: int = 0
    split: bool = False


def in_flight(schedule: Schedule) -> list[InFlight]:
    """For every part of the chain, what its schedule keeps in flight. With P ranks and M microbatches, rank r keeps

        gpipe         M
        1f1b          min(M, P - r)
        zero-bubble   min(M, P - r), and beside them up to r that wait for the weights: P altogether; if the backwards
                      are whole, none of these
        interleaved   min(M · V, (V - 1) · M / max(1, ⌊M / P⌋) + 2 (P - 1 - r) + 1) of its V parts together

    The numbers are counted in the order of actions itself.
    """
    found = [InFlight(1)] * schedule.parts
    for rank in range(schedule.ranks):
        forwards: Counter[int] = Counter()
        weights: Counter[int] = Counter()
        for action in schedule.order(rank):
            part, kind = action.part, action.kind
            # The action's own microbatch is in progress; all others wait.
            forwards[part] -= kind in ("B", "I")
            weights[part] -= kind == "W"
            most = found[part]
            found[part] = InFlight(
                max(most.forwards, forwards[part] + 1),
                max(most.weights, weights[part]),
                most.split or kind == "I",
            )
            forwards[part] += kind == "F"
            weights[part] += kind == "I"
    return found
