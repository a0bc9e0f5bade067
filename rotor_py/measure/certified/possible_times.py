"""A measurement with the times of its stages at the ends of their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rotor_profiling import StageCost
from rotor_profiling.stage.seconds import StageRun, StageSeconds, estimate_at
from rotor_py.measure.measurement import Ends, Measurement, Way
from rotor_py.stage.ways.elsewhere import ELSEWHERE
from rotor_py.stage.ways.names import parted


@dataclass(frozen=True, slots=True)
class PossibleTimes:
    """A measurement, and what it would be if all that plans differ in took as little or as long as it may.

    Plans differ in the runs without a graph, in how much longer other ways to store a stage take, and in outputs that
    are skipped. Forward and backward of a stage that is stored whole are in each plan once. In `least` and `most`,
    they are therefore the same: only the rest says which plan is best.
    """

    found: Measurement
    least: Measurement
    most: Measurement

    def each(self, change: Callable[[Measurement], Measurement]) -> PossibleTimes:
        """The same after a `change` of all three, which leaves the times of stages."""
        return PossibleTimes(change(self.found), change(self.least), change(self.most))


def ends_of(runs: Sequence[StageRun], ways: Sequence[str]) -> Ends:
    """The ends of the intervals of a stage's times, of which these `runs` are known, in each of its `ways`."""
    least, most = (dict(zip(("", *ways), estimate_at(runs, end), strict=True)) for end in (-1, 1))
    return least, most


def possible_times(found: Measurement) -> PossibleTimes:
    """The measurement, and with the times of its stages at the ends of their `intervals`."""
    return PossibleTimes(found, *(_timed(found, [each[end] for each in found.intervals]) for end in (0, 1)))


def _timed(found: Measurement, seconds: Sequence[Mapping[str, StageSeconds]]) -> Measurement:
    def way(each: Way, known: Mapping[str, StageSeconds]) -> Way:
        # Stored elsewhere, it runs as it does where all of it stays.
        return replace(each, cost=_cost(each.cost, known[parted(each.name, (ELSEWHERE.name,))[0] or ""]))

    stages = tuple(_cost(cost, known[""]) for cost, known in zip(found.stages, seconds, strict=True))
    ways = tuple(
        tuple(way(each, known) for each in several) for several, known in zip(found.ways_by_stage, seconds, strict=True)
    )
    return replace(found, stages=stages, ways=ways if any(ways) else ())


def _cost(cost: StageCost, seconds: StageSeconds) -> StageCost:
    return replace(cost, **asdict(seconds))
