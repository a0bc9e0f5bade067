"""Choose between keeping, recomputing and offloading within a limit: Lagrangian prices with a proven lower bound.

For a price λ in seconds per moved byte, `Persistent` solves a chain in which moved bytes take memory only during their
stage's forward and backward (`priced`), which is the least that any plan with offloading needs. Each sequence found
gets the times of its copies (`plan_moves`), and is simulated; the fastest is returned. Two variations are tried, too:
lower limits, since copies in progress take memory; and chains in which a stage that offloads has to offload the most
bytes that it can, or the fewest, since the price ignores that copies queue for the link.

The bound (`lower_bound`): let C₁ be the compute seconds of a sequence up to the loss, C₂ those after it, and M the
bytes that it moves, out before and back after the loss (Note [Moves] at `sequence.Moves`). With β bytes a second, a
step takes T seconds:

    T ≥ max(C₁, M / β_out) + max(C₂, M / β_in)
      = the most of  C₁ + C₂,  M / β_out + C₂,  C₁ + M / β_in,  M / β_out + M / β_in.

C₁ lies between `least` and `most`, sums of the shortest and longest forwards of all stages. `Persistent` has proven
that C₁ + C₂ + λ M ≥ D(λ), its bound. So a plan that moves M bytes takes at least the highest of these lines, for all λ
solved, and of the seconds of storing everything. The bound is the lowest such value over all M:

    D(λ) - λ M        D(λ) - λ M - most + M / β_out        least + M / β_in        M / β_out + M / β_in
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations
from typing import NamedTuple

from rotor_solver.chain import LARGEST_SIZE, Chain, Option, Stage, check_chain
from rotor_solver.described_error import InfeasibleError, bytes_of_limit, check_fits
from rotor_solver.memory_timeline import moments
from rotor_solver.persistent.recurrence import BRIEF, THOROUGH, Persistent
from rotor_solver.sequence import ForwardEnable, Loss, Moves, Sequence
from rotor_solver.simulate import simulate
from rotor_solver.transfers import (
    CopyQueues,
    Link,
    MovesSimulation,
    Transfer,
    Trip,
    check_link,
    simulate_moves,
    timed_moments,
    transfers,
    trips_of,
)

__all__ = [
    "Link",
    "Moves",
    "MovesSimulation",
    "MovingPlan",
    "Transfer",
    "plan_moves",
    "simulate_moves",
    "solve_moving",
    "timed_moments",
    "transfers",
]


def priced(chain: Chain, price: float) -> Chain:
    """Return `chain` with `price` more seconds per moved byte. Forbids options that move bytes after the loss."""
    stages: list[Stage] = []
    for stage in chain.stages:
        options = [
            replace(
                option,
                forward_time=option.forward_time + price * option.moved,
                forward_temp=option.forward_temp + option.moved,
                backward_temp=option.backward_temp + option.moved,
                replay_temp=LARGEST_SIZE,  # more than any limit: forbids the option after the loss
                moved=0,
            )
            if option.moved
            else option
            for option in stage.options
        ]
        # Set both costs without a graph, since they default to the first option's, which may now include the price.
        nograd_time, nograd_temp = stage.seconds_without_graph, stage.temp_without_graph
        stages.append(replace(stage, options=tuple(options), nograd_time=nograd_time, nograd_temp=nograd_temp))
    return replace(chain, stages=tuple(stages))


def lower_bound(chain: Chain, link: Link, found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return (moved bytes, seconds), the bound and where it is reached; `found`: (price, D(price)) of priced chains."""
    out, back = 1 / link.out_bytes_per_second, 1 / link.in_bytes_per_second
    forwards = [(stage.seconds_without_graph, *(o.forward_time for o in stage.options)) for stage in chain.stages]
    least, most = (sum(map(pick, forwards)) + chain.loss_time for pick in (min, max))
    stored = sum(min(o.forward_time + o.backward_time for o in stage.options) for stage in chain) + chain.loss_time
    lines = [(stored, 0.0), (least, back), (0.0, out + back)]  # (seconds, slope): a bound is seconds + slope · bytes
    for price, bound in found:
        lines += [(bound, -price), (bound - most, out - price)]
    crossings = [0.0]
    for (one, slope), (other, another) in combinations(lines, 2):
        if slope != another:
            crossings.append(max(0.0, (other - one) / (slope - another)))
    # The highest line is lowest where two lines cross, or without moved bytes.
    points = ((moved, max(seconds + slope * moved for seconds, slope in lines)) for moved in crossings)
    return min(points, key=lambda point: point[1])


