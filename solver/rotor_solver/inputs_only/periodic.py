"""Checkpoints at regular distances: every segment is run twice, but for the last.

On the way forward only the first input of every segment is kept; the last segment is stored as it runs, before the
loss. Then the other segments, the last of them first, are run again, stored, and go backward. With the segments
[c_p, c_{p+1}) for p = 0 … k, that takes Σ uf_i for i < c_k longer than storing everything, and needs, a_0 not counted,
the most of

    |a_{c_1}| + … + |a_{c_p}| + what CF and Fn from c_p to c_{p+1} need,      p < k
    |a_{c_1}| + … + |a_{c_p}| + what storing the segment p needs              with δ_{c_{p+1}} in memory, for p < k
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from rotor_solver.arrays.costs import Costs, Ints, costs_of
from rotor_solver.chain import Chain
from rotor_solver.inputs_only.checkpoints import checked_count, fastest_fitting, with_fastest_options
from rotor_solver.segments import even_segments, fastest_forwards, recompute_segments, segments_from
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


@dataclass(frozen=True, slots=True)
class Periodic:
    """Checkpoints at the stages 0, n, 2n, … for n = `every`, a_0 among them, but at most `max_checkpoints`.

    Unless `every` is given, it is the fastest distance that fits. Raises ValueError for numbers less than one.
    """

    every: int | None = None
    max_checkpoints: int | None = None

    name = "periodic"

    def __post_init__(self) -> None:
        checked_count(self.every, "every", "stages")
        checked_count(self.max_checkpoints, "max_checkpoints", "checkpoints")

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The schedule, if its peak is at most `mem_limit` bytes, a_0 counted.

        InfeasibleError otherwise, with the least limit.
        """
        distances = range(1, max(2, len(chain) + 1)) if self.every is None else [self.every]
        return _fastest(chain, mem_limit, [self._segments(len(chain), n) for n in distances], self.name)

    def _segments(self, length: int, distance: int) -> list[range]:
        return segments_from(range(0, length, distance)[: self.max_checkpoints], length)


@dataclass(frozen=True, slots=True)
class Sqrt:
    """k = round(√L) segments of ⌊L/k⌋ or ⌈L/k⌉ stages: O(√L) memory where stages are alike.

    Chen et al. 2016, arXiv:1604.06174. Segment p begins at ⌊p L / k⌋; √L is never halfway between whole numbers.
    """

    name = "sqrt"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The schedule, if its peak is at most `mem_limit` bytes, a_0 counted.

        InfeasibleError otherwise, with the least limit.
        """
        count = max(1, round(sqrt(len(chain))))
        return _fastest(chain, mem_limit, [even_segments(len(chain), count)], self.name)


def _fastest(chain: Chain, mem_limit: int, candidates: list[list[range]], name: str) -> Sequence:
    """The fastest schedule that fits, of those for the given segments."""
    from rotor_solver.inputs_only import kernels

    costs = costs_of(with_fastest_options(chain))
    stored = kernels.store_segments(costs)
    schedules = []
    for segments in candidates:
        ends = [segment.stop for segment in segments[:-1]]
        recomputed = float(costs.run[ends[-1]] + sum(costs.split[ends] - costs.run[ends])) if ends else 0.0
        schedules.append((recomputed, chain.input_bytes + _need(costs, stored, segments)))
    segments = candidates[fastest_fitting(name, mem_limit, schedules)]
    sequence = recompute_segments(fastest_forwards(chain), segments[:-1], name)
    assert simulate(chain, sequence).peak <= mem_limit
    return sequence


def _need(costs: Costs, stored: Ints, segments: list[range]) -> int:
    """The formula of this module; stored[i, stop] is what storing stages i … stop-1 needs, the loss being stage L."""
    length = len(costs.activation) - 1
    held, needs = 0, [] if length else [costs.loss_need]
    for segment in segments:
        start, stop = segment.start, segment.stop
        held += int(costs.activation[start]) if start else 0
        if stop < length:
            needs.append(held + costs.check_need[start, stop])
        else:
            stop = length + 1
        needs.append(held + stored[start, stop])
    return int(max(needs))
