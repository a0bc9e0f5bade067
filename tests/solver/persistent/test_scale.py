"""Chains long enough for what short ones never reach: single precision, shared rows, groups of stages, large tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rotor_solver import Chain, min_bytes, simulate, solve, store_all
from rotor_solver.persistent import program, table
from rotor_solver.persistent.layout import Problem, extents
from rotor_solver.persistent.program import THOROUGH, Effort
from rotor_solver.persistent.table import Table


def random_chain(length: int, seed: int = 0) -> Chain:
    """Times and sizes of every magnitude, which no slot divides."""
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0, 0.7, length)
    sizes = (1e8 * rng.lognormal(0, 0.7, length + 1)).astype(np.int64)
    return Chain.from_arrays(
        forward_time=forward,
        backward_time=[*(forward * rng.uniform(1.5, 2.5, length)), 0.1],
        activation=sizes,
        saved=(sizes[1:] * rng.uniform(1, 4, length)).astype(np.int64),
        forward_temp=(sizes[1:] * rng.uniform(0, 1, length)).astype(np.int64),
        backward_temp=[*(sizes[1:] * rng.uniform(0, 1, length)).astype(np.int64), 0],
    )


def repeated_chain(length: int, period: int = 3, *, tail: int = 2) -> Chain:
    """An odd stage, `period` kinds of stages in turn, and some odd ones again: a transformer, as costs."""
    kinds, odd = random_chain(period, seed=1), random_chain(1 + tail, seed=2)
    order = [odd.stages[0], *(kinds.stages[i % period] for i in range(length)), *odd.stages[1:]]
    return Chain(tuple(order), odd.input_bytes, loss_time=0.1)


def limit_between(chain: Chain, fraction: float) -> int:
    least, whole = min_bytes(chain), simulate(chain, store_all(chain)).peak
    return int(least + fraction * (whole - least))


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("length", [30, 90, 150])
def test_the_certified_gap_is_below_half_a_percent(length: int, fraction: float) -> None:
    chain = random_chain(length)
    limit = limit_between(chain, fraction)
    sequence = solve(chain, limit)
    result = simulate(chain, sequence)
    assert result.peak <= limit
    assert sequence.lower_bound is not None
    assert sequence.lower_bound <= result.makespan <= sequence.lower_bound * 1.005


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.4, 0.8])
def test_single_precision_bounds_hold_and_plans_are_as_good(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(40)
    limit = limit_between(chain, fraction)
    double = solve(chain, limit)
    monkeypatch.setattr(table, "_DOUBLE", 0)
    single = solve(chain, limit)
    assert single.lower_bound is not None
    assert single.lower_bound <= simulate(chain, double).makespan
    assert simulate(chain, single).makespan == pytest.approx(simulate(chain, double).makespan, rel=0.005)


@pytest.mark.parametrize("gradient", [0, 10**7])
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.7])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_shared_rows_change_no_number(period: int, fraction: float, gradient: int) -> None:
    """The same table, with rows shared and with every row computed. Gradients make the later stages different."""
    plain = repeated_chain(100, period)
    stages = tuple(type(stage)(stage.activation, stage.options, gradient=gradient) for stage in plain.stages)
    chain = Chain(stages, plain.input_bytes, plain.loss_time)
    problem, room = Problem.of(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = simulate(chain, problem.least_sequence()).makespan - problem.stored
    shared = Table.of(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    assert (shared.owner is not None) == (gradient == 0)
    shared.fill()
    alone = Table.of(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    alone.owner = None
    first, sizes = extents(alone.rows.begin, alone.rows.high)
    position = np.cumsum(sizes) - sizes - first
    alone.rows, alone.size = alone.rows._replace(position=position), int(sizes.sum())
    alone.fill()
    assert shared.later() == pytest.approx(alone.later(), rel=1e-9)
    for less in (0, room // 7, room // 3):
        assert shared.lower_bound(room - less) == pytest.approx(alone.lower_bound(room - less), rel=1e-9)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.8])
def test_repeated_blocks_are_planned_as_closely_as_others(fraction: float) -> None:
    chain = repeated_chain(120)
    limit = limit_between(chain, fraction)
    sequence = solve(chain, limit)
    assert sequence.lower_bound is not None
    assert simulate(chain, sequence).peak <= limit
    assert simulate(chain, sequence).makespan <= sequence.lower_bound * 1.005


def test_a_table_that_would_be_too_large_is_made_coarser_and_the_bound_still_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = random_chain(50)
    limit = limit_between(chain, 0.3)
    close = solve(chain, limit)
    monkeypatch.setattr(program, "THOROUGH", Effort(THOROUGH.close, pairs=1e6, nbytes=2**20))
    coarse = solve(chain, limit)
    assert close.lower_bound is not None
    assert coarse.lower_bound is not None
    assert simulate(chain, coarse).peak <= limit
    assert coarse.lower_bound <= close.lower_bound * (1 + 1e-9)
    assert simulate(chain, coarse).makespan >= close.lower_bound


def test_groups_of_stages_only_make_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(70)
    limit = limit_between(chain, 0.2)
    grouped = solve(chain, limit)
    monkeypatch.setattr(program, "_GROUP", 1000)
    alone = solve(chain, limit)
    assert simulate(chain, alone).makespan == pytest.approx(simulate(chain, grouped).makespan, rel=0.005)
    assert alone.lower_bound is not None
    assert grouped.lower_bound is not None
    assert math.isclose(alone.lower_bound, grouped.lower_bound, rel_tol=0.005)


def test_what_coarse_chains_promise_is_true_of_the_chain_itself() -> None:
    from rotor_solver.persistent.program import coarse_chain, fine_sequence
    from rotor_solver.segments import even_segments

    chain = random_chain(23)
    for count in (1, 4, 7, 23):
        groups = even_segments(23, count)
        coarse = coarse_chain(chain, groups)
        for limit in np.linspace(min_bytes(coarse), simulate(coarse, store_all(coarse)).peak, 5).astype(int).tolist():
            sequence = solve(coarse, limit)
            promised, real = simulate(coarse, sequence), simulate(chain, fine_sequence(chain, groups, sequence))
            assert real.peak <= promised.peak <= limit
            assert real.makespan == pytest.approx(promised.makespan)
