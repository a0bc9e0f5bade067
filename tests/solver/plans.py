"""What every algorithm has to keep: its limit, its name, its bound, and its word about the least limit."""

import math
from itertools import pairwise

from rotor_solver import Algorithm, Backward, Chain, ForwardEnable, InfeasibleError, Loss, Sequence, simulate
from tests.fields import raises


def least_limit(algorithm: Algorithm, chain: Chain) -> int:
    """The least limit as the algorithm states it, once it is seen to work, and one byte less not to."""
    with raises(InfeasibleError, "limit_too_small", mem_limit=-1) as caught:
        algorithm.solve(chain, -1)
    least = caught.value.min_bytes
    assert simulate(chain, algorithm.solve(chain, least)).peak == least
    with raises(InfeasibleError, "limit_too_small", min_bytes=least):
        algorithm.solve(chain, least - 1)
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
    return sum(not isinstance(each, Backward | Loss) for each in sequence)


def stores_only_inputs(sequence: Sequence) -> bool:
    """Whether every Fe_i is followed by B_i, with no more than the loss in between."""
    pairs = pairwise(each for each in sequence if not isinstance(each, Loss))
    return all(after == Backward(before.stage) for before, after in pairs if isinstance(before, ForwardEnable))
