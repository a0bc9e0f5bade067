"""The inner loops leave out what cannot make anything less, by chunks of slots: against plain minima."""

from __future__ import annotations

import numpy as np
import pytest

from rotor_solver.persistent import kernels
from rotor_solver.persistent.kernels import BEYOND, CHUNK

SLOTS = 7 * CHUNK


class Flat:
    """Three rows of `SLOTS` slots one after the other: one to be lowered, and two complete ones that decrease."""

    def __init__(self, rng: np.random.Generator, steep: float) -> None:
        self.begins = [int(rng.integers(0, CHUNK)) for _ in range(3)]
        size = SLOTS + BEYOND
        self.flat = np.full(3 * size, -np.inf)
        self.marks = np.full(3 * size // CHUNK, np.inf)
        self.at = [0, size, 2 * size]
        for at, begin in zip(self.at, self.begins, strict=True):
            row = np.sort(rng.uniform(0, steep, SLOTS - begin))[::-1] + rng.uniform()
            self.flat[at + begin : at + SLOTS] = row
            self.flat[at + SLOTS : at + size] = row[-1]
        for chunk in range(SLOTS // CHUNK):
            self.marks[chunk] = self.flat[max(self.begins[0], chunk * CHUNK)]
        for chunk in range(size // CHUNK, 3 * size // CHUNK):
            self.marks[chunk] = self.flat[chunk * CHUNK + CHUNK - 1]

    def row(self, which: int, shift: int = 0) -> np.ndarray:
        """Its slots as seen from a row that has `shift` slots more."""
        slots = np.arange(SLOTS) - shift
        known = slots >= self.begins[which]
        return np.where(known, self.flat[self.at[which] + np.where(known, slots, SLOTS)], np.inf)

    def check(self, expected: np.ndarray) -> None:
        begin = self.begins[0]
        assert np.array_equal(self.flat[begin:SLOTS], expected[begin:])
        tops = np.maximum(begin, np.arange(0, SLOTS, CHUNK))
        assert (self.marks[: SLOTS // CHUNK] >= self.flat[tops]).all()


@pytest.mark.parametrize("steep", [0.1, 3.0])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_would_be_less_is_left_out(seed: int, steep: float) -> None:
    rng = np.random.default_rng(seed)
    rows, shift = Flat(rng, steep), int(rng.integers(2 * CHUNK))
    out, left, right = rows.at
    for seconds in (0.4, -0.2, -0.7):
        both = seconds + (rows.row(1) + rows.row(2, shift))
        one = seconds + (0.3 + rows.row(2, shift))
        low = max(*rows.begins, rows.begins[2] + shift) + int(rng.integers(CHUNK))
        for chosen, run in ((both, _by_both), (one, _by_one)):
            expected = rows.row(0)
            expected[low:] = np.minimum(expected[low:], chosen[low:])
            run(rows, out, left, right - shift, low, seconds)
            rows.check(expected)


def _by_both(rows: Flat, out: int, left: int, right: int, low: int, seconds: float) -> None:
    kernels.lower_by_both(rows.flat, rows.marks, out, left, right, rows.begins[0], low, SLOTS, seconds)


def _by_one(rows: Flat, out: int, _left: int, right: int, low: int, seconds: float) -> None:
    kernels.lower_by(rows.flat, rows.marks, out, right, rows.begins[0], low, SLOTS, 0.3, seconds)
