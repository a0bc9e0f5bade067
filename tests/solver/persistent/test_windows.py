"""Windows of a coarse table: a finer table that is only filled inside them still has the best sequence."""

from __future__ import annotations

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, simulate, solve
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.table import Table
from tests.solver.persistent.test_scale import limit_between, random_chain
from tests.solver.persistent.test_table import rich_chain


def tables(chain: Chain, fraction: float, slots: int, finer: int, above: float) -> tuple[Table, Table, Table, float]:
    """A coarse table of plans up to `above` times as long as a good one, a finer one inside the windows of the coarse
    one, and all of the finer one; and what the good plan takes longer than storing everything.
    """
    limit = limit_between(chain, fraction)
    problem, room = Problem.of(chain), limit - chain.input_bytes
    good = simulate(chain, solve(chain, limit)).makespan - problem.stored
    later = np.zeros(len(chain) + 1)
    coarse = Table.of(problem, room, max(1, room // slots), good * above, later)
    coarse.fill()
    windows = coarse.windows(good * above)
    inside = Table.of(problem, room, max(1, room // (finer * slots)), good * above, later, windows=windows)
    everything = Table.of(problem, room, max(1, room // (finer * slots)), good * above, later)
    inside.fill()
    everything.fill()
    return coarse, inside, everything, good


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_inside_the_windows_is_as_good_and_holds(seed: int, fraction: float, whole: bool) -> None:
    _, inside, everything, good = tables(rich_chain(18 + seed, seed, whole=whole), fraction, 60, 4, 1.0)
    assert everything.lower_bound(inside.room) <= inside.lower_bound(inside.room) * (1 + 1e-9)
    assert inside.lower_bound(inside.room) <= good
    assert inside.pairs <= everything.pairs


@pytest.mark.parametrize("slots", [3, 10, 40])
@pytest.mark.parametrize("above", [1.0, 1.2])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_where_slots_are_exact_the_optimum_is_inside(seed: int, fraction: float, above: float, slots: int) -> None:
    chain = rich_chain(12 + seed, seed, whole=True)
    coarse, inside, everything, good = tables(chain, fraction, slots, 10**6, above)
    assert inside.grid.unit == 1 < coarse.grid.unit
    assert everything.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    assert inside.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    found, seconds = inside.sequence(inside.room, good * above * (1 + 1e-6))
    assert found is not None
    assert seconds == pytest.approx(good, rel=1e-6)


@pytest.mark.parametrize("above", [1.0, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_shared_rows_have_windows_that_are_right_for_all_of_them(seed: int, above: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, (3, 2)).tolist()
    kinds = tuple(Stage(a, (Option(1 + rng.uniform(), 2.0, a + s),)) for a, s in sizes)
    chain = Chain(kinds * 16, kinds[-1].activation)
    coarse, inside, _, good = tables(chain, 0.1 + 0.1 * seed, 12, 10**6, above)
    assert coarse.owner is not None or inside.owner is not None
    assert inside.grid.unit == 1 < coarse.grid.unit
    assert inside.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)


def test_most_of_a_long_chain_lies_outside() -> None:
    coarse, inside, everything, _ = tables(random_chain(80), 0.2, 400, 4, 1.0)
    assert inside.size < 0.2 * everything.size
    assert inside.pairs < 0.05 * everything.pairs
    windows = coarse.windows(coarse.scale)
    assert np.isfinite(windows.outside[0, 80])
    assert 0.005 < np.isfinite(windows.outside).mean() < 0.2
