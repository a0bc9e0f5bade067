"""Revolve: binomial checkpointing, optimal for stages that are all alike.

Griewank & Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software 26 (2000). A snapshot is a
stored input; a_0 takes one of the s. With β(s, r) = C(s+r, s) steps, each is run forward at most r times without a
graph: the fewest such forwards for n steps are

    t(1, s) = 0,   t(n, 1) = n (n-1) / 2
    t(n, s) = the least of j + t(n-j, s-1) + t(j, s) for 0 < j < n
            = r n - β(s+1, r-1), where r is the least with β(s, r) ≥ n

and j = min(β(s, r-1), n - β(s-1, r-1)) attains it: forwards to a_j, a snapshot there, the n-j steps after it with one
snapshot less, then the j steps before it. Every step is run once more, with a graph, immediately before its backward;
the last one before the loss. The state from which that happens is not counted as a snapshot: where none is left, it is
one input more in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from rotor_solver.arrays.costs import costs_of
from rotor_solver.chain import Chain
from rotor_solver.inputs_only.checkpoints import checked_count, fastest_fitting, input_sequence, with_fastest_options
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


@dataclass(frozen=True, slots=True)
class Revolve:
    """Revolve's schedule with `snapshots` stored inputs, or with the fastest number of them that fits.

    Raises ValueError if `snapshots` is less than one.
    """

    snapshots: int | None = None

    name = "revolve"

    def __post_init__(self) -> None:
        checked_count(self.snapshots, "snapshots", "stored inputs")

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The schedule, if its peak is at most `mem_limit` bytes, a_0 counted; InfeasibleError otherwise.

        All numbers of snapshots are tried: if stages differ, fewer snapshots may need more memory.
        """
        from rotor_solver.inputs_only import kernels

        costs = costs_of(with_fastest_options(chain))
        most = max(1, len(chain) - 1)  # every input is stored then
        needs, seconds = kernels.revolve_costs(costs, most)
        schedules = list(zip(seconds.tolist(), (needs + chain.input_bytes).tolist(), strict=True))
        low = 0 if self.snapshots is None else min(self.snapshots, most) - 1
        high = most if self.snapshots is None else low + 1
        snapshots = low + 1 + fastest_fitting(self.name, mem_limit, schedules[low:high])
        splits = kernels.revolve(costs, snapshots)[2].tolist()
        sequence = input_sequence(chain, {(i, last): j for i, last, j in splits}, self.name)
        assert simulate(chain, sequence).peak <= mem_limit
        return sequence


def forward_steps(steps: int, snapshots: int) -> int:
    """Forwards in all that Revolve runs, those with a graph included: n + t(n, s) = (r + 1) n - β(s+1, r-1).

    `snapshots` counts the initial state; ValueError if it is less than one. 0 for no steps.
    """
    checked_count(snapshots, "snapshots", "stored inputs")
    if steps < 1:
        return 0
    repeats = 0
    while comb(snapshots + repeats, repeats) < steps:
        repeats += 1
    return (repeats + 1) * steps - (comb(snapshots + repeats, repeats - 1) if repeats else 0)
