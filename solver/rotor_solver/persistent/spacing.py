"""Which intervals have rows of their own in a table: of the longer ones, fewer and fewer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotor_solver.arrays.costs import Ints


class Spacing(NamedTuple):
    """Intervals [i, i + d] may end at every stage while d < parts · period, and then at every period.

    From d = 2 · parts · period on, they end at every second period, from 4 · parts · period on at every fourth, and so
    on: about `parts` rows for every doubling of d. Ends are counted from stage L-1, which is always one. Where an
    interval may end, those that begin later may too. Otherwise each further Fe would drop a few more stages, and the
    bound would get worse with every one.
    """

    parts: int
    period: int = 1

    def ended(self, length: int) -> NDArray[np.bool_]:
        """[L, L] by (i, l): whether [i, l] has a row of its own."""
        stages = np.arange(length)
        distance = stages - stages[:, None]
        periods = distance // (self.parts * self.period)
        step = np.where(periods < 1, 1, self.period * 2 ** np.log2(np.maximum(periods, 1)).astype(np.int64))
        ended: NDArray[np.bool_] = (distance >= 0) & ((length - 1 - stages) % step == 0)
        return ended

    def dense(self, length: int) -> bool:
        """Whether all intervals of a chain have rows."""
        return length <= self.parts * (2 if self.period == 1 else self.period)


def stops_of(ended: NDArray[np.bool_]) -> Ints:
    """[L] by stage l: a row that ends there stands for intervals to l, …, stop[l]-1, wherever they begin."""
    length = len(ended)
    if not length:
        return np.zeros(0, np.int64)
    following = np.where(ended, np.arange(length), length)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    first = ended.argmax(axis=0)  # the fewer ends, the longer what lies between
    stages = np.arange(length)
    stop: Ints = np.append(following, np.full((length, 1), length), axis=1)[first, stages + 1]
    return stop
