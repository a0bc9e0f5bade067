"""Plain Python and NumPy compute what the compiled kernels do, to the last bit: no plan depends on which are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, frontier, simulate, solve, store_all
from rotor_solver.least_memory import costs_of, least_memory
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.table import Table
from tests.solver.pace import always_compiled, never_compiled
from tests.solver.persistent.test_program import limit_between
from tests.solver.persistent.test_table import filled_table, rich_chain

T = TypeVar("T")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], T]], tuple[T, T]]:
    """What a function finds without the compiled kernels, and with them."""

    def run(find: Callable[[], T]) -> tuple[T, T]:
        with monkeypatch.context() as patch:
            never_compiled(patch)
            plain = find()
        with monkeypatch.context() as patch:
            always_compiled(patch)
            return plain, find()

    return run


def repeated_chain(seed: int, times: int = 12) -> Chain:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, (3, 2)).tolist()
    kinds = tuple(Stage(a, (Option(1 + rng.uniform(), 2.0, a + s),)) for a, s in sizes)
    return Chain(kinds * times, kinds[-1].activation)


CHAINS = [rich_chain(14 + seed, seed, whole=seed % 2 == 0) for seed in range(6)] + [repeated_chain(1)]


def assert_same_rows(plain: Table, compiled: Table) -> None:
    assert plain.rows.begin.tolist() == compiled.rows.begin.tolist()
    assert plain.rows.final.tobytes() == compiled.rows.final.tobytes()
    for row in np.flatnonzero(plain.rows.limit >= 0).tolist():
        begin, high, at = (int(each[row]) for each in (plain.rows.begin, plain.rows.high, plain.rows.position))
        found = plain.values[at + begin : at + high]
        assert found.tobytes() == compiled.values[at + begin : at + high].tobytes(), row


@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
@pytest.mark.parametrize("chain", CHAINS, ids=len)
def test_all_numbers_of_a_table_and_its_windows_are_the_same(chain, fraction, limit, both) -> None:
    plain, compiled = both(lambda: filled_table(chain, fraction, 200, limit))
    assert len(plain.rows.marks) == 0 < len(compiled.rows.marks)  # one of them was filled by the kernels
    assert_same_rows(plain, compiled)
    for above in (0.1, 0.5):
        by_plain, by_kernels = both(lambda above=above: compiled.windows(compiled.scale * above))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(by_plain, by_kernels, strict=True))
        assert np.isfinite(by_kernels.outside).any() or above < 0.5


def test_rows_that_are_shared_and_rows_that_are_left_out_are_the_same(both) -> None:
    chain = repeated_chain(1, times=24)
    problem, room = Problem.of(chain), limit_between(chain, 0.2) - chain.input_bytes

    def filled() -> Table:
        table = Table.of(problem, room, 1, 20.0, np.zeros(len(chain) + 1), exact=True)
        table.fill()
        return table

    plain, compiled = both(filled)
    assert plain.owner is not None
    assert_same_rows(plain, compiled)


@pytest.mark.parametrize("chain", CHAINS, ids=len)
def test_plans_bounds_and_least_limits_are_the_same(chain, both) -> None:
    plain, compiled = both(lambda: least_memory(costs_of(chain)))
    assert plain.tolist() == compiled.tolist()
    for fraction in (0.0, 0.05, 0.3, 0.7):
        limit = limit_between(chain, fraction)
        plain_plan, plan = both(lambda limit=limit: solve(chain, limit))
        assert plain_plan == plan
        assert plain_plan.lower_bound == plan.lower_bound
        assert simulate(chain, plan).peak <= limit


def test_the_whole_curve_is_the_same(both) -> None:
    plain, compiled = both(lambda: frontier(CHAINS[1], slots=60))
    assert plain == compiled
    assert len(plain.limits) > 5


def test_a_chain_of_no_stages_and_of_one_have_a_plan(both) -> None:
    for chain in (Chain((), 3, 0.0), Chain((Stage(2, (Option(1.0, 1.0, 3),)),), 3)):
        peak = simulate(chain, store_all(chain)).peak
        assert len(set(both(lambda c=chain, limit=peak: str(solve(c, limit))))) == 1
        plain, compiled = both(lambda c=chain: least_memory(costs_of(c)).tolist())
        assert plain == compiled
