"""Choose between keeping, recomputing and offloading within a limit: Lagrangian prices with a certified bound.

For a price λ of every byte moved, the persistent program solves the chain in which moved bytes take memory only in
their own operations (`priced`); no timetable of copies needs less. Each sequence found gets a timetable that fits, and
is simulated; the fastest wins. Copies take memory on their way, so sequences for slightly lower limits are tried too. A
price ignores how long copies wait for each other, so chains in which each stage can only move the most, or the least,
are tried too.

The bound (`lower_bound`) covers all steps that move. For any sequence within the limit, let C₁ be its compute seconds
up to the loss, C₂ those after it, and M the bytes that it moves. Copies out are over when the first operation after the
loss begins, and copies back begin after the loss. So with β bytes a second, a step takes at least

    T ≥ max(C₁, M / β_out) + max(C₂, M / β_in)
      = the most of  C₁ + C₂,  M / β_out + C₂,  C₁ + M / β_in,  M / β_out + M / β_in.

Every stage runs once before the loss, by one of its forwards: C₁ lies between `least` and `most`. The program's
certificate for the price λ says that C₁ + C₂ + λ M ≥ D(λ). So T is at least the height over M of each of the lines, for
all λ that were solved,

    D(λ) - λ M        D(λ) - λ M - most + M / β_out        least + M / β_in        M / β_out + M / β_in

and the seconds of storing everything: at least the lowest point of their upper envelope. Leaving out the memory of
copies on their way only lowers the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

from rotor_solver.chain import LARGEST_SIZE, Chain, Option, Stage
from rotor_solver.described_error import InfeasibleError, bytes_of_limit
from rotor_solver.moving.plan_moves import plan_moves
from rotor_solver.moving.transfers import Link, loss_position, simulate_moves, trips_of
from rotor_solver.persistent.recurrence import BRIEF, THOROUGH, Persistent
from rotor_solver.sequence import ForwardEnable, Moves, Operation, Sequence
from rotor_solver.simulate import simulate


def priced(chain: Chain, price: float) -> Chain:
    """Return `chain` with `price` more seconds for every byte that an option moves.

    A forward after the loss does not move: no copy goes out then. So these options cannot be used there.
    """
    return replace(chain, stages=tuple(_priced_stage(stage, price) for stage in chain.stages))


def _priced_stage(stage: Stage, price: float) -> Stage:
    if not any(option.moved for option in stage.options):
        return stage
    return replace(
        stage,
        options=tuple(_priced_option(option, price) for option in stage.options),
        # Their defaults come from the first option, which may have a price now.
        nograd_time=stage.seconds_without_graph,
        nograd_temp=stage.temp_without_graph,
    )


def _priced_option(option: Option, price: float) -> Option:
    if not option.moved:
        return option
    return replace(
        option,
        forward_time=option.forward_time + price * option.moved,
        forward_temp=option.forward_temp + option.moved,
        backward_temp=option.backward_temp + option.moved,
        replay_temp=LARGEST_SIZE,  # of a forward after the loss: more than any limit
        moved=0,
    )


class Line(NamedTuple):
    """`seconds` for no byte moved, and `slope` seconds more for every byte."""

    seconds: float
    slope: float

    def at(self, moved: float) -> float:
        """Seconds if `moved` bytes are moved."""
        return self.seconds + self.slope * moved


class Priced(NamedTuple):
    """`bound`: no sequence takes fewer seconds on the chain with this `price` for every byte."""

    price: float
    bound: float


def lower_bound(chain: Chain, link: Link, found: Iterable[Priced]) -> tuple[float, float]:
    """(bytes, seconds): every step within the limit takes at least `seconds`, and reaches that only with `bytes` moved.

    The bounds in `found` must be for that limit, or a higher one.
    """
    return lowest_point(list(_lines(chain, link, found)))


def lowest_point(lines: list[Line]) -> tuple[float, float]:
    """(bytes, seconds): the lowest point of the upper envelope of all lines, over zero bytes or more."""
    crossings = [0.0]
    for one, other in combinations(lines, 2):
        if one.slope != other.slope:
            crossings.append(max(0.0, (other.seconds - one.seconds) / (one.slope - other.slope)))
    return min(((moved, max(line.at(moved) for line in lines)) for moved in crossings), key=lambda point: point[1])


def _lines(chain: Chain, link: Link, found: Iterable[Priced]) -> Iterator[Line]:
    out, back = 1 / link.out_bytes_per_second, 1 / link.in_bytes_per_second
    forwards = [(stage.seconds_without_graph, *(o.forward_time for o in stage.options)) for stage in chain.stages]
    least, most = (sum(map(pick, forwards)) + chain.loss_time for pick in (min, max))
    yield Line(
        sum(min(o.forward_time + o.backward_time for o in stage.options) for stage in chain) + chain.loss_time, 0
    )
    yield Line(least, back)
    yield Line(0.0, out + back)
    for price, bound in found:
        yield Line(bound, -price)
        yield Line(bound - most, out - price)


_CLOSE = 0.005
"""A gap that is good enough, as in `persistent.program`."""
_NOT_FAR = 0.01
"""The same for chains in which less can move, which double the solve time. Not measured."""
_ENDS = (64.0, 2.0**-10)
"""First prices to try, the last one first, as multiples of the seconds of a byte's round trip. The last is so small
that it does not count, the first so high that no more moves than must. Not measured; wrong ends only cost solves."""
_PRICES = 12
"""Most prices to try; five or six are typical. Not measured; too few loosen the plan and the bound."""
_SAME = 1e-6
"""Prices with no larger relative difference are the same."""
_ROOMS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Room for copies on their way, as multiples of the most that a stage moves. Tried on chains of 40 to 70 stages: one
half to three multiples found the best plan, and those between them made it up to one percent faster."""