_CLOSE = 0.005  # Gap of a plan, as a share, at which the search ends: stage times err by more
_NOT_FAR = 0.01  # Gap above which chains with fewer possible moves are tried, too: twice the time. Not measured.
# First prices to try, as multiples of a byte's round-trip seconds, the last one first: one is negligible, the other so
# high that only unavoidable moves remain. Not measured; wrong ones only cost solves.
_ENDS = (64.0, 2.0**-10)
_PRICES = 12  # Upper bound of the number of prices to try; five or six are typical. Not measured; too few slow plans.
_SAME = 1e-6  # Relative difference up to which two prices count as equal, so that no price is solved twice
# Bytes left free for copies in progress, as multiples of the most bytes that a stage moves. On chains of 40 to 70
# stages, the best plan had between half and three; the values in between made it up to one percent faster.
_ROOMS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


class MovingPlan(NamedTuple):
    """A sequence, its moves, the `seconds` of a step with both, and a proven lower bound of all plans' seconds."""

    sequence: Sequence
    moves: Moves
    seconds: float
    lower_bound: float

    @property
    def gap(self) -> float:
        return self.seconds / self.lower_bound - 1 if self.lower_bound else (math.inf if self.seconds else 0.0)


def solve_moving(chain: Chain, limit: float, link: Link, slots: int = 500) -> MovingPlan:
    """Return the fastest plan found within `limit` bytes, chain input included: a sequence and its copies over `link`.

    It is no slower than the fastest sequence found without moves. The bound holds for memory-persistent sequences whose
    copies obey Note [Moves]. Raises InfeasibleError, with the exact least limit, if even moving as much as possible
    does not fit; ValueError if the limit is not a number of bytes.
    """
    check_chain(chain)
    check_link(link)
    search = _Search(chain, bytes_of_limit(limit), link, slots)
    search.explore(chain, 0)
    largest = max((option.moved for stage in chain for option in stage.options), default=0)
    rooms = [int(part * largest) for part in _ROOMS if part * largest < search.limit]
    narrower = [each for each in (moving_only(chain, max), moving_only(chain, min)) if each != chain]
    further = [(chain, room, _CLOSE) for room in rooms]
    further += [(each, room, _NOT_FAR) for each in narrower for room in (0, *rooms)]
    for each, room, good_enough in further:
        if search.plan().gap > good_enough:
            with suppress(InfeasibleError):
                search.explore(each, room)
    return search.plan()


@dataclass(slots=True)
class _Search:
    chain: Chain
    limit: int
    link: Link
    slots: int
    best: tuple[Sequence, Moves, float] | None = None
    bound: float = 0.0  # Lower bound in seconds, proven

    def explore(self, chain: Chain, room: int) -> None:
        """Solve `chain` for prices ever nearer to the one that decides the bound, with `room` bytes left for copies."""
        limit, found, known = self.limit - room, list[tuple[float, float]](), list[tuple[int, float]]()
        # A bound proven for a lower limit, or for fewer possible moves, does not hold for all plans within the limit.
        certifies = room == 0 and chain is self.chain
        program = Persistent(self.slots, THOROUGH if certifies else BRIEF, work=0)
        with suppress(InfeasibleError):
            known.append(self.offer(program.solve(chain, limit)))
        prices = [part * self.link.seconds_per_byte for part in _ENDS]
        while prices:
            price = prices.pop()
            sequence = program.solve(priced(chain, price), limit)
            found.append((price, sequence.lower_bound or 0.0))
            known.append(self.offer(sequence))
            moved, bound = lower_bound(self.chain, self.link, found)
            if certifies:
                self.bound = max(self.bound, bound)
            if self.plan().gap <= _CLOSE:
                return
            if not prices and len(found) < _PRICES:
                prices += _price_between(known, moved, [each for each, _ in found])

    def offer(self, sequence: Sequence) -> tuple[int, float]:
        """Keep `sequence` if it is the fastest so far. Return the bytes it may move, and its seconds without copies."""
        # The solver may move any of several equal stages; of all of them, `plan_moves` keeps those with time to copy.
        for each in dict.fromkeys((sequence, with_all_moves(self.chain, sequence))):
            moves = plan_moves(self.chain, each, self.link, self.limit)
            settled = without_idle_moves(self.chain, each, moves)
            seconds = simulate_moves(self.chain, settled, moves, self.link).makespan
            if self.best is None or seconds < self.best[2]:
                self.best = (settled, moves, seconds)
        return sum(trip.moved for trip in trips_of(self.chain, sequence)), simulate(self.chain, sequence).makespan

    def plan(self) -> MovingPlan:
        assert self.best is not None
        sequence, moves, seconds = self.best
        bound = min(self.bound, seconds)  # the bound can exceed a plan's seconds only by rounding errors
        return MovingPlan(Sequence(sequence, "moving", bound), moves, seconds, bound)


