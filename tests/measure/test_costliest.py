"""The costs that processes agree on: a sequence that fits them fits each of the processes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.measure.costliest import costliest
from rotor_solver import Chain, Persistent, min_bytes, simulate, store_all
from tests.solver.strategies import rich_chains, unit_chain


@settings(deadline=None)  # kernels may have to be compiled
@given(st.lists(rich_chains(), min_size=2, max_size=3), st.floats(0, 1))
def test_a_sequence_takes_no_more_in_any_process_than_in_the_costliest(chains: list[Chain], share: float) -> None:
    length = min(map(len, chains))
    # Gradients that free what a stage behind the cut has left would be refused.
    chains = [
        replace(chain, stages=tuple(replace(stage, gradient=0) for stage in chain.stages[:length])) for chain in chains
    ]
    together = costliest(chains)
    least, most = min_bytes(together), simulate(together, store_all(together)).peak
    sequence = Persistent().solve(together, least + int(share * max(0, most - least)))
    found = simulate(together, sequence)
    for chain in chains:
        alone = simulate(chain, sequence)
        assert alone.peak <= found.peak
        assert alone.makespan <= found.makespan + 1e-9


def test_equal_costs_are_those_of_all() -> None:
    chain = unit_chain(3)
    assert costliest([chain, unit_chain(3)]) is chain


def test_an_option_that_one_process_lacks_is_left_out() -> None:
    chain = unit_chain(2)
    first = chain.stages[0]
    more = replace(chain, stages=(replace(first, options=first.options * 2), *chain.stages[1:]))
    assert [len(stage.options) for stage in costliest([more, chain]).stages] == [1, 1]