class MovingPlan(NamedTuple):
    """A sequence and its moves, the `seconds` of a step by them, and a certified lower bound for all such steps."""

    sequence: Sequence
    moves: Moves
    seconds: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """seconds / lower_bound - 1: the largest possible distance from the best plan."""
        return self.seconds / self.lower_bound - 1 if self.lower_bound else (math.inf if self.seconds else 0.0)


def solve_moving(chain: Chain, limit: float, link: Link, slots: int = 500) -> MovingPlan:
    """Return the fastest sequence found within `limit` bytes, a_0 counted, with its moves over `link`.

    It is no slower than the best one found without moves. The bound is for memory-persistent sequences whose copies
    keep the rules of Note [Moves]. Raises InfeasibleError, with the exact least limit, if even moving all that can move
    does not fit; ValueError if the limit is not a number of bytes.
    """
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
    bound: float = 0.0
    """Seconds; certified."""

    def explore(self, chain: Chain, room: int) -> None:
        """Solve `chain` for the prices that matter, with `room` bytes left for copies on their way.

        `chain` is the search's own, or one in which less can move. Prices matter near the lowest point of the bound.
        Two known sequences move more and less than that point; the price at which both are equally good finds one
        between them, or shows that there is none.
        """
        limit, found, known = self.limit - room, list[Priced](), list[tuple[int, float]]()
        # A bound for a lower limit certifies nothing, nor does one for fewer moves.
        certifies = room == 0 and chain is self.chain
        program = Persistent(self.slots, THOROUGH if certifies else BRIEF)
        with suppress(InfeasibleError):
            known.append(self.offer(program.solve(chain, limit)))
        prices = [part * self.link.seconds_per_byte for part in _ENDS]
        while prices:
            price = prices.pop()
            sequence = program.solve(priced(chain, price), limit)
            assert sequence.lower_bound is not None
            found.append(Priced(price, sequence.lower_bound))
            known.append(self.offer(sequence))
            moved, bound = lower_bound(self.chain, self.link, found)
            if certifies:
                self.bound = max(self.bound, bound)
            if self.plan().gap <= _CLOSE:
                return
            if not prices and len(found) < _PRICES:
                prices += _price_between(known, moved, [each.price for each in found])

    def offer(self, sequence: Sequence) -> tuple[int, float]:
        """Keep `sequence` if it is the fastest. Return the bytes that it may move, and its seconds without copies."""
        # A price is the same for all stages, so it does not choose among equal stages. A timetable does: the early
        # ones, which have the most time. So it may choose among all.
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
        bound = min(self.bound, seconds)  # a bound above the time of a real step could only be rounding
        return MovingPlan(Sequence(sequence, "moving", bound), moves, seconds, bound)


