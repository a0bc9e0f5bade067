"""What a watcher of the solver is told, and that watching changes nothing."""

import numpy as np
import pytest

from rotor_solver import Persistent, frontier, jit_policy, watched
from rotor_solver.jit_policy import PREPARING
from tests.solver.long_chains import repeated_chain, rich_chain
from tests.solver.persistent.test_table import compiled_kernels as compiled_kernels
from tests.solver.persistent.test_table import filled_table
from tests.solver.strategies import unit_chain


@pytest.mark.parametrize("kind", ["different", "repeated"])
def test_a_watched_table_is_filled_in_portions_and_is_the_same_table(kind: str) -> None:
    chain = rich_chain(150, 1, whole=False) if kind == "different" else repeated_chain(100, 2)
    told = []
    expected = filled_table(chain, 0.4, 200)
    with watched(lambda *state: told.append(state)):
        found = filled_table(chain, 0.4, 200)
    told = [state for state in told if state[2] != PREPARING]
    assert found.lower_bound(found.room) == expected.lower_bound(expected.room)
    assert np.array_equal(found.later(), expected.later())
    done = [state[0] for state in told]
    assert done == [0, *sorted({*done} - {0})]
    assert {(total, what) for _, total, what in told} == {(done[-1], f"{len(chain)} stages, {found.grid.width} slots")}
    assert len(done) > 5
    assert np.diff(done).max() <= 0.2 * done[-1]


def test_a_frontier_tells_of_compiling_then_of_its_tables_and_then_its_limits(monkeypatch) -> None:
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: False)
    told = []
    with watched(lambda *state: told.append(state)):
        found = frontier(unit_chain(30), slots=40)
    limits = [state for state in told if state[2] == "limits"]
    assert [state[0] for state in limits] == list(range(limits[0][1]))
    assert len(limits) >= len(found)
    assert told[0] == (0, 0, PREPARING)
    assert next(what for _, _, what in told if what != PREPARING).endswith("slots")


def test_a_watcher_is_told_nothing_after_the_block_and_may_interrupt_the_solver() -> None:
    told = []
    with watched(lambda *state: told.append(state)):
        pass
    Persistent().solve(unit_chain(30), 12)
    assert told == []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(interrupt):
        Persistent().solve(unit_chain(30), 12)
