"""How often stages are timed: in turns, walk by walk through the chain, until their times are good enough for a plan.

A busy machine disturbs a run for a while, and then not. So a stage is not timed several times in a row, but once in
every walk; and its caches are as cold as in a step. Stages of one kind share their times: each of them is a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import hypot, inf

from rotor_profiling.stage.seconds import (
    StageRun,
    StageSeconds,
    cautious,
    error_of_node,
    error_of_ways,
    error_of_whole,
    spread_of,
)
from rotor_profiling.timing import several_processes
from rotor_py.measure.certified.possible_times import ends_of
from rotor_py.measure.measurement import Ends
from rotor_py.measure.walks.precision import ALL_PLANS, CLOSELY, Precision, beside_others

# Guesses.
FEWEST_RUNS = 2
MOST_WALKS = 16
"""A walk takes a forward at least, and as long as several steps where all stages are timed in all ways."""
MOST_PER_WALK = 2
"""Of stages of one kind, so many are timed in a walk, as far from each other as can be: between them, others run."""
WELL_KNOWN = 0.003
"""How well the time of a step is to be known, without a limit, where a walk takes little, since most stages are of few
kinds."""
LITTLE = 5
"""In plain steps: what all runs may take together where times have to be well known only because that takes little."""
BUSY = 0.05
"""The machine is busy if the thread waits for a core for this part of the time."""
FIRST_CALL_SECONDS = 0.0001
"""A guess: how much longer a way takes than the first one, because its code is called for the first time, as in the run
that shows bytes."""
TOO_FAR = 0.10
"""Times that are known no better than this are not taken from an earlier run."""


class StageTimes:
    """The runs of the stages of some kinds, as far as they have been timed.

    Other ways than whole, and what it takes to run again, are timed once among the fewest runs, since they take long.
    """

    def __init__(self, precision: Precision = ALL_PLANS) -> None:
        self._asked = self._precision = precision
        self._of_curves = ALL_PLANS
        """what all plans would need here"""
        self._runs: dict[Hashable, list[StageRun]] = {}
        self._settled: set[Hashable] = set()
        self._ways: dict[Hashable, int] = {}
        self._plenty = False
        """Whether the next walk may time more than is in doubt, since that takes little."""

    def expect(self, kind: Hashable, ways: int) -> None:
        """Stages of this `kind` are stored in so many `ways`, the first of which is whole."""
        self._ways[kind] = ways

    def note_waiting(self, share: float) -> None:
        """In a walk, the thread waited for a core for this `share` of the time."""
        if share > BUSY:
            self._of_curves = CLOSELY
            self._precision = beside_others(self._asked)

    def add(self, kind: Hashable, run: StageRun, *, exact: bool = False) -> None:
        """A stage of this `kind` was timed; not once more if its time is `exact`."""
        self._runs.setdefault(kind, []).append(run)
        if exact:
            self._settled.add(kind)

    def settle(self, kind: Hashable, runs: Sequence[StageRun], *, enough: bool = True) -> None:
        """Stages of this `kind` were timed earlier, by these `runs`, and not once more if the machine was quiet.

        If they were not `enough` for all plans, they are timed further where it takes more; and for a limit that is
        read off the curve, in any case.
        """
        if error_of_whole(runs) <= TOO_FAR:
            self._runs[kind] = list(runs)
            if enough and not self._precision.least:
                self._settled.add(kind)

    def runs_of(self, kind: Hashable) -> Sequence[StageRun]:
        """The runs of stages of a `kind`."""
        return self._runs[kind]

    def of(self, kind: Hashable) -> list[StageSeconds]:
        """The seconds of stages of a `kind`, in each way; what plans choose by takes as long as it may (`cautious`)."""
        return cautious(self._runs[kind])

    def ends(self, kind: Hashable, ways: Sequence[str]) -> Ends:
        """The least and the most of these seconds, for a stage that may be stored in these `ways`."""
        return ends_of(self._runs[kind], ways)

    def wanted(self, kinds: Sequence[Hashable], *, only_fewest: bool = False) -> set[int]:
        """Which stages of a chain to time in the next walk, by position; `kinds` has that of each stage.

        With `only_fewest`, those that have not been timed as often as any stage is.
        """
        few = {kind for kind in kinds if self._missing(kind)} - self._settled
        # Processes have to run equally often, but their clocks differ: then no clock decides.
        if not few and not only_fewest and not several_processes():
            few = self._uncertain(kinds, self._precision)
            self._plenty = self._precision is ALL_PLANS and self._takes_little(kinds)
        found: set[int] = set()
        for kind in few:
            at = [position for position, each in enumerate(kinds) if each == kind]
            many = min(self._missing(kind) or MOST_PER_WALK, len(at))
            begin = len(self._runs.get(kind, ())) // many  # others than in the last walk
            found |= {at[(begin + i * len(at) // many) % len(at)] for i in range(many)}
        return found

    def all_ways_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a stage of a `kind` is to time it in all ways, or stored whole alone."""
        many = self._runs_in_all_ways(kind)
        # Processes have to run equally often, and their clocks differ.
        if several_processes() or not many:
            return True
        if not self._missing(kind):
            return self._in_doubt(kind, many, error_of_ways)
        return self._runs[kind][-1].total * self._precision.good < FIRST_CALL_SECONDS

    def again_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a stage of a `kind` is to show what it takes to run again."""
        many = self._runs_as_node(kind)
        if several_processes() or not many:
            return True
        return not self._missing(kind) and self._in_doubt(kind, many, error_of_node)

    def cold_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a stage of a `kind` is to be timed with cold caches, as in a step.

        Not among the fewest: to empty caches takes a millisecond, which for small stages comes to a step.
        """
        return not self._missing(kind)

    def _in_doubt(self, kind: Hashable, many: int, error: Callable[[Sequence[StageRun]], float]) -> bool:
        """Whether what plans choose by, shown by so `many` runs, is not known as well as the time of a step has to be.

        Of a single run, nobody knows how wrong it is.
        """
        return (
            many < self._precision.least
            or (self._plenty and many == 1)
            or error(self._runs[kind]) > self._precision.good * self._seconds(kind)
        )

    def _missing(self, kind: Hashable) -> int:
        """How many runs a kind still needs; one of them has all ways, and one shows what it takes to run again."""
        short = FEWEST_RUNS - len(self._runs.get(kind, ()))
        return max(short, int(not self._runs_as_node(kind) or not self._runs_in_all_ways(kind)))

    def _runs_as_node(self, kind: Hashable) -> int:
        return sum(run.node is not None for run in self._runs.get(kind, ()))

    def _runs_in_all_ways(self, kind: Hashable) -> int:
        return sum(len(run.ways) >= self._ways.get(kind, 1) for run in self._runs.get(kind, ()))

    def spread(self, kinds: Sequence[Hashable]) -> float:
        """How far times of one kind of stage are apart, as a part of them: the mean of all, weighted by time."""
        seconds = [self._seconds(kind) for kind in kinds]
        total = sum(seconds)
        spreads = (spread_of(self._runs[kind]) for kind in kinds)
        return sum(each * share for each, share in zip(spreads, seconds, strict=True)) / total if total else 0.0

    def short_for_curves(self, kinds: Sequence[Hashable]) -> set[Hashable]:
        """The kinds whose times are not good enough for plans of all limits, as they may be for one."""
        return self._uncertain(kinds, self._of_curves)

    def _uncertain(self, kinds: Sequence[Hashable], precision: Precision) -> set[Hashable]:
        """The kinds to time again, so that the time of a step is known well enough; none if it is."""
        seconds = {kind: kinds.count(kind) * self._seconds(kind) for kind in set(kinds)}
        total = sum(seconds.values())
        errors = {
            kind: inf if each > precision.good * total and self._seldom(kind, precision) else self._error(kind)
            for kind, each in seconds.items()
        }
        # Stages are timed in turns, so that those of one kind are not slow because those of another are.
        wrong = {kind: errors[kind] * seconds[kind] for kind in seconds}
        good = WELL_KNOWN if precision is ALL_PLANS and self._takes_little(kinds) else precision.good
        bearable = good * total
        taken = sum(run.all_seconds for kind in seconds for run in self._runs[kind][FEWEST_RUNS:])
        if hypot(*wrong.values()) <= bearable or taken > precision.steps * total:
            return set()
        unsettled = seconds.keys() - self._settled
        open_ones = [kind for kind in unsettled if errors[kind] > good and len(self._runs[kind]) < precision.most]
        # Of those that are left out, all together may be wrong by a half of what is bearable.
        left_out = 0.0
        for number, kind in enumerate(sorted(open_ones, key=wrong.__getitem__)):
            left_out = hypot(left_out, wrong[kind])
            if left_out > bearable / 2:
                return set(sorted(open_ones, key=wrong.__getitem__)[number:])
        return set(open_ones)

    def _takes_little(self, kinds: Sequence[Hashable]) -> bool:
        """Whether stages of all kinds may be timed once more, by what that has taken so far."""
        every = {kind: min(MOST_PER_WALK, kinds.count(kind)) for kind in set(kinds)}
        timed = sum(run.all_seconds for kind in every for run in self._runs[kind])
        timed += sum(many * max(run.all_seconds for run in self._runs[kind]) for kind, many in every.items())
        walks = 1 + max(len(self._runs[kind]) // many for kind, many in every.items())
        forward = sum(min(run.ways[0][0] for run in self._runs[kind]) for kind in kinds)
        return timed + walks * forward <= LITTLE * sum(map(self._seconds, kinds))

    def _seldom(self, kind: Hashable, precision: Precision) -> bool:
        """Whether a kind has been run too seldom for anybody to know how well its times are known."""
        return min(self._runs_in_all_ways(kind), self._runs_as_node(kind)) < precision.least

    def _error(self, kind: Hashable) -> float:
        """How well the time of a stage is known, and how much longer its ways take, as a part of it."""
        runs, seconds = self._runs[kind], self._seconds(kind)
        return max(error_of_whole(runs), error_of_ways(runs) / seconds if seconds else 0.0)

    def _seconds(self, kind: Hashable) -> float:
        found = self.of(kind)[0]
        return found.forward_seconds + found.backward_seconds
