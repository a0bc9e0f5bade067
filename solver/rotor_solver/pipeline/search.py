"""What the parts of a chain cost, for the search of cuts: each is solved once, and equal parts are solved together."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.limits import InfeasibleError
from rotor_solver.pipeline.budget import Budget
from rotor_solver.pipeline.plan import Part
from rotor_solver.pipeline.sequences.fastest import bound_in_flight, fastest_in_flight
from rotor_solver.pipeline.sequences.least import least_in_flight
from rotor_solver.pipeline.sequences.with_room import fastest_with_room, has_room
from rotor_solver.progress import watcher
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_FEW = 24
"""Slots for what a microbatch keeps, where only a lower bound is wanted; a guess."""
_Key = tuple[Chain, int, int, int]
"""A part's chain, the bytes for its microbatches (below zero if what is beside them fills more than its share), how
many are in flight, and the room for the one in progress, where that is given apart."""


class Search:
    """The costs of parts, by their number and first and last stage (`end` is the one after it).

    One part on each rank has all of the rank's limit: the bytes of its microbatches together count. Several share it,
    so what each keeps counts by itself, and the room for the microbatch in progress is there once.
    """

    def __init__(self, chain: Chain, budget: Budget, slots: int) -> None:
        self.chain = chain
        self.budget = budget
        self._slots = slots
        self._shared = budget.schedule.virtual_stages > 1
        self._solved: dict[_Key, Sequence | None] = {}
        self._guessed: dict[_Key, float] = {}
        self._parts: dict[tuple[int, int, int], Part] = {}

    def seconds(self, number: int, begin: int, end: int) -> float:
        """Of a microbatch by the fastest sequence; infinite if none fits."""
        sequence = self._solve(self._key(number, begin, end))
        return math.inf if sequence is None else simulate(self._stored(number, begin, end).chain, sequence).makespan

    def lower_bound(self, number: int, begin: int, end: int) -> float:
        """Seconds: no memory-persistent sequence that fits is faster."""
        sequence = self._solve(self._key(number, begin, end))
        if sequence is None:
            return math.inf
        assert sequence.lower_bound is not None
        return sequence.lower_bound

    def guess(self, number: int, begin: int, end: int) -> float:
        """A lower bound in seconds that takes little time; infinite if no sequence fits."""
        key = self._key(number, begin, end)
        if key in self._solved:
            return self.lower_bound(number, begin, end)
        if key not in self._guessed:
            self._guessed[key] = self._guess(*key)
        return self._guessed[key]

    def lacking(self, number: int, begin: int, end: int) -> int:
        """By how many bytes the limit of the part's rank is too small; not more than zero if it is not."""
        part = self._stored(number, begin, end)
        if not self._shared:
            least = least_in_flight(part.chain, part.flying.forwards).nbytes
            return part.beside_bytes + least - self.budget.share(number)
        if self._fits(number, part, 0):
            return 0
        low, high = 0, 1
        while not self._fits(number, part, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(number, part, middle) else (middle, high)
        return high

    def part(self, number: int, begin: int, end: int) -> Part:
        """The part with its fastest sequence. It has to fit."""
        sequence = self._solve(self._key(number, begin, end))
        assert sequence is not None
        part = replace(self._stored(number, begin, end), sequence=sequence)
        assert part.peak_bytes <= self.budget.share(number) + self.budget.room(number)
        return part

    def _stored(self, number: int, begin: int, end: int) -> Part:
        key = number, begin, end
        if key not in self._parts:
            self._parts[key] = self.budget.part(self.chain, number, begin, end)
        return self._parts[key]

    def _key(self, number: int, begin: int, end: int) -> _Key:
        part = self._stored(number, begin, end)
        free = self.budget.share(number) - part.beside_bytes
        return part.chain, free, part.flying.forwards, self.budget.room(number)

    def _fits(self, number: int, part: Part, more: int) -> bool:
        free = self.budget.share(number, more) - part.beside_bytes
        return has_room(part.chain, free // part.flying.forwards, self.budget.room(number, more))

    def _guess(self, chain: Chain, free: int, count: int, room: int) -> float:
        if free < 0:
            return math.inf
        if not self._shared:
            return bound_in_flight(chain, free, count, _FEW)
        return simulate(chain, store_all(chain)).makespan if has_room(chain, free // count, room) else math.inf

    def _solve(self, key: _Key) -> Sequence | None:
        if key not in self._solved:
            if (progress := watcher()) is not None:
                progress(len(self._solved), 0, "parts")
            chain, free, count, room = key
            self._solved[key] = None
            if free < 0:
                return None
            with suppress(InfeasibleError):
                shared = self._shared
                self._solved[key] = (
                    fastest_with_room(chain, free // count, room)
                    if shared
                    else fastest_in_flight(chain, free, count, self._slots)
                )
        return self._solved[key]
