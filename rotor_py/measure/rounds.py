"""How often stages are timed: round by round through the chain, until the time of a step is known well.

Other programs disturb a run for a while, and then not. So a stage is not timed several times in a row, but once in each
round, with other stages in between. Stages of one kind share their times, and are timed in turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt

from rotor_profiling.stage.seconds import StageRun, StageSeconds, estimate, spread_of
from rotor_profiling.timing import several_processes

FEWEST_ROUNDS = 2
"""In one of these, a stage is timed in all its ways, and in the other one as a node. Both take long."""
MOST_ROUNDS = 32
WELL_KNOWN, CLOSELY = 0.02, 0.005
"""Rounds end when the time of a step is known as well as this. A limit that is read off the curve of all plans needs
the second: GPT-2's moves by 2 % where a plan's overhead is wrong by a point of 20."""
STEPS, STEPS_CLOSELY = 2.0, 24.0
"""Rounds beyond the fewest take no more plain steps than this. Guesses: planning is to take ten steps at most."""
LITTLE_SECONDS = 0.05
"""What they may take in any case: steps of a few milliseconds are known badly, and nobody waits for so long."""
TOO_FAR = 0.10
"""Times of an earlier run are not used if they spread further than this."""


class StageTimes:
    """The runs of the stages of each kind, as far as they have been timed; `closely` for a limit read off the curve."""

    def __init__(self, *, closely: bool = False) -> None:
        self._known, self._steps = (CLOSELY, STEPS_CLOSELY) if closely else (WELL_KNOWN, STEPS)
        self._runs: dict[Hashable, list[StageRun]] = {}
        self._ways: dict[Hashable, int] = {}
        self._exact: set[Hashable] = set()

    def expect(self, kind: Hashable, ways: int) -> None:
        """Stages of this `kind` are stored in so many `ways`, the first of which is whole."""
        self._ways[kind] = ways

    def add(self, kind: Hashable, run: StageRun, *, exact: bool = False) -> None:
        """Add a run of a stage of this `kind`, the last one if times are `exact`."""
        self._runs.setdefault(kind, []).append(run)
        if exact:
            self._exact.add(kind)

    def add_earlier(self, kind: Hashable, runs: Sequence[StageRun]) -> None:
        """Add the runs that an earlier process has timed, unless the machine was busy."""
        if spread_of(runs) <= TOO_FAR:
            self._runs[kind] = list(runs)

    def runs_of(self, kind: Hashable) -> Sequence[StageRun]:
        """The runs of stages of a `kind`."""
        return self._runs[kind]

    def of(self, kind: Hashable) -> list[StageSeconds]:
        """The seconds of stages of a `kind`, in each way."""
        return estimate(self._runs[kind])

    def spread(self, kinds: Sequence[Hashable]) -> float:
        """How far the times of one kind of stage are apart, as a part of them: the mean of all, weighted by time."""
        seconds = [self._seconds(kind) for kind in kinds]
        total = sum(seconds)
        spreads = (spread_of(self._runs[kind]) for kind in kinds)
        return sum(each * share for each, share in zip(spreads, seconds, strict=True)) / total if total else 0.0

    def wanted(self, kinds: Sequence[Hashable]) -> set[int]:
        """The positions of the stages to time in the next round, one of each kind; `kinds` has that of every stage."""
        wanted = {kind for kind in kinds if self._missing(kind)} - self._exact
        # Processes that train together have to run equally often, and their clocks differ.
        if not wanted and not several_processes() and self._another_round(kinds):
            wanted = {*kinds} - self._exact
        return {self._turn(kind, kinds) for kind in wanted}

    def all_ways_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a stage of a `kind` is to time it in all ways, or stored whole alone."""
        return several_processes() or not self._shows_ways(kind) or not self._missing(kind)

    def again_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a stage of a `kind` is to time it as a node, too."""
        return several_processes() or not self._shows_node(kind) or not self._missing(kind)

    def _missing(self, kind: Hashable) -> bool:
        few = len(self._runs.get(kind, ())) < FEWEST_ROUNDS
        return few or not self._shows_ways(kind) or not self._shows_node(kind)

    def _shows_ways(self, kind: Hashable) -> bool:
        return any(len(run.ways) >= self._ways.get(kind, 1) for run in self._runs.get(kind, ()))

    def _shows_node(self, kind: Hashable) -> bool:
        return any(run.node is not None for run in self._runs.get(kind, ()))

    def _turn(self, kind: Hashable, kinds: Sequence[Hashable]) -> int:
        """The position of the stage of a `kind` that is timed next."""
        at = [position for position, each in enumerate(kinds) if each == kind]
        return at[len(self._runs.get(kind, ())) % len(at)]

    def _another_round(self, kinds: Sequence[Hashable]) -> bool:
        """Whether the time of a step is not known well enough yet, and there is time for one more round."""
        distinct = {*kinds}
        rounds = min(len(self._runs[kind]) for kind in distinct)
        # The fewest rounds show ways and nodes once each. Nobody knows how well.
        known = rounds > FEWEST_ROUNDS and self.spread(kinds) <= self._known * sqrt(rounds)
        if known or rounds >= MOST_ROUNDS:
            return False
        forward = sum(min(run.ways[0][0] for run in self._runs[kind]) for kind in kinds)
        taken = sum(run.all_seconds for kind in distinct for run in self._runs[kind][FEWEST_ROUNDS:])
        taken += (rounds - FEWEST_ROUNDS) * forward
        one_more = forward + sum(map(self._seconds_of_round, distinct))
        return taken + one_more <= max(self._steps * sum(map(self._seconds, kinds)), LITTLE_SECONDS)

    def _seconds_of_round(self, kind: Hashable) -> float:
        """The seconds of a run in all ways, and as a node."""
        runs = self._runs[kind]
        ways = max(sum(map(sum, run.ways)) for run in runs)
        return ways + max(sum(run.node) for run in runs if run.node is not None)

    def _seconds(self, kind: Hashable) -> float:
        found = self.of(kind)[0]
        return found.forward_seconds + found.backward_seconds
