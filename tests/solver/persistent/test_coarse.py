"""Groups of stages as single ones: what a sequence for them needs is never less than what it means for the chain."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, recompute_all, simulate, solve, store_all
from rotor_solver.persistent.program import coarse_chain, fine_sequence
from rotor_solver.segments import even_segments
from tests.solver.strategies import rich_chains


@settings(max_examples=100, deadline=None)
@given(rich_chains(max_stages=8), st.integers(1, 8), st.integers(0, 60))
def test_a_coarse_sequence_fits_whenever_it_seems_to(chain: Chain, count: int, more: int) -> None:
    groups = even_segments(len(chain), count)
    coarse = coarse_chain(chain, groups)
    least = recompute_all(coarse)
    middle = solve(coarse, simulate(coarse, least).peak + more)
    for sequence in (store_all(coarse), least, middle):
        seeming, true = simulate(coarse, sequence), simulate(chain, fine_sequence(chain, groups, sequence))
        assert true.peak <= seeming.peak
        assert abs(true.makespan - seeming.makespan) < 1e-9
