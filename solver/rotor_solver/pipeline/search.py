"""What the parts of a chain cost, for the search of cuts: each is solved once, and equal parts are solved together."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.limits import InfeasibleError
from rotor_solver.pipeline.budget import Budget
from rotor_solver.pipeline.plan import Part
from rotor_solver.pipeline.sequences.fastest import bound_in_flight, fastest_in_flight
from rotor_solver.pipeline.sequences.least import least_in_flight
from rotor_solver.progress import watcher
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

_FEW = 24
"""Slots for what a microbatch keeps, where only a lower bound is wanted; a guess."""
_Key = tuple[Chain, int, int]
"""A part's chain, the bytes for its microbatches (below zero if what is beside them fills more than the limit), and how
many are in flight."""


class Search:
    """The costs of parts, by their number and first and last stage (`end` is the one after it)."""

    def __init__(self, chain: Chain, budget: Budget, slots: int) -> None:
        self.chain = chain
        self.budget = budget
        self._slots = slots
        self._solved: dict[_Key, tuple[float, Sequence | None]] = {}
        self._guessed: dict[_Key, float] = {}
        self._least: dict[tuple[Chain, int], int] = {}
        self._parts: dict[tuple[int, int, int], Part] = {}

    def seconds(self, number: int, begin: int, end: int) -> float:
        """Of a microbatch by the fastest sequence; infinite if none fits."""
        return self._solve(number, begin, end)[0]

    def guess(self, number: int, begin: int, end: int) -> float:
        """A lower bound in seconds that takes little time; infinite if no sequence fits."""
        part = self._stored(number, begin, end)
        key = self._key(part, number)
        if key in self._solved:
            return self.lower_bound(number, begin, end)
        if key not in self._guessed:
            self._guessed[key] = bound_in_flight(*key, _FEW) if key[1] >= 0 else math.inf
        return self._guessed[key]

    def lower_bound(self, number: int, begin: int, end: int) -> float:
        """Seconds: no memory-persistent sequence that fits is faster."""
        seconds, sequence = self._solve(number, begin, end)
        return seconds if sequence is None or sequence.lower_bound is None else sequence.lower_bound

    def lacking(self, number: int, begin: int, end: int) -> int:
        """By how many bytes the limit of the part's rank is too small; not more than zero if it is not."""
        part = self._stored(number, begin, end)
        key = part.chain, part.flying.forwards
        if key not in self._least:
            self._least[key] = least_in_flight(*key).nbytes
        missing = part.beside_bytes + self._least[key] - self.budget.shares[number]
        return missing if missing <= 0 else self.budget.rank_bytes_for(number, missing)

    def part(self, number: int, begin: int, end: int) -> Part:
        """The part with its fastest sequence. It has to fit."""
        sequence = self._solve(number, begin, end)[1]
        assert sequence is not None
        part = replace(self._stored(number, begin, end), sequence=sequence)
        assert part.peak_bytes <= self.budget.shares[number]
        return part

    def _stored(self, number: int, begin: int, end: int) -> Part:
        key = number, begin, end
        if key not in self._parts:
            self._parts[key] = self.budget.part(self.chain, number, begin, end)
        return self._parts[key]

    def _key(self, part: Part, number: int) -> _Key:
        return part.chain, self.budget.shares[number] - part.beside_bytes, part.flying.forwards

    def _solve(self, number: int, begin: int, end: int) -> tuple[float, Sequence | None]:
        part = self._stored(number, begin, end)
        key = self._key(part, number)
        if key not in self._solved:
            if (progress := watcher()) is not None:
                progress(len(self._solved), 0, "parts")
            self._solved[key] = math.inf, None
            if key[1] < 0:
                return self._solved[key]
            with suppress(InfeasibleError):
                sequence = fastest_in_flight(*key, self._slots)
                self._solved[key] = simulate(part.chain, sequence).makespan, sequence
        return self._solved[key]