def moving_only(chain: Chain, pick: Callable[[Iterable[int]], int]) -> Chain:
    """Return `chain` with only the options that move no bytes, or the most (or fewest, by `pick`) of their stage."""
    # The others stay in the list, since sequences have the indices of options, but now need more than any limit.
    never = partial(replace, moved=0, forward_temp=LARGEST_SIZE)
    stages: list[Stage] = []
    for stage in chain:
        sizes = {option.moved for option in stage.options if option.moved}
        allowed = {0, pick(sizes or {0})}
        options = (each if each.moved in allowed else never(each) for each in stage.options)
        stages.append(replace(stage, options=tuple(options)))
    return replace(chain, stages=tuple(stages))


def _price_between(known: list[tuple[int, float]], moved: float, tried: list[float]) -> list[float]:
    """Return [price] at which the two `known` (moved bytes, seconds) around `moved` cost the same, or [] if tried."""
    more = min((each for each in known if each[0] > moved), default=None)
    less = max((each for each in known if each[0] <= moved), default=None, key=lambda each: (each[0], -each[1]))
    if more is None or less is None or less[1] <= more[1]:
        return []
    price = (less[1] - more[1]) / (more[0] - less[0])
    return [] if any(math.isclose(price, each, rel_tol=_SAME) for each in tried) else [price]


def with_all_moves(chain: Chain, sequence: Sequence) -> Sequence:
    """Let every forward before the loss use the option that moves the most bytes and costs no more than its own."""
    operations, loss = list(sequence), sequence.index(Loss())
    for position, operation, options, own in _enabled(chain, sequence):
        alike = [k for k, each in enumerate(options) if each.moved > own.moved and _no_worse(each, own)]
        if position < loss and alike:
            operations[position] = replace(operation, option=max(alike, key=lambda k: options[k].moved))
    return Sequence(operations)


def without_idle_moves(chain: Chain, sequence: Sequence, moves: Moves) -> Sequence:
    """Where a stage does not move, replace an option with `moved` bytes by one without that costs and keeps no more."""
    operations, moving, loss = list(sequence), moves.stages, sequence.index(Loss())
    for position, operation, options, own in _enabled(chain, sequence):
        alike = [k for k, each in enumerate(options) if own.moved and not each.moved and _no_worse(each, own)]
        if alike and not (position < loss and operation.stage in moving):
            operations[position] = replace(operation, option=alike[0])
    return Sequence(operations)


def _enabled(chain: Chain, sequence: Sequence) -> Iterator[tuple[int, ForwardEnable, tuple[Option, ...], Option]]:
    for position, operation in enumerate(sequence):
        if isinstance(operation, ForwardEnable):
            options = chain.stages[operation.stage].options
            yield position, operation, options, options[operation.option]


def _no_worse(one: Option, other: Option) -> bool:
    names = ("forward_time", "backward_time", "kept", "forward_temp", "backward_temp", "backward_temp_of_replay")
    return all(getattr(one, name) <= getattr(other, name) for name in names)


