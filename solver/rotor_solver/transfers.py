"""Simulate the copies of a step: the link, the trips that a sequence allows, and their times.

The simulator has one queue of operations, and a queue of copies for each direction of the link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rotor_solver.chain import Chain
from rotor_solver.described_error import InvalidValueError
from rotor_solver.memory_timeline import Moment, moments
from rotor_solver.sequence import Backward, ForwardEnable, Loss, Moves, Sequence
from rotor_solver.simulate import Machine, simulate


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second in each direction, while both are busy. The two directions do not wait for each other.

    Raises ValueError if a rate is not finite and above zero.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "in_bytes_per_second"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise InvalidValueError(
                    f"{name} is {rate!r}; it has to be a finite number of bytes, above zero",
                    kind="not_a_rate",
                    name=name,
                )

    @property
    def seconds_per_byte(self) -> float:
        """Seconds of a byte's round trip."""
        return 1 / self.out_bytes_per_second + 1 / self.in_bytes_per_second

    @classmethod
    def slowest(cls, links: Iterable[Link]) -> Link:
        """Return a link with the slowest rate of `links` in each direction."""
        out, back = zip(*((link.out_bytes_per_second, link.in_bytes_per_second) for link in links), strict=True)
        return cls(min(out), min(back))


@dataclass(frozen=True, slots=True)
class Trip:
    """`moved` bytes of a stage, from position `forward` of a sequence, which makes them, to `backward`."""

    stage: int
    moved: int
    forward: int
    backward: int


def loss_position(sequence: Sequence) -> int:
    """Return the position of the loss. Raises ValueError if there is none."""
    if Loss() not in sequence.operations:
        raise InvalidValueError(
            f"the sequence of {len(sequence)} operations has no loss", kind="no_loss", name="sequence"
        )
    return sequence.operations.index(Loss())


def trips_of(chain: Chain, sequence: Sequence) -> tuple[Trip, ...]:
    """Return all trips of a valid sequence, in the order of the forwards. A forward after the loss moves nothing."""
    before = sequence.operations[: loss_position(sequence)]
    backward = {each.stage: place for place, each in enumerate(sequence) if isinstance(each, Backward)}
    found = []
    for position, operation in enumerate(before):
        if isinstance(operation, ForwardEnable):
            moved = chain.stages[operation.stage].options[operation.option].moved
            if moved:
                found.append(Trip(operation.stage, moved, position, backward[operation.stage]))
    return tuple(found)


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
    """Seconds and bytes of a step. `begin` and `during` are by operation: its begin, and its peak in bytes.

    `waiting` are the seconds in which operations wait for copies; `makespan` includes them. `moved` bytes go out, and
    as many come back. A copy out that is under way when an operation begins counts during all of it. `transfers` are
    all copies, in the order of their requests.
    """

    makespan: float
    peak: int
    begin: tuple[float, ...]
    during: tuple[int, ...]
    waiting: float
    moved: int
    transfers: tuple[Transfer, ...]


def simulate_moves(chain: Chain, sequence: Sequence, moves: Moves, link: Link) -> MovesSimulation:
    """Run `sequence` on `chain` with `moves` over `link`. Equals `simulate` if nothing moves.

    Raises ValueError for a sequence that is not valid, and for moves that break a rule of Note [Moves].
    """
    simulate(chain, sequence)  # for its errors, which name the operation
    trips = _checked_trips(chain, sequence, moves)
    copies = _Copies(Machine(chain, sequence), trips, link)
    begin, during = [], []
    arriving = {trip.backward: stage for stage, trip in trips.items()}
    leaving = {trip.forward: stage for stage, trip in trips.items()}
    for position in range(len(sequence)):
        for stage in moves.wait_out[position]:
            copies.wait(copies.out_end[stage])
        for stage in moves.fetch[position]:
            copies.fetch(stage)
        if position in arriving:
            copies.wait(copies.in_end[arriving[position]])
        begin.append(copies.now)
        during.append(copies.run(position))
        if position in leaving:
            copies.send(leaving[position])
    moved = sum(trip.moved for trip in trips.values())
    peak = max([chain.input_bytes, *during])
    times = tuple(begin), tuple(during), copies.waiting
    return MovesSimulation(copies.now, peak, *times, moved, tuple(copies.transfers))


