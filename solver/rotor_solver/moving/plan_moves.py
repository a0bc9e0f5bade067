"""Decide when to wait and when to fetch: as late and as early as memory allows.

For a given set of moving stages, both are greedy and optimal. Copies out end in the order in which they begin. So
before an operation, the shortest prefix of the queue that makes enough room must be over; waiting earlier gains
nothing. Copies back begin in the order of the backwards, and their bytes stay to the backward. So while the bytes of a
later one are in memory, those of an earlier one are there too or used up: beginning it as early as possible takes no
room from the later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from rotor_solver.chain import Chain
from rotor_solver.described_error import InfeasibleError
from rotor_solver.memory_timeline import moments
from rotor_solver.moving.transfers import Link, Trip, loss_position, trips_of
from rotor_solver.sequence import Moves, Sequence


def plan_moves(chain: Chain, sequence: Sequence, link: Link, limit: int) -> Moves:
    """Return moves of `sequence` with which a step stays within `limit` bytes, however slow the link.

    A stage does not move if that fits and takes no longer over `link`. Raises InfeasibleError if even moving all that
    can move, one at a time, needs more.
    """
    step = _Step.of(chain, sequence, link, limit)
    moving: list[Trip] = []
    best = step.timetable(moving)
    if best is None:
        moving = list(trips_of(chain, sequence))
        best = step.timetable(moving)
        if best is None:
            least = max(step.bytes_while_away(moving))
            raise InfeasibleError(
                f"the sequence needs {least} bytes, whatever it moves; the limit is {limit}",
                min_bytes=least,
                mem_limit=limit,
            )
    return _moves(step.fewest(moving, best), len(sequence))


class _Away(NamedTuple):
    """A trip, the operation that waits for its copy out, and the one right before which its copy back begins."""

    trip: Trip
    wait: int
    fetch: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Costs of a sequence's operations, by position, if nothing moves."""

    durations: tuple[float, ...]
    """Seconds."""
    during: tuple[int, ...]
    """Peak of each operation in bytes."""
    after_loss: int
    """Position of the first operation after the loss."""
    link: Link
    limit: int

    @classmethod
    def of(cls, chain: Chain, sequence: Sequence, link: Link, limit: int) -> _Step:
        found = moments(chain, sequence)
        durations, during = tuple(each.seconds for each in found), tuple(each.during for each in found)
        return cls(durations, during, loss_position(sequence) + 1, link, limit)

    def bytes_while_away(self, trips: Several[Trip]) -> list[int]:
        """By operation, the peak in bytes if moved bytes are in memory only in their own forward and backward."""
        change = [0] * (len(self.during) + 1)
        for trip in trips:
            change[trip.forward + 1] -= trip.moved
            change[trip.backward] += trip.moved
        return [most + away for most, away in zip(self.during, accumulate(change), strict=False)]

    def timetable(self, trips: Several[Trip]) -> list[_Away] | None:
        """Schedule these trips, given in the order of their forwards; None if that does not fit."""
        room = [self.limit - most for most in self.bytes_while_away(trips)]
        if min(room) < 0:
            return None
        leaves, waits = {trip.forward: trip for trip in trips}, {}
        pending, held = deque[Trip](), 0
        for position in range(self.after_loss):
            while held > room[position]:
                trip = pending.popleft()
                waits[trip], held = position, held - trip.moved
            if position in leaves:
                pending.append(leaves[position])
                held += leaves[position].moved
        found, earliest = [], self.after_loss
        for trip in sorted(trips, key=lambda each: each.backward):
            fetch = trip.backward
            while fetch > earliest and room[fetch - 1] >= trip.moved:
                fetch -= 1
                room[fetch] -= trip.moved
            earliest = fetch
            found.append(_Away(trip, waits.get(trip, self.after_loss), fetch))
        return found

    def fewest(self, trips: Several[Trip], timetable: list[_Away]) -> list[_Away]:
        """Return the timetable of a subset of `trips` that loses no time and cannot shrink; `timetable` has all."""
        moving, best, seconds = list(trips), timetable, self.seconds(timetable)
        untried = deque(reversed(moving))  # those nearest to the loss come back soonest, and are the hardest to hide
        refused: list[Trip] = []
        while untried:
            trip = untried.popleft()
            rest = [each for each in moving if each is not trip]
            without = self.timetable(rest)
            if without is None or (time := self.seconds(without)) > seconds:
                refused.append(trip)
                continue
            moving, best, seconds = rest, without, time
            # The link has less to carry now, so trips that were slow to keep may be quick.
            untried.extend(refused)
            refused.clear()
        return best

    def seconds(self, timetable: list[_Away]) -> float:
        """Seconds of the step by a timetable, whose trips are in the order of their backwards."""
        # Faster than `simulate_moves`, which has the last word, since the timetable is known to be valid.
        leaves = {away.trip.forward: away for away in timetable}
        returns = {away.trip.backward: away.trip for away in timetable}
        waits, fetches = dict[int, list[Trip]](), dict[int, list[Trip]]()
        for away in timetable:
            waits.setdefault(away.wait, []).append(away.trip)
            fetches.setdefault(away.fetch, []).append(away.trip)
        now = out_free = in_free = 0.0
        end: dict[Trip, float] = {}
        for position, duration in enumerate(self.durations):
            for trip in waits.get(position, ()):
                now = max(now, end[trip])
            for trip in fetches.get(position, ()):
                in_free = end[trip] = max(in_free, now) + trip.moved / self.link.in_bytes_per_second
            if position in returns:
                now = max(now, end[returns[position]])
            now += duration
            if position in leaves:
                trip = leaves[position].trip
                out_free = end[trip] = max(out_free, now) + trip.moved / self.link.out_bytes_per_second
        return now


def _moves(timetable: list[_Away], operations: int) -> Moves:
    wait_out: list[list[int]] = [[] for _ in range(operations)]
    fetch: list[list[int]] = [[] for _ in range(operations)]
    for away in timetable:
        fetch[away.fetch].append(away.trip.stage)
    for away in sorted(timetable, key=lambda each: each.trip.forward):
        wait_out[away.wait].append(away.trip.stage)
    return Moves(tuple(map(tuple, wait_out)), tuple(map(tuple, fetch)))
