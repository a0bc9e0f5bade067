"""Simulate the copies of a step with offloading, and how long operations wait for them.

The simulator has one queue of operations, and a queue of copies for each direction of the link to host memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rotor_solver.chain import Chain
from rotor_solver.described_error import InvalidValueError, check_type, is_number
from rotor_solver.memory_timeline import Moment, moments
from rotor_solver.sequence import Backward, ForwardEnable, Loss, Moves, Sequence, check_sequence
from rotor_solver.simulate import Machine, simulate


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth to and from host memory in bytes per second, each while the other direction is busy, too.

    Raises ValueError if a rate is not finite and above zero.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "in_bytes_per_second"):
            rate = getattr(self, name)
            if not is_number(rate) or not 0 < rate < math.inf:
                raise InvalidValueError(f"{name} must be finite and > 0, got {rate!r}", kind="not_a_rate", name=name)

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.out_bytes_per_second + 1 / self.in_bytes_per_second

    @classmethod
    def slowest(cls, links: Iterable[Link]) -> Link:
        out, back = zip(*((link.out_bytes_per_second, link.in_bytes_per_second) for link in links), strict=True)
        return cls(min(out), min(back))


def check_link(link: Any) -> None:
    check_type(link, Link, "link", "pass Link(out_bytes_per_second, in_bytes_per_second)")


@dataclass(frozen=True, slots=True)
class Trip:
    """`moved` bytes of a stage that may be offloaded between its operations at positions `forward` and `backward`."""

    stage: int
    moved: int
    forward: int
    backward: int


def trips_of(chain: Chain, sequence: Sequence) -> tuple[Trip, ...]:
    """Return a trip for each forward before the loss whose option has `moved` bytes, in order, of a valid sequence."""
    before = sequence.operations[: sequence.index(Loss())]
    backward = {each.stage: place for place, each in enumerate(sequence) if isinstance(each, Backward)}
    enabled = [(position, each) for position, each in enumerate(before) if isinstance(each, ForwardEnable)]
    moved = [chain.stages[each.stage].options[each.option].moved for _, each in enabled]
    trips = (Trip(each.stage, size, at, backward[each.stage]) for (at, each), size in zip(enabled, moved, strict=True))
    return tuple(trip for trip in trips if trip.moved)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of `moved` bytes of a stage, out or back, from `begin` to `end`, in seconds of the step."""

    stage: int
    moved: int
    out: bool
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class MovesSimulation:
    """Seconds and bytes of a step. `begin` has the second at which each operation begins, `during` its peak in bytes.

    `waiting` is the seconds in which operations wait for copies; `makespan` includes them. `moved` bytes go out, and
    as many come back. If a copy out is under way when an operation begins, its bytes count during all of the operation.
    `transfers` are all copies, in the order in which they enter a queue.
    """

    makespan: float
    peak: int
    begin: tuple[float, ...]
    during: tuple[int, ...]
    waiting: float
    moved: int
    transfers: tuple[Transfer, ...]


def simulate_moves(chain: Chain, sequence: Sequence, moves: Moves, link: Link) -> MovesSimulation:
    """Return the time and memory of `sequence` on `chain`, like `simulate`, with the copies `moves` over `link`.

    Raises ValueError for a sequence that is not valid, and for moves that break a rule of Note [Moves].
    """
    check_sequence(sequence)
    check_type(moves, Moves, "moves", "take those of plan_moves")
    check_link(link)
    simulate(chain, sequence)  # raises ValueError, naming the operation, if the sequence is not valid
    trips = _checked_trips(chain, sequence, moves)
    machine, copies = Machine(chain, sequence), CopyQueues(trips, moves, link)
    outgoing = deque(trip.stage for trip in trips)
    begin, during = [], []
    for position in range(len(sequence)):
        begin.append(copies.begin(position))
        while outgoing and copies.out_end.get(outgoing[0], math.inf) <= copies.now:
            machine.move_out(outgoing.popleft())
        for stage in moves.fetch[position]:
            machine.move_in(stage)
        before = machine.seconds
        during.append(machine.run(position))
        copies.run(position, machine.seconds - before)
    peak = max([chain.input_bytes, *during])
    times = tuple(begin), tuple(during), copies.waiting
    return MovesSimulation(copies.now, peak, *times, sum(trip.moved for trip in trips), tuple(copies.transfers))