@dataclass(slots=True)
class _Copies:
    """The queues of operations and of copies in each direction, as far as a step has come."""

    machine: Machine
    trips: Mapping[int, Trip]
    link: Link
    now: float = 0.0
    waiting: float = 0.0
    out_end: dict[int, float] = field(default_factory=dict)
    in_end: dict[int, float] = field(default_factory=dict)
    out_free: float = 0.0
    in_free: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)  # Stages whose copy out is not over, in the order of the queue

    def wait(self, until: float) -> None:
        self.waiting += max(0.0, until - self.now)
        self.now = max(self.now, until)
        while self.pending and self.out_end[self.pending[0]] <= self.now:
            self.machine.move_out(self.pending.popleft())

    def send(self, stage: int) -> None:
        begin, moved = max(self.out_free, self.now), self.trips[stage].moved
        self.out_end[stage] = self.out_free = begin + moved / self.link.out_bytes_per_second
        self.transfers.append(Transfer(stage, moved, True, begin, self.out_free))
        self.pending.append(stage)

    def fetch(self, stage: int) -> None:
        begin, moved = max(self.in_free, self.now), self.trips[stage].moved
        self.in_end[stage] = self.in_free = begin + moved / self.link.in_bytes_per_second
        self.transfers.append(Transfer(stage, moved, False, begin, self.in_free))
        self.machine.move_in(stage)

    def run(self, position: int) -> int:
        self.wait(self.now)  # copies that are over by now have freed their bytes
        before = self.machine.seconds
        most = self.machine.run(position)
        self.now += self.machine.seconds - before
        return most


def _checked_trips(chain: Chain, sequence: Sequence, moves: Moves) -> dict[int, Trip]:
    """Return the trips of `moves` by stage. Raises ValueError for moves that break a rule."""
    if not len(moves.wait_out) == len(moves.fetch) == len(sequence):
        raise InvalidValueError(
            f"the moves are for {len(moves.wait_out)} and {len(moves.fetch)} operations; the sequence has "
            f"{len(sequence)}",
            kind="wrong_length",
            name="moves",
            got=len(moves.wait_out),
            needs=len(sequence),
        )
    possible = {trip.stage: trip for trip in trips_of(chain, sequence)}
    loss = loss_position(sequence)
    waited: dict[int, int] = {}
    for position, stages in enumerate(moves.wait_out):
        for stage in stages:
            if stage not in possible or stage in waited or not possible[stage].forward < position <= loss + 1:
                raise InvalidValueError(
                    f"before operation {position}, the copy out of stage {stage} is waited for; that has to happen "
                    "once, after a forward that moves something, and before the second operation after the loss",
                    kind="wrong_wait",
                    stage=stage,
                    position=position,
                )
            waited[stage] = position
    fetched: dict[int, Trip] = {}
    for position, stages in enumerate(moves.fetch):
        for stage in stages:
            if stage not in waited or stage in fetched or not loss < position <= possible[stage].backward:
                raise InvalidValueError(
                    f"before operation {position}, the copy back of stage {stage} begins; that has to happen once, "
                    "after the loss, after its copy out was waited for, and before its backward",
                    kind="wrong_fetch",
                    stage=stage,
                    position=position,
                )
            fetched[stage] = possible[stage]
    if missing := waited.keys() - fetched.keys():
        raise InvalidValueError(
            f"stages {sorted(missing)} are copied out, and never back", kind="not_fetched", stage=min(missing)
        )
    return fetched


def timed_moments(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Moment, ...]:
    """`moments` with copies over `link`. Raises ValueError, like `simulate_moves`, for invalid input."""
    found = moments(chain, sequence)
    if link is None or sequence.moves is None:
        return found
    begins = simulate_moves(chain, sequence, sequence.moves, link).begin
    return tuple(replace(moment, begin=begin) for moment, begin in zip(found, begins, strict=True))


def transfers(chain: Chain, sequence: Sequence, link: Link | None) -> tuple[Transfer, ...]:
    """Return all copies of a step over `link`; none where nothing moves. Raises ValueError like `simulate_moves`."""
    if link is None or sequence.moves is None:
        return ()
    return simulate_moves(chain, sequence, sequence.moves, link).transfers
