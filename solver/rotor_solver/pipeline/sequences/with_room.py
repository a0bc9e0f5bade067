"""The fastest sequence that keeps so many bytes from forward to backward, and needs so many more while it runs.

It is that of the same chain with a loss that needs the room: whatever is there when the loss begins fits beside it.
"""

from __future__ import annotations

from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.extremes import min_bytes, store_all
from rotor_solver.persistent import Persistent
from rotor_solver.pipeline.sequences.microbatch import Microbatch
from rotor_solver.sequence import Sequence


def fastest_with_room(chain: Chain, kept: int, room: int) -> Sequence:
    """The fastest sequence with at most `kept` bytes when the loss begins, and a peak of at most kept + room bytes.

    Raises InfeasibleError if there is none.
    """
    stored = store_all(chain)
    one = Microbatch.of(chain, stored)
    if one.kept_bytes <= kept and one.peak_bytes <= kept + room:
        return stored
    return Persistent().solve(_roomy(chain, room), kept + room)


def has_room(chain: Chain, kept: int, room: int) -> bool:
    """Whether there is such a sequence."""
    return kept >= 0 and min_bytes(_roomy(chain, room)) <= kept + room


def _roomy(chain: Chain, room: int) -> Chain:
    # The loss holds the gradient of the output in any case.
    return replace(chain, loss_temp=max(chain.loss_temp, room - chain.activation[-1]))