class CopyQueues:
    """The clock of a step, and the queue of copies in each direction, for `trips` in the order of their forwards."""

    def __init__(self, trips: Iterable[Trip], moves: Moves, link: Link) -> None:
        self.now = self.waiting = self._out_free = self._in_free = 0.0
        self.out_end: dict[int, float] = {}  # By stage, the second at which its copy out ends
        self.transfers: list[Transfer] = []
        self._in_end: dict[int, float] = {}
        self._trips = {trip.stage: trip for trip in trips}
        self._leaving = {trip.forward: trip for trip in self._trips.values()}
        self._arriving = {trip.backward: trip for trip in self._trips.values()}
        self._moves, self._link = moves, link

    def begin(self, position: int) -> float:
        """Wait for copies out, begin copies back, wait for the operation's own; return the second of its begin."""
        for stage in self._moves.wait_out[position]:
            self._wait(self.out_end[stage])
        for stage in self._moves.fetch[position]:
            self._in_free = self._copy(self._trips[stage], False, self._in_free, self._link.in_bytes_per_second)
            self._in_end[stage] = self._in_free
        if position in self._arriving:
            self._wait(self._in_end[self._arriving[position].stage])
        return self.now

    def run(self, position: int, seconds: float) -> None:
        """Let `seconds` pass for the operation; then queue its copy out, if its stage moves."""
        self.now += seconds
        if position in self._leaving:
            trip = self._leaving[position]
            self._out_free = self._copy(trip, True, self._out_free, self._link.out_bytes_per_second)
            self.out_end[trip.stage] = self._out_free

    def _wait(self, until: float) -> None:
        self.waiting += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _copy(self, trip: Trip, out: bool, free: float, rate: float) -> float:
        begin = max(free, self.now)
        end = begin + trip.moved / rate
        self.transfers.append(Transfer(trip.stage, trip.moved, out, begin, end))
        return end


def _checked_trips(chain: Chain, sequence: Sequence, moves: Moves) -> list[Trip]:
    """Return the trips that `moves` makes, by forward. Raises ValueError for moves that violate Note [Moves]."""
    if not len(moves.wait_out) == len(moves.fetch) == len(sequence):
        got = f"{len(moves.wait_out)} in wait_out and {len(moves.fetch)} in fetch"
        message = f"moves must have an entry for each of {len(sequence)} operations, got {got}"
        numbers = {"got": len(moves.wait_out), "needs": len(sequence)}
        raise InvalidValueError(message, kind="wrong_length", name="moves", **numbers)
    possible = {trip.stage: trip for trip in trips_of(chain, sequence)}
    loss = sequence.index(Loss())
    waited: set[int] = set()
    for position, stages in enumerate(moves.wait_out):
        for stage in stages:
            if stage not in possible or stage in waited or not possible[stage].forward < position <= loss + 1:
                text = "moves must wait for a copy out once, after its forward, at the latest right after the loss"
                raise _wrong_move(text, "wrong_wait", stage, position)
            waited.add(stage)
    fetched: set[int] = set()
    for position, stages in enumerate(moves.fetch):
        for stage in stages:
            if stage not in waited or stage in fetched or not loss < position <= possible[stage].backward:
                text = "moves must fetch a stage once, after the loss and its copy out, and before its backward"
                raise _wrong_move(text, "wrong_fetch", stage, position)
            fetched.add(stage)
    if missing := waited - fetched:
        message = f"moves must fetch every stage that is copied out; stages {sorted(missing)} are not fetched"
        raise InvalidValueError(message, kind="not_fetched", stage=min(missing))
    return [trip for trip in possible.values() if trip.stage in fetched]


def _wrong_move(text: str, kind: str, stage: int, position: int) -> InvalidValueError:
    message = f"{text}; got stage {stage} before operation {position}"
    return InvalidValueError(message, kind=kind, stage=stage, position=position)


def timed_moments(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Moment, ...]:
    """Return `moments`, with begins delayed by waits for copies over `link`. Raises ValueError as `simulate_moves`."""
    found = moments(chain, sequence)
    if link is None or sequence.moves is None:
        return found
    begins = simulate_moves(chain, sequence, sequence.moves, link).begin
    return tuple(replace(moment, begin=begin) for moment, begin in zip(found, begins, strict=True))


def transfers(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Transfer, ...]:
    """Return all copies of a step over `link`, none without link or moves. Raises ValueError as `simulate_moves`."""
    check_sequence(sequence)
    if link is None or sequence.moves is None:
        return ()
    return simulate_moves(chain, sequence, sequence.moves, link).transfers
