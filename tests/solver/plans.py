"""What every algorithm has to keep: its limit, its name, its bound, and its word about the least limit."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from rotor_solver import (
    Algorithm,
    Backward,
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    InfeasibleError,
    Loss,
    Sequence,
    min_bytes,
    simulate,
    store_all,
)


@st.composite
def limited(draw: st.DrawFn, chains: st.SearchStrategy[Chain], *, below: int = 3) -> tuple[Chain, int]:
    """A chain, and a limit from `below` the least to more than storing everything takes."""
    chain = draw(chains)
    least, most = min_bytes(chain), simulate(chain, store_all(chain)).peak
    return chain, draw(st.integers(max(0, least - below), max(least, most) + 3))


def least_limit(algorithm: Algorithm, chain: Chain) -> int:
    """The least limit as the algorithm states it, once it is seen to work, and one byte less not to."""
    with pytest.raises(InfeasibleError) as caught:
        algorithm.solve(chain, -1)
    least = caught.value.min_bytes
    assert caught.value.mem_limit == -1
    assert simulate(chain, algorithm.solve(chain, least)).peak == least
    with pytest.raises(InfeasibleError) as caught:
        algorithm.solve(chain, least - 1)
    assert caught.value.min_bytes == least
    return least


def makespan(algorithm: Algorithm, chain: Chain, limit: int) -> float:
    """Infinite where nothing fits; the plan keeps its limit and its bound."""
    try:
        sequence = algorithm.solve(chain, limit)
    except InfeasibleError as error:
        assert error.min_bytes > limit  # noqa: PT017
        return math.inf
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.algorithm == algorithm.name
    assert sequence.lower_bound is None or sequence.lower_bound <= result.makespan
    return result.makespan


def forwards(sequence: Sequence) -> int:
    """Forwards in all, those with a graph included."""
    return sum(isinstance(each, ForwardEnable | ForwardCheck | ForwardNograd) for each in sequence)


def stores_only_inputs(sequence: Sequence) -> bool:
    """Whether every Fe_i is followed by B_i, with no more than the loss in between."""
    rest = [each for each in sequence if not isinstance(each, Loss)]
    pairs = pairwise(rest)
    return all(after == Backward(before.stage) for before, after in pairs if isinstance(before, ForwardEnable))
