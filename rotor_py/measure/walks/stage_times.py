"""How often stages are timed: in turns, walk by walk through the chain, until their times are good enough for a plan.

A busy machine disturbs a run for a while, and then not. So a stage is not timed several times in a row, but once in
every walk; and its caches are as cold as in a step. Stages of one kind share their times: each of them is a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import hypot

from rotor_profiling.stage.seconds import (
    StageRun,
    StageSeconds,
    cautious,
    error_of_node,
    error_of_ways,
    spread_of,
)
from rotor_profiling.timing import error_of, several_processes
from rotor_py.measure.certified.possible_times import ends_of
from rotor_py.measure.measurement import Ends

# Guesses, but for this: times that are wrong by 30 % for each stage, independently, cost a plan 1.4 % at most.
FEWEST_RUNS = 2
MOST_RUNS = 16
MOST_WALKS = 16
"""A walk takes a forward at least, and as long as several steps where all stages are timed in all ways."""
MOST_PER_WALK = 2
"""Of stages of one kind, so many are timed in a walk, as far from each other as can be: between them, others run."""
MOST_STEPS = 1
"""No walk begins once runs beyond the fewest have taken as long as so many steps: a plan is worth no more waiting."""
MOST_STEPS_OF_CURVES = 2
"""The same where no limit is known: a limit that is read off the curve of all plans moves with all times."""
MOST_STEPS_BESIDE_OTHERS = 24
"""The same where other programs have the cores as well: few runs are left alone by them."""
GOOD_ENOUGH = 0.02
"""Times are good enough if the time of a whole step is known as well as this."""
WELL_KNOWN = 0.003
"""The same without a limit, beside other programs, where all runs may be disturbed alike, and differ by less than they
are wrong by; and where a walk takes little, since most stages are of few kinds."""
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
    Timed `briefly`, runs beyond the fewest end soon.
    """

    def __init__(self, *, briefly: bool = False) -> None:
        self._briefly = briefly
        self._runs: dict[Hashable, list[StageRun]] = {}
        self._settled: set[Hashable] = set()
        self._ways: dict[Hashable, int] = {}
        self._busy = False
        self._plenty = False
        """Whether the next walk may time more than is in doubt, since that takes little."""

    def expect(self, kind: Hashable, ways: int) -> None:
        """Stages of this `kind` are stored in so many `ways`, the first of which is whole."""
        self._ways[kind] = ways

    def note_waiting(self, share: float) -> None:
        """In a walk, the thread waited for a core for this `share` of the time."""
        self._busy |= share > BUSY

    def add(self, kind: Hashable, run: StageRun, *, exact: bool = False) -> None:
        """A stage of this `kind` was timed; not once more if its time is `exact`."""
        self._runs.setdefault(kind, []).append(run)
        if exact:
            self._settled.add(kind)

    def settle(self, kind: Hashable, runs: Sequence[StageRun], *, enough: bool = True) -> None:
        """Stages of this `kind` were timed earlier, by these `runs`, and not once more if the machine was quiet.

        If they were not `enough` for all plans, they are timed further where it takes more.
        """
        if _error(runs) <= TOO_FAR:
            self._runs[kind] = list(runs)
            if enough:
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
            few = self._uncertain(kinds, briefly=self._briefly)
            self._plenty = not self._briefly and self._takes_little(kinds)
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
        return self._runs[kind][-1].total * GOOD_ENOUGH < FIRST_CALL_SECONDS

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
        good = WELL_KNOWN if self._busy and not self._briefly else GOOD_ENOUGH
        return (self._plenty and many == 1) or error(self._runs[kind]) > good * self._seconds(kind)

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
        return self._uncertain(kinds, briefly=False)

    def _uncertain(self, kinds: Sequence[Hashable], *, briefly: bool) -> set[Hashable]:
        """The kinds to time again, so that the time of a step is known well enough; none if it is."""
        seconds = {kind: kinds.count(kind) * self._seconds(kind) for kind in set(kinds)}
        errors = {kind: max(_error(self._runs[kind]), self._error_of_ways(kind)) for kind in seconds}
        # Stages are timed in turns, so that those of one kind are not slow because those of another are.
        wrong = {kind: errors[kind] * seconds[kind] for kind in seconds}
        good = WELL_KNOWN if not briefly and (self._busy or self._takes_little(kinds)) else GOOD_ENOUGH
        bearable = good * sum(seconds.values())
        taken = sum(run.all_seconds for kind in seconds for run in self._runs[kind][FEWEST_RUNS:])
        steps = MOST_STEPS if briefly else MOST_STEPS_BESIDE_OTHERS if self._busy else MOST_STEPS_OF_CURVES
        if hypot(*wrong.values()) <= bearable or taken > steps * sum(seconds.values()):
            return set()
        open_ones = [
            kind for kind in seconds.keys() - self._settled if errors[kind] > good and len(self._runs[kind]) < MOST_RUNS
        ]
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

    def _error_of_ways(self, kind: Hashable) -> float:
        """How well it is known how much longer the ways of a stage take, as a part of the stage's time."""
        seconds = self._seconds(kind)
        return error_of_ways(self._runs[kind]) / seconds if seconds else 0.0

    def _seconds(self, kind: Hashable) -> float:
        found = self.of(kind)[0]
        return found.forward_seconds + found.backward_seconds


def _error(runs: Sequence[StageRun]) -> float:
    """How well the time of a kind of stage is known from its runs, as a part of it."""
    totals = [run.total for run in runs]
    return error_of(totals) / least if (least := min(totals)) else 0.0