def plan_moves(chain: Chain, sequence: Sequence, link: Link, limit: int) -> Moves:
    """Return moves of `sequence` with which a step stays within `limit` bytes, however slow the link.

    Operations wait for copies out as late, and copies back begin as early, as memory allows: optimal for given stages.
    Copies out end in the order in which they begin, and copies back begin in the order of the backwards that need them.
    A stage does not move if the step fits without and takes no longer over `link`. Raises InfeasibleError if even
    moving as much as possible does not fit.
    """
    check_link(link)
    step = _TimedSequence(chain, sequence, link, bytes_of_limit(limit))
    moving: list[Trip] = []
    moves = step.timetable(moving)
    if moves is None:
        moving = list(trips_of(chain, sequence))
        check_fits("the sequence, whatever it moves, needs", max(step.bytes_while_away(moving)), limit)
        moves = step.timetable(moving)
        assert moves is not None
    return step.fewest(moving, moves)


class _TimedSequence:
    """Seconds and peak bytes of a sequence's operations without moves, by position, and the search for its `Moves`."""

    def __init__(self, chain: Chain, sequence: Sequence, link: Link, limit: int) -> None:
        found = moments(chain, sequence)
        self.durations, self.during = [each.seconds for each in found], [each.during for each in found]
        self.after_loss = sequence.index(Loss()) + 1  # Position of the first operation after the loss
        self.link, self.limit = link, limit

    def bytes_while_away(self, trips: Several[Trip]) -> list[int]:
        """Return each operation's peak if the bytes of `trips` are in memory only in their forward and backward."""
        change = [0] * (len(self.during) + 1)
        for trip in trips:
            change[trip.forward + 1] -= trip.moved
            change[trip.backward] += trip.moved
        return [most + away for most, away in zip(self.during, accumulate(change), strict=False)]

    def timetable(self, trips: Several[Trip]) -> Moves | None:
        """Return moves for `trips`, which are in the order of their forwards; None if none fit in the limit."""
        room = [self.limit - most for most in self.bytes_while_away(trips)]
        if min(room) < 0:
            return None
        wait_out: list[list[int]] = [[] for _ in room]
        fetch: list[list[int]] = [[] for _ in room]
        begins = {trip.forward: trip for trip in trips}
        pending, held = deque[Trip](), 0
        for position in range(self.after_loss):
            while held > room[position]:
                trip = pending.popleft()
                wait_out[position].append(trip.stage)
                held -= trip.moved
            if position in begins:
                pending.append(begins[position])
                held += begins[position].moved
        if pending:
            wait_out[self.after_loss] = [trip.stage for trip in pending]
        earliest = self.after_loss
        for trip in sorted(trips, key=lambda each: each.backward):
            begin = trip.backward
            while begin > earliest and room[begin - 1] >= trip.moved:
                begin -= 1
                room[begin] -= trip.moved
            earliest = begin
            fetch[begin].append(trip.stage)
        return Moves(tuple(map(tuple, wait_out)), tuple(map(tuple, fetch)))

    def fewest(self, trips: Several[Trip], moves: Moves) -> Moves:
        """Return moves for `trips` except those without which a step fits and takes no longer; `moves` has them all."""
        moving, best, seconds = list(trips), moves, self.seconds(trips, moves)
        untried = deque(reversed(moving))  # late trips first, since their copies have the least time before the loss
        refused: list[Trip] = []
        while untried:
            trip = untried.popleft()
            rest = [each for each in moving if each is not trip]
            without = self.timetable(rest)
            if without is None or (time := self.seconds(rest, without)) > seconds:
                refused.append(trip)
                continue
            moving, best, seconds = rest, without, time
            # The link carries less now, so leaving out a refused trip may no longer cost time.
            untried.extend(refused)
            refused.clear()
        return best

    def seconds(self, trips: Several[Trip], moves: Moves) -> float:
        copies = CopyQueues(trips, moves, self.link)
        for position, duration in enumerate(self.durations):
            copies.begin(position)
            copies.run(position, duration)
        return copies.now