def moving_only(chain: Chain, pick: Callable[[Iterable[int]], int]) -> Chain:
    """Return `chain` with each stage's moves restricted to the size that `pick` chooses among its own."""
    return replace(chain, stages=tuple(_moving_only(stage, pick) for stage in chain))


def _moving_only(stage: Stage, pick: Callable[[Iterable[int]], int]) -> Stage:
    sizes = {option.moved for option in stage.options if option.moved}
    if len(sizes) < 2:
        return stage
    left = (0, pick(sizes))
    # The others stay, since sequences number them, and need more memory than any limit has.
    never = partial(replace, moved=0, forward_temp=LARGEST_SIZE)
    return replace(stage, options=tuple(each if each.moved in left else never(each) for each in stage.options))


def _price_between(known: list[tuple[int, float]], moved: float, tried: list[float]) -> list[float]:
    """The price at which the nearest `known` (bytes, seconds) that move more and less than `moved` are equal."""
    more = min((each for each in known if each[0] > moved), default=None)
    less = max((each for each in known if each[0] <= moved), default=None, key=lambda each: (each[0], -each[1]))
    if more is None or less is None or less[1] <= more[1]:
        return []
    price = (less[1] - more[1]) / (more[0] - less[0])
    return [] if any(math.isclose(price, each, rel_tol=_SAME) for each in tried) else [price]


def with_all_moves(chain: Chain, sequence: Sequence) -> Sequence:
    """Let every forward of `sequence` before the loss move all that it could move at no extra cost."""
    loss = loss_position(sequence)

    def moving(position: int, operation: Operation) -> Operation:
        if position > loss or not isinstance(operation, ForwardEnable):
            return operation
        options = chain.stages[operation.stage].options
        own = options[operation.option]
        alike = [k for k, each in enumerate(options) if each.moved > own.moved and _no_worse(each, own)]
        return ForwardEnable(operation.stage, max(alike, key=lambda k: options[k].moved, default=operation.option))

    return Sequence(moving(position, operation) for position, operation in enumerate(sequence))


def without_idle_moves(chain: Chain, sequence: Sequence, moves: Moves) -> Sequence:
    """Replace moving options of `sequence` where nothing is moved, if the others cost no more and keep no more."""
    moving, loss = moves.stages, loss_position(sequence)

    def settled(position: int, operation: Operation) -> Operation:
        if not isinstance(operation, ForwardEnable) or (position < loss and operation.stage in moving):
            return operation
        options = chain.stages[operation.stage].options
        idle = options[operation.option]
        alike = (k for k, each in enumerate(options) if idle.moved and not each.moved and _no_worse(each, idle))
        return ForwardEnable(operation.stage, next(alike, operation.option))

    return Sequence(settled(position, operation) for position, operation in enumerate(sequence))


def _no_worse(one: Option, other: Option) -> bool:
    costs = (
        (each.forward_time, each.backward_time, each.kept, each.forward_temp, each.backward_temp, replay)
        for each in (one, other)
        for replay in (each.backward_temp_of_replay,)
    )
    return all(ours <= theirs for ours, theirs in zip(*costs, strict=True))
