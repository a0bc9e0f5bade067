"""The floating program against a slow twin, a search over all sequences, and the persistent program."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from rotor_solver import Chain, Persistent, min_bytes, simulate, store_all
from rotor_solver.floating import Floating
from tests.fields import raises
from tests.solver.long_chains import limit_between, random_chain
from tests.solver.naive import beside, columns_of, exhaustive_optimum, naive_optimum, with_graph
from tests.solver.plans import least_limit, makespan
from tests.solver.strategies import limited, plain_chains, rich_chains, unit_chain


def naive_floating(chain: Chain, limit: int) -> float:
    """The recurrence of `floating` as a memoised recursion in bytes."""
    length, columns, sizes = len(chain), columns_of(chain), chain.activation

    @cache
    def best(s: int, t: int, last: int, memory: int, inside: bool) -> float:
        """`memory` does not count a_s if it is `inside` the ā_s of the stage before, and counts it otherwise."""
        if t > last:
            return 0.0
        room = memory - (0 if inside else sizes[s])
        if s == length:
            return chain.loss_time if room >= sizes[length] + chain.loss_temp else math.inf
        times = [math.inf]
        for option in chain.stages[s].options if s == t else ():
            need, seconds = with_graph(columns, s, last, option, inside)
            if room >= need:
                rest = room + columns.released[s][inside] - option.saved
                times.append(seconds + best(s + 1, s + 1, last, rest, True))
        if room >= beside(columns, last) + sizes[s + 1] + columns.nograd_temp[s]:
            if s < t:
                times.append(columns.nograd_time[s] + best(s + 1, t, last, memory, False))
            for j in range(t + 1, last + 1):
                both = best(s + 1, j, last, room, False) + best(s, t, j - 1, memory, inside)
                times.append(columns.nograd_time[s] + both)
        return min(times)

    return best(0, 0, length, limit, False)


@settings(max_examples=50, deadline=None)
@given(limited(rich_chains()))
def test_plans_are_as_fast_and_the_least_limit_is_as_the_recurrence_says(case: tuple[Chain, int]) -> None:
    chain, limit = case
    found = makespan(Floating(), chain, limit)
    assert found == naive_floating(chain, limit)
    assert found <= naive_optimum(chain, limit)
    if math.isfinite(found):  # one byte per slot: nothing is rounded
        assert Floating().solve(chain, limit).lower_bound == pytest.approx(found)
    least = least_limit(Floating(), chain)
    assert least <= min_bytes(chain)
    assert math.isinf(naive_floating(chain, least - 1))


# Of 3606 random chains, with limits between the least and that of storing everything, 3604 were equal.
@settings(max_examples=12, deadline=None)
@given(limited(plain_chains()))
def test_plans_are_between_the_best_of_all_sequences_and_the_best_persistent_one(case: tuple[Chain, int]) -> None:
    chain, limit = case
    found = makespan(Floating(), chain, limit)
    assert exhaustive_optimum(chain, limit, persistent=False) <= found <= makespan(Persistent(), chain, limit)


def test_a_checkpoint_that_is_dropped_early_saves_a_forward_or_fits_alone() -> None:
    # In 7 bytes, a_1 can be kept until Fn_1 reads it the last time, and saves a run of stage 0. It would not fit beside
    # B_2, which needs a_0, a_2, ā_3, δ_3 and δ_2: 1 + 2 + 1 + 1 + 2. So the persistent plan runs stage 0 four times.
    chain = Chain.from_arrays([1, 0, 1, 1], [0] * 5, [1, 1, 2, 1, 1], [3, 2, 1, 2], [0] * 4, [0] * 5)
    plan = Floating().solve(chain, 7)
    assert str(plan) == "CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    assert simulate(chain, plan).peak == 7
    assert simulate(chain, plan).makespan == exhaustive_optimum(chain, 7, persistent=False) == 6
    assert plan.lower_bound == pytest.approx(6)
    assert makespan(Persistent(), chain, 7) == exhaustive_optimum(chain, 7, persistent=True) == 7
    # There are limits in which only a floating checkpoint fits.
    chain = Chain.from_arrays([9, 1, 1, 1], [0] * 5, [0, 1, 3, 6, 1], [2, 4, 6, 4], [12, 0, 0, 0], [0] * 5)
    assert makespan(Floating(), chain, 18) == exhaustive_optimum(chain, 18, persistent=False) == 24
    # CF_0, Fn_1, CF_0, Fn_2 … Fn_1 keeps a_1 without counting as a checkpoint of it: not persistent.
    assert math.isinf(makespan(Persistent(), chain, 18))
    assert math.isinf(exhaustive_optimum(chain, 18, persistent=True))
    assert min_bytes(chain) == 19


@pytest.mark.parametrize("seed", range(12))
def test_few_slots_cost_time_but_neither_memory_nor_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_solver.floating._FINER_CHOICES", 0)
    random = np.random.default_rng(seed)
    length = int(random.integers(4, 9))
    sizes, nothing = random.integers(0, 4, length + 1), [0] * (length + 1)
    saved = 10 * random.integers(1, 4, length)  # about whole slots: only checkpoints are rounded much
    chain = Chain.from_arrays(random.integers(0, 10, length), nothing, sizes, saved, nothing[1:], nothing)
    limit = limit_between(chain, random.uniform(0, 0.9))
    slots = -(-limit // 10)
    bound, best = Floating(slots).solve(chain, limit).lower_bound, naive_floating(chain, limit)
    assert bound <= best <= makespan(Floating(slots), chain, limit) <= makespan(Persistent(slots), chain, limit)
    real = random_chain(10, seed)  # bytes that are no whole slots
    limit = limit_between(real, seed / 12)
    assert makespan(Floating(), real, limit) <= makespan(Persistent(), real, limit)


def test_everything_is_stored_where_it_fits() -> None:
    for length in (0, 1, 12):
        chain, stored = unit_chain(length), store_all(unit_chain(length))
        plan = Floating().solve(chain, simulate(chain, stored).peak)
        assert (plan, plan.algorithm, plan.lower_bound) == (stored, "floating", stored.lower_bound)


def test_chains_that_are_too_long_are_refused_and_fewer_slots_allow_longer_ones() -> None:
    for length, slots in ((200, 500), (30, 200000)):
        chain = random_chain(length)
        with raises(ValueError, "table_too_large"):
            Floating(slots).solve(chain, limit_between(chain, 0.2))
    assert len(Floating(5).solve(chain, limit_between(chain, 0.2))) > 60
