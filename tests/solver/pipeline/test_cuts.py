"""The search over cuts, against all cuts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver.pipeline.cuts import best_cuts
from tests.solver.pipeline.naive import all_cuts


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 4), st.booleans())
def test_no_cuts_are_better_and_no_cost_is_computed_twice(seed: int, parts: int, more: int, some_fail: bool) -> None:
    length = parts + more
    random = np.random.default_rng(seed)
    costs = random.integers(1, 20, (parts, length + 1, length + 1)).astype(float)
    if some_fail:
        costs[random.random(costs.shape) < 0.4] = math.inf
    guesses = np.floor(np.minimum(costs, 20) * random.random(costs.shape))
    bounds = np.where(np.tri(length + 1, dtype=bool), math.inf, guesses * 0.5)
    asked = []

    def cost(part: int, i: int, j: int) -> float:
        asked.append((part, i, j))
        return float(costs[part, i, j])

    cuts, bottleneck = best_cuts(bounds, lambda *at: float(guesses[at]), cost)
    best = min(max(costs[p, i, j] for p, (i, j) in enumerate(each)) for each in all_cuts(length, parts))
    assert bottleneck == best
    assert len(asked) == len(set(asked))
    if best == math.inf:
        assert cuts == []
    else:
        assert (cuts[0], cuts[-1]) == (0, length)
        assert max(costs[p, i, j] for p, (i, j) in enumerate(pairwise(cuts))) == best


def test_parts_that_no_cut_needs_are_not_asked_for() -> None:
    """Ten equal stages on two ranks: the bounds are the costs, so one look is enough."""
    seconds = np.arange(11.0)
    bounds = np.repeat(np.where(np.tri(11, dtype=bool), math.inf, seconds[None] - seconds[:, None])[None], 2, axis=0)
    asked = []

    def cost(part: int, i: int, j: int) -> float:
        asked.append((part, i, j))
        return float(j - i)

    assert best_cuts(bounds, cost) == ([0, 5, 10], 5.0)
    assert asked == [(0, 0, 5), (1, 5, 10)]
