"""Where to cut a chain, so that the slowest part is as fast as it can be: exact, and lazy.

With c(s, i, j) the cost of stages i … j - 1 as part s, the least bottleneck of parts 0 … s on stages 0 … j - 1 is

    f(s, j) = the least over i of max(f(s - 1, i), c(s, i, j))

Costs are dear to compute, lower bounds are cheap. So the recurrence is solved with lower bounds in place of all costs
that are not known; those of the best cuts are made better, or the costs themselves computed, and it is solved again,
until cuts whose costs are all known are as good as the bound (LazySP: Dellin and Srinivasa, 2016). Nothing is assumed
about the costs: a part of a part may cost more, where its input is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rotor_solver.arrays.costs import Floats

Cost = Callable[[int, int, int], float]
"""Of stages i … j - 1 as part s, for (s, i, j)."""


def best_cuts(bounds: Floats, *costs: Cost) -> tuple[list[int], float]:
    """The cuts 0 = c_0 < … < c_S = N with the least bottleneck, and that bottleneck.

    `bounds` is [S, N+1, N+1], lower bounds by (s, i, j), infinite for what is not allowed. The last of `costs` is the
    cost, infinite where there is none; those before it are lower bounds, dearer and better from one to the next. Each
    is asked at most once for each part. Among cuts that are equal, those with the least sum are taken, as far as costs
    are known. Without any finite cuts, the list is empty.
    """
    lower, known = bounds.copy(), np.full(bounds.shape, np.inf)
    asked = np.zeros(bounds.shape, np.int64)
    while True:
        bottleneck = _bottleneck(lower)
        if bottleneck == np.inf:
            return [], np.inf
        if _bottleneck(known) <= bottleneck:
            return _cheapest(known, bottleneck), bottleneck
        for part, (i, j) in enumerate(pairwise(_cheapest(lower, bottleneck))):
            at = part, i, j
            if asked[at] < len(costs):
                lower[at] = max(lower[at], costs[asked[at]](part, i, j))
                asked[at] += 1
            if asked[at] == len(costs):
                known[at] = lower[at]


def _bottleneck(costs: Floats) -> float:
    best = np.full(costs.shape[1], np.inf)
    best[0] = -np.inf
    for part in costs:
        best = np.maximum(best[:, None], part).min(axis=0)
    return float(best[-1])


def _cheapest(costs: Floats, bottleneck: float) -> list[int]:
    """The cuts with the least sum of costs, none of which is more than `bottleneck`."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    before = []
    for part in costs:
        sums = best[:, None] + np.where(part <= bottleneck, part, np.inf)
        before.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    cuts = [costs.shape[1] - 1]
    for earlier in reversed(before):
        cuts.append(int(earlier[cuts[-1]]))
    return cuts[::-1]
