"""What every strategy has to keep, whatever it is: its limit, its name, and its word about the least limit."""

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
    simulate,
    store_all,
)


def limits(chain: Chain) -> st.SearchStrategy[int]:
    return st.integers(0, simulate(chain, store_all(chain)).peak + 3)


def least_limit(algorithm: Algorithm, chain: Chain) -> int:
    """The least limit as the strategy states it, once it is seen to work, and one byte less not to."""
    with pytest.raises(InfeasibleError) as caught:
        algorithm.solve(chain, -1)
    least = caught.value.min_bytes
    assert caught.value.mem_limit == -1
    assert str(caught.value) == f"{algorithm.name} needs at least {least} bytes; the limit is -1"
    assert simulate(chain, algorithm.solve(chain, least)).peak == least
    with pytest.raises(InfeasibleError) as caught:
        algorithm.solve(chain, least - 1)
    assert caught.value.min_bytes == least
    return least


def makespan(algorithm: Algorithm, chain: Chain, limit: int) -> float:
    """Infinite where nothing fits."""
    try:
        sequence = algorithm.solve(chain, limit)
    except InfeasibleError as error:
        assert error.min_bytes > limit  # noqa: PT017
        return math.inf
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.algorithm == algorithm.name
    return result.makespan


def forwards(sequence: Sequence) -> int:
    """Forwards in all, those with a graph included."""
    return sum(isinstance(each, ForwardEnable | ForwardCheck | ForwardNograd) for each in sequence)


def stores_only_inputs(sequence: Sequence) -> bool:
    """Whether every Fe_i is followed by B_i, with no more than the loss in between."""
    rest = [each for each in sequence if not isinstance(each, Loss)]
    pairs = pairwise(rest)
    return all(after == Backward(before.stage) for before, after in pairs if isinstance(before, ForwardEnable))
