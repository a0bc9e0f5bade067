"""The floating program against a slow twin, a search over all sequences, and the persistent program."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Persistent, Sequence, min_bytes, simulate, store_all
from rotor_solver.floating import Floating
from tests.fields import raises
from tests.solver.long_chains import limit_between
from tests.solver.naive import Columns, exhaustive_optimum, naive_optimum
from tests.solver.strategies import plain_chains, rich_chains, unit_chain


def naive_floating(chain: Chain, limit: int) -> float:
    """The recurrence of `floating` as a memoised recursion in bytes."""
    length, stages, columns = len(chain), chain.stages, Columns(chain)
    sizes, left = (*columns.activation, 0), columns.gradients_from.__getitem__

    def output(alone: bool) -> int:
        return sizes[length] if chain.output_held and alone else 0

    @cache
    def best(s: int, t: int, last: int, memory: int, inside: bool) -> float:
        """`memory` does not count a_s if it is `inside` the ā_s of the stage before, and counts it otherwise."""
        if t > last:
            return 0.0
        own = 0 if inside else sizes[s]
        room, after_loss = memory - own, last < length
        if s == length:
            return chain.loss_time if room >= sizes[length] + chain.loss_temp else math.inf
        others = sizes[last + 1] + left(min(last + 1, length)) + output(True) if after_loss else 0
        times, freed = [math.inf], columns.released[s][inside]
        for option in stages[s].options if s == t else ():
            temp = option.backward_temp_of_replay if after_loss else option.backward_temp
            during = sizes[s] + sizes[s + 1] + left(s + 1) + output(after_loss or s < length - 1) + option.saved + temp
            after = left(s) + output(True)
            if room >= max(others + option.saved + option.forward_temp, during - freed, after - freed):
                rest = best(s + 1, s + 1, last, room + freed - option.saved, True)
                skipped = stages[s].skipped_output_time if after_loss and s == last else 0.0
                times.append(option.forward_time - skipped + option.backward_time + rest)
        if room >= others + sizes[s + 1] + columns.nograd_temp[s]:
            if s < t:
                times.append(columns.nograd_time[s] + best(s + 1, t, last, memory, False))
            for j in range(t + 1, last + 1):
                both = best(s + 1, j, last, room, False) + best(s, t, j - 1, memory, inside)
                times.append(columns.nograd_time[s] + both)
        return min(times)

    return best(0, 0, length, limit, False)


def solved(chain: Chain, limit: int, algorithm: Floating | Persistent | None = None) -> float:
    """The makespan of the plan, once its peak and its bound are checked; infinite where there is no plan."""
    try:
        sequence = (algorithm or Floating()).solve(chain, limit)
    except InfeasibleError:
        return math.inf
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= result.makespan
    return result.makespan


def a_limit(data: st.DataObject, chain: Chain) -> int:
    least = min_bytes(chain)
    return data.draw(st.integers(max(0, least - 3), simulate(chain, store_all(chain)).peak + 1), label="limit")


def random_chain(length: int, seed: int) -> Chain:
    """Sizes of megabytes, so that slots are far coarser than a byte."""
    random = np.random.default_rng(seed)
    sizes = random.integers(10**6, 10**8, length + 1)
    return Chain.from_arrays(
        random.uniform(1, 9, length),
        random.uniform(1, 18, length + 1),
        sizes,
        sizes[1:] + random.integers(0, 10**8, length),
        random.integers(0, 10**7, length),
        random.integers(0, 10**7, length + 1),
    )


def dropped_early() -> Chain:
    return Chain.from_arrays(
        forward_time=[1, 0, 1, 1],
        backward_time=[0] * 5,
        activation=[1, 1, 2, 1, 1],
        saved=[3, 2, 1, 2],
        forward_temp=[0] * 4,
        backward_temp=[0] * 5,
    )


def only_floating_fits() -> Chain:
    return Chain.from_arrays(
        forward_time=[9, 1, 1, 1],
        backward_time=[0] * 5,
        activation=[0, 1, 3, 6, 1],
        saved=[2, 4, 6, 4],
        forward_temp=[12, 0, 0, 0],
        backward_temp=[0] * 5,
    )


@settings(max_examples=100, deadline=None)
@given(rich_chains(), st.data())
def test_plans_are_as_fast_as_the_recurrence_says(chain: Chain, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    makespan = solved(chain, limit)
    assert makespan == naive_floating(chain, limit)
    assert makespan <= naive_optimum(chain, limit)
    if math.isfinite(makespan):  # one byte per slot: nothing is rounded
        assert Floating().solve(chain, limit).lower_bound == pytest.approx(makespan)


# Of 3606 random chains, with limits between the least and that of storing everything, 3604 were equal.
@settings(max_examples=12, deadline=None)
@given(plain_chains(), st.data())
def test_plans_are_between_the_best_of_all_sequences_and_the_best_persistent_one(
    chain: Chain, data: st.DataObject
) -> None:
    limit = a_limit(data, chain)
    makespan = solved(chain, limit)
    assert exhaustive_optimum(chain, limit, persistent=False) <= makespan <= solved(chain, limit, Persistent())


def test_a_checkpoint_that_is_dropped_early_saves_a_forward() -> None:
    # In 7 bytes, a_1 can be kept until Fn_1 reads it the last time, and saves a run of stage 0. It would not fit beside
    # B_2, which needs a_0, a_2, ā_3, δ_3 and δ_2: 1 + 2 + 1 + 1 + 2. So the persistent plan runs stage 0 four times.
    chain = dropped_early()
    plan = Floating().solve(chain, 7)
    assert str(plan) == "CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    assert simulate(chain, plan).peak == 7
    assert simulate(chain, plan).makespan == exhaustive_optimum(chain, 7, persistent=False) == 6
    assert plan.lower_bound == pytest.approx(6)
    assert simulate(chain, Persistent().solve(chain, 7)).makespan == exhaustive_optimum(chain, 7, persistent=True) == 7


def test_there_are_limits_in_which_only_a_floating_checkpoint_fits() -> None:
    chain = only_floating_fits()
    assert solved(chain, 18) == exhaustive_optimum(chain, 18, persistent=False) == 24
    assert math.isinf(solved(chain, 18, Persistent()))
    assert min_bytes(chain) == 19


@settings(max_examples=100, deadline=None)
@given(rich_chains())
def test_the_least_limit_works_and_one_byte_less_does_not(chain: Chain) -> None:
    with pytest.raises(InfeasibleError) as caught:
        Floating().solve(chain, chain.input_bytes - 1)
    least = caught.value.min_bytes
    assert least <= min_bytes(chain)
    assert simulate(chain, Floating().solve(chain, least)).peak == least
    assert math.isinf(naive_floating(chain, least - 1))


@settings(max_examples=100, deadline=None)
@given(rich_chains(), st.integers(1, 9), st.data())
def test_few_slots_cost_time_but_neither_memory_nor_the_bound(chain: Chain, slots: int, data: st.DataObject) -> None:
    limit = a_limit(data, chain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor_solver.floating._FINER_CHOICES", 0)
        makespan = solved(chain, limit, Floating(slots))
        if math.isfinite(makespan):
            bound = Floating(slots).solve(chain, limit).lower_bound
            assert bound is not None
            assert bound <= naive_floating(chain, limit)
    assert makespan <= solved(chain, limit, Persistent(slots))


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_of_coarse_slots_holds_for_long_chains(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_solver.floating._FINER_CHOICES", 0)
    random = np.random.default_rng(seed)
    length = int(random.integers(4, 9))
    sizes, nothing = random.integers(0, 4, length + 1), [0] * (length + 1)
    saved = 10 * random.integers(1, 4, length)  # about whole slots: only checkpoints are rounded much
    chain = Chain.from_arrays(random.integers(0, 10, length), nothing, sizes, saved, nothing[1:], nothing)
    limit = limit_between(chain, random.uniform(0, 0.9))
    plan = Floating(-(-limit // 10)).solve(chain, limit)
    assert plan.lower_bound is not None
    assert plan.lower_bound <= naive_floating(chain, limit) <= simulate(chain, plan).makespan


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_bytes_that_are_no_whole_slots_stay_within_the_limit(share: float) -> None:
    chain = random_chain(12, seed=1)
    limit = limit_between(chain, share)
    assert solved(chain, limit) <= solved(chain, limit, Persistent())


def test_more_memory_is_never_slower() -> None:
    for chain in (dropped_early(), only_floating_fits(), unit_chain(5)):
        makespans = [solved(chain, limit) for limit in range(simulate(chain, store_all(chain)).peak + 2)]
        assert makespans == sorted(makespans, reverse=True)


@pytest.mark.parametrize("length", [0, 1, 2, 12])
def test_everything_is_stored_where_it_fits(length: int) -> None:
    chain = unit_chain(length)
    stored = store_all(chain)
    plan = Floating().solve(chain, simulate(chain, stored).peak)
    assert plan == stored
    assert plan.algorithm == "floating"
    assert plan.lower_bound == stored.lower_bound


def test_sizes_of_zero_bytes_and_times_of_zero_seconds_have_plans() -> None:
    chain = Chain.from_arrays([0] * 3, [0] * 4, [0] * 4, [0] * 3, [5, 0, 7], [0, 2, 9, 0])
    assert solved(chain, 9) == 0
    assert math.isinf(solved(chain, 8))


def test_chains_that_are_too_long_are_refused() -> None:
    chain = random_chain(200, seed=2)
    with raises(ValueError, "table_too_large"):
        Floating().solve(chain, limit_between(chain, 0.2))
    assert isinstance(
        Floating(5).solve(random_chain(30, seed=2), limit_between(random_chain(30, seed=2), 0.2)), Sequence
    )


@pytest.mark.parametrize("slots", [0, -1, True, 2.5])
def test_slots_have_to_be_a_number_of_them(slots: int) -> None:
    with raises(ValueError, "not_a_count", name="slots"):
        Floating(slots)
