"""What the persistent program knows of a chain before its first table, whatever the limit."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_solver.arrays.costs import Costs, Ints, costs_of
from rotor_solver.arrays.least import least_memory
from rotor_solver.arrays.pace import kernels_for
from rotor_solver.chain import Chain
from rotor_solver.extremes import least_sequence, store_all
from rotor_solver.persistent.grid import fastest_options
from rotor_solver.persistent.repeats import kinds_of, period_of
from rotor_solver.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Problem:
    """What all tables of a chain have in common. `stored` is the time of storing everything, in seconds."""

    chain: Chain
    stored: float
    costs: Costs
    least: Ints
    """[2, L+1, L+1] bytes, by (state, i, l): the least memory of every interval."""
    full: Ints
    """[2, L+1, L+1] bytes, by (state, i, l): the memory from which on the whole interval is stored."""
    fastest: Ints
    """[L] the fastest option of every stage, among all options."""
    kinds: Ints
    """[L] a number for every stage; stages that cost the same have the same."""
    period: int
    """After how many stages most of the chain repeats itself; 0 if it does not."""

    @classmethod
    def of(cls, chain: Chain) -> Problem:
        """The problem of a chain."""
        stored = store_all(chain).lower_bound
        assert stored is not None
        costs = costs_of(chain)
        fastest = fastest_options(costs)
        # Measured: as plain Python, an interval takes 5 microseconds.
        layout = kernels_for("rotor_solver.persistent.layout", 5e-6 * len(chain) ** 2)
        least, full = least_memory(costs), layout.full_memory(costs, fastest)
        kinds = kinds_of(chain)
        return cls(chain, stored, costs, least, full, fastest, kinds, period_of(kinds))

    @property
    def needed(self) -> int:
        """The least memory for which there is a plan, in bytes, a_0 not counted."""
        return int(self.least[0, 0, len(self.chain)])

    def least_sequence(self) -> Sequence:
        """A sequence for `needed` bytes."""
        return least_sequence(self.chain, self.costs, self.least)
