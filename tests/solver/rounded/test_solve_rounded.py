"""Plans with rounded checkpoints against all that there are: they fit, and their bound is one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import (
    Chain,
    ForwardCheck,
    InfeasibleError,
    Option,
    RoundedOutput,
    Sequence,
    Stage,
    min_bytes,
    simulate,
    solve,
    store_all,
)
from rotor_solver.rounded import least_rounded_sequence, solve_rounded
from rotor_solver.rounded.relaxed_chain import relaxed_chain
from tests.solver.naive import naive_optimum
from tests.solver.rounded.naive_rounded import naive_rounded_optimum
from tests.solver.strategies import rich_chains


@st.composite
def rounded_chains(draw: st.DrawFn, max_stages: int = 4) -> Chain:
    """Chains with everything that the model knows, some of whose values between stages may be rounded."""
    chain = draw(rich_chains(max_stages))
    stages = [replace(stage, rounded=draw(st.none() | _forms(stage.activation))) for stage in chain.stages]
    return replace(chain, stages=tuple(stages))


def _forms(activation: int) -> st.SearchStrategy[RoundedOutput]:
    seconds, scratch = st.integers(0, 2).map(float), st.sampled_from((0, 0, 1, 3))
    return st.builds(RoundedOutput, st.integers(0, activation), seconds, seconds, scratch, scratch)


def deep_chain(seed: int, length: int) -> Chain:
    """Stages that save several times their output, which takes half of its bytes when it is rounded."""
    random = Random(seed)
    stages, incoming = [], 8
    for _ in range(length):
        activation = random.randint(4, 12)
        seconds, saved = random.randint(2, 9), activation + random.randint(2, 24)
        stages.append(
            Stage(
                activation,
                (Option(seconds, 2 * seconds, saved, random.choice((0, 2)), random.choice((0, 2))),),
                gradient=random.choice((0, 0, 3)),
                input_released=random.choice((0, 0, incoming // 2)),
                output_released=random.choice((0, 0, activation // 2)),
                rounded=RoundedOutput(activation // 2, 0.01, 0.01, temp=random.choice((0, 1))),
            )
        )
        incoming = activation
    return Chain(tuple(stages), 8, 1.0, output_held=random.random() < 0.5)


def tight_limit(chain: Chain, share: float) -> int:
    """So far on the way from the least that any plan can need to storing everything."""
    least = min_bytes(relaxed_chain(chain))
    return int(least + share * (simulate(chain, store_all(chain)).peak - least))


def is_rounded(sequence: Sequence) -> bool:
    return any(isinstance(each, ForwardCheck) and each.rounded for each in sequence)


def a_limit(data: st.DataObject, chain: Chain) -> int:
    return data.draw(st.integers(0, simulate(chain, store_all(chain)).peak + 2), label="limit")


@settings(max_examples=80, deadline=None)
@given(rounded_chains(), st.data())
def test_no_sequence_is_faster_than_the_bound_or_fits_better_than_it_says(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    optimum = naive_rounded_optimum(chain, limit)
    least = simulate(chain, least_rounded_sequence(chain)).peak
    if limit < least:
        with suppress(InfeasibleError):
            assert simulate(chain, solve_rounded(chain, limit)).peak <= limit
        limit = least
        optimum = naive_rounded_optimum(chain, limit)
    sequence = solve_rounded(chain, limit)
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= optimum <= result.makespan
    if not is_rounded(sequence):
        assert sequence.operations == solve(chain, limit).operations


@settings(max_examples=80, deadline=None)
@given(rich_chains(), st.data())
def test_the_twin_knows_what_exact_checkpoints_cost(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert naive_rounded_optimum(chain, limit) == naive_optimum(chain, limit)


@settings(max_examples=80, deadline=None)
@given(rounded_chains(), st.data())
def test_the_relaxed_chain_never_needs_more_than_a_plan(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    assert naive_optimum(relaxed_chain(chain), limit) <= naive_rounded_optimum(chain, limit)


@pytest.mark.parametrize("seed", range(40))
def test_where_memory_is_tight_it_is_nearly_the_best_of_all(seed: int) -> None:
    chain = deep_chain(seed, 6)
    limit = tight_limit(chain, 0.15)
    sequence = solve_rounded(chain, limit)
    result, optimum = simulate(chain, sequence), naive_rounded_optimum(chain, limit)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= optimum + 1e-9
    assert optimum - 1e-9 <= result.makespan <= 1.02 * optimum


def test_rounding_is_faster_than_any_exact_plan_where_memory_is_tight() -> None:
    chain = deep_chain(3, 40)
    limit = tight_limit(chain, 0.05)
    exact, rounded = solve(chain, limit), solve_rounded(chain, limit)
    assert is_rounded(rounded)
    assert simulate(chain, rounded).makespan < 0.97 * exact.lower_bound
    assert simulate(chain, rounded).peak <= limit
    assert rounded.lower_bound <= simulate(chain, rounded).makespan


def test_nothing_is_rounded_for_which_there_is_room() -> None:
    chain = deep_chain(3, 40)
    limit = tight_limit(chain, 0.05)
    operations = list(solve_rounded(chain, limit))
    for position, operation in enumerate(operations):
        if isinstance(operation, ForwardCheck) and operation.rounded:
            exact = [*operations[:position], ForwardCheck(operation.stage), *operations[position + 1 :]]
            assert simulate(chain, Sequence(exact)).peak > limit


def test_nothing_is_rounded_for_less_than_half_a_percent() -> None:
    """Where everything is stored, or rounding takes as long as what it saves, checkpoints stay exact."""
    chain = deep_chain(3, 12)
    limit = tight_limit(chain, 0.2)
    slow = [replace(stage, rounded=replace(stage.rounded, seconds=100.0)) for stage in chain.stages]
    assert is_rounded(solve_rounded(chain, limit))
    assert not is_rounded(solve_rounded(replace(chain, stages=tuple(slow)), limit))
    assert not is_rounded(solve_rounded(chain, tight_limit(chain, 1.0)))


def test_the_least_limit_is_one_that_works() -> None:
    for seed in range(10):
        chain = deep_chain(seed, 12)
        least = simulate(chain, least_rounded_sequence(chain)).peak
        assert least <= min_bytes(chain)
        assert simulate(chain, solve_rounded(chain, least)).peak <= least
        with pytest.raises(InfeasibleError) as refused:
            solve_rounded(chain, min_bytes(relaxed_chain(chain)) - 1)
        assert refused.value.min_bytes == least


def test_a_chain_without_rounded_forms_has_the_exact_plan() -> None:
    chain = deep_chain(3, 12)
    chain = replace(chain, stages=tuple(replace(stage, rounded=None) for stage in chain.stages))
    limit = tight_limit(chain, 0.2)
    assert solve_rounded(chain, limit) == solve(chain, limit)
    with pytest.raises(InfeasibleError) as refused:
        solve_rounded(chain, 0)
    assert refused.value.min_bytes == min_bytes(chain)
