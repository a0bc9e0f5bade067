"""Time the stages of a chain in rounds, until the time of a step is known well enough.

Other programs may slow the machine for a while, so a stage is not timed several times in a row, but once in each round.
Stages of equal signature share their times: one of them is timed in each round, in turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt

from rotor_profiling.stage.seconds import StageRun, StageSeconds, estimate
from rotor_profiling.timing import several_processes, spread

FEWEST_ROUNDS = 2
"""Least number of rounds. One of them times all storage modes of a stage, and one times it as an autograd node."""
MOST_ROUNDS = 32
WELL_KNOWN, CLOSELY = 0.02, 0.005
"""Relative error of a step's time at which rounds end. `CLOSELY` is for a limit chosen from the Pareto front: an error
of one percentage point in a plan's overhead of 20 % would change GPT-2's limit by 2 %."""
STEPS, STEPS_CLOSELY = 2.0, 24.0
"""Upper bounds of the time of further rounds, in multiples of a step's. Guesses: with 2, planning takes ten steps."""
LITTLE_SECONDS = 0.05
"""Seconds that further rounds may take in any case: times of short steps vary much, and users do not notice these."""
TOO_FAR = 0.10
"""Relative spread above which times from an earlier process are not used."""


class StageTimes:
    """Seconds of stages by signature (`kind`). `closely`: time until the smaller error `CLOSELY` is reached."""

    def __init__(self, *, closely: bool = False) -> None:
        self._known, self._steps = (CLOSELY, STEPS_CLOSELY) if closely else (WELL_KNOWN, STEPS)
        self._runs: dict[Hashable, list[StageRun]] = {}
        self._exact: set[Hashable] = set()

    def add(self, kind: Hashable, run: StageRun, *, exact: bool = False) -> None:
        """Add a timed run of a stage of this `kind`. `exact`: all runs would take equal seconds, so one suffices."""
        self._runs.setdefault(kind, []).append(run)
        if exact:
            self._exact.add(kind)

    def add_earlier(self, kind: Hashable, runs: Sequence[StageRun]) -> None:
        """Add runs that an earlier process timed, if their spread is so small that the machine was not busy then."""
        if spread([run.total for run in runs]) <= TOO_FAR:
            self._runs[kind] = list(runs)

    def runs_of(self, kind: Hashable) -> Sequence[StageRun]:
        return self._runs[kind]

    def of(self, kind: Hashable) -> list[StageSeconds]:
        return estimate(self._runs[kind])

    def spread(self, kinds: Sequence[Hashable]) -> float:
        """Return the mean relative spread of the times of a stage, over all stages, weighted by their seconds."""
        seconds = [self._seconds(kind) for kind in kinds]
        total = sum(seconds)
        spreads = (spread([run.total for run in self._runs[kind]]) for kind in kinds)
        return sum(each * share for each, share in zip(spreads, seconds, strict=True)) / total if total else 0.0

    def wanted(self, kinds: Sequence[Hashable]) -> set[int]:
        """Return the indices of the stages to time in the next round; none to end. `kinds`: the kind of every stage."""
        wanted = {kind for kind in kinds if self._missing(kind)} - self._exact
        # Several processes must run stages equally often, but measure different times: let them time no more rounds.
        if not wanted and not several_processes() and self._another_round(kinds):
            wanted = {*kinds} - self._exact
        return {self._turn(kind, kinds) for kind in wanted}

    def all_ways_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a `kind` must time all storage modes, not only the mode that stores everything."""
        return several_processes() or not self._runs.get(kind) or not self._missing(kind)

    def again_wanted(self, kind: Hashable) -> bool:
        """Whether the next run of a `kind` must also time it as an autograd node."""
        return several_processes() or not self._shows_node(kind) or not self._missing(kind)

    def _missing(self, kind: Hashable) -> bool:
        return len(self._runs.get(kind, ())) < FEWEST_ROUNDS or not self._shows_node(kind)

    def _shows_node(self, kind: Hashable) -> bool:
        return any(run.node is not None for run in self._runs.get(kind, ()))

    def _turn(self, kind: Hashable, kinds: Sequence[Hashable]) -> int:
        at = [position for position, each in enumerate(kinds) if each == kind]
        return at[len(self._runs.get(kind, ())) % len(at)]

    def _another_round(self, kinds: Sequence[Hashable]) -> bool:
        distinct = {*kinds}
        rounds = min(len(self._runs[kind]) for kind in distinct)
        # In FEWEST_ROUNDS rounds, some modes and the node are timed only once, so their error is unknown.
        known = rounds > FEWEST_ROUNDS and self.spread(kinds) <= self._known * sqrt(rounds)
        if known or rounds >= MOST_ROUNDS:
            return False
        forward = sum(min(run.ways[0][0] for run in self._runs[kind]) for kind in kinds)
        taken = sum(run.all_seconds for kind in distinct for run in self._runs[kind][FEWEST_ROUNDS:])
        taken += (rounds - FEWEST_ROUNDS) * forward
        one_more = forward + sum(map(self._seconds_of_round, distinct))
        return taken + one_more <= max(self._steps * sum(map(self._seconds, kinds)), LITTLE_SECONDS)

    def _seconds_of_round(self, kind: Hashable) -> float:
        runs = self._runs[kind]
        ways = max(sum(map(sum, run.ways)) for run in runs)
        return ways + max(sum(run.node) for run in runs if run.node is not None)

    def _seconds(self, kind: Hashable) -> float:
        found = self.of(kind)[0]
        return found.forward_seconds + found.backward_seconds
