"""What is in memory, by owner, against the simulator's totals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from rotor_solver import Chain, Moment, Sequence, min_bytes, moments, recompute_all, simulate, solve, store_all
from tests.solver.strategies import rich_chains


def parts(moment: Moment) -> int:
    return sum(moment.inputs.values()) + sum(moment.attached.values()) + moment.output + moment.gradients


@settings(deadline=None, max_examples=60)
@given(rich_chains())
def test_the_parts_add_up_to_the_simulated_memory(chain: Chain) -> None:
    for sequence in (store_all(chain), recompute_all(chain), solve(chain, max(1, min_bytes(chain)))):
        simulated, found = simulate(chain, sequence), moments(chain, sequence)
        assert tuple(moment.during for moment in found) == simulated.during
        assert tuple(moment.after for moment in found) == simulated.after
        assert tuple(map(parts, found)) == simulated.after
        assert sum(moment.seconds for moment in found) == simulated.makespan
        assert all(a.begin + a.seconds == b.begin for a, b in itertools.pairwise(found))


def test_a_recomputed_step_by_hand() -> None:
    chain = Chain.from_arrays(
        forward_time=[1, 2],
        backward_time=[10, 20, 5],
        activation=[100, 10, 20],
        saved=[11, 22],
        forward_temp=[0, 0],
        backward_temp=[0, 0, 0],
        gradient=[1000, 2000],
    )
    found = moments(chain, Sequence.parse("CF_0, Fe_1, L, B_1, Fe_0, B_0"))
    assert [moment.again for moment in found] == [False, False, False, False, True, False]
    assert [dict(moment.inputs) for moment in found] == [{0: 100, 1: 10}] * 3 + [{0: 100}] * 2 + [{}]
    assert [dict(moment.attached) for moment in found] == [{}, {2: 22}, {2: 22}, {}, {1: 11}, {}]
    assert [moment.gradients for moment in found] == [0, 0, 20, 2010, 2010, 3100]


def test_moments_refuse_a_sequence_that_is_not_valid() -> None:
    chain = Chain.from_arrays([1], [1, 1], [1, 1], [1], [0], [0, 0])
    with pytest.raises(ValueError, match="B_0, needs δ_1"):
        moments(chain, Sequence.parse("Fe_0, B_0"))
