"""What a watcher of the solver is told, and that watching changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rotor_solver import Chain, Persistent, frontier, jit_policy, watched
from rotor_solver.jit_policy import PREPARING
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.table import Table
from rotor_solver.watching import Progress
from tests.solver.long_chains import fresh_process, limit_between, repeated_chain, rich_chain
from tests.solver.strategies import unit_chain

Told = list[tuple[int, int, str]]


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch, spent=math.inf)


def telling(told: Told) -> Progress:
    """A watcher that writes down what it is told, but for what is told once on a machine."""

    def tell(done: int, total: int, what: str) -> None:
        if what != PREPARING:
            told.append((done, total, what))

    return tell


def filled(chain: Chain) -> Table:
    room = limit_between(chain, 0.4) - chain.input_bytes
    made = Table(Problem(chain), room, max(1, room // 200), 1e3, np.zeros(len(chain) + 1))
    made.fill()
    return made


@pytest.mark.parametrize("kind", ["different", "repeated"])
def test_a_watched_table_is_filled_in_portions_and_is_the_same_table(kind: str) -> None:
    chain = rich_chain(150, 1, whole=False) if kind == "different" else repeated_chain(100, 2)
    told: Told = []
    expected = filled(chain)
    with watched(telling(told)):
        found = filled(chain)
    assert found.pairs == expected.pairs
    assert found.lower_bound(found.room) == expected.lower_bound(expected.room)
    assert np.array_equal(found.later(), expected.later())
    done = [state[0] for state in told]
    assert done[0] == 0
    assert done == sorted(set(done))
    assert {(total, what) for _, total, what in told} == {(done[-1], f"{len(chain)} stages, {found.grid.width} slots")}
    assert len(done) > 5
    assert np.diff(done).max() <= 0.2 * done[-1]


def test_a_frontier_tells_its_limits_after_its_tables() -> None:
    told: Told = []
    with watched(telling(told)):
        found = frontier(unit_chain(30), slots=40)
    limits = [state for state in told if state[2] == "limits"]
    assert [state[0] for state in limits] == list(range(limits[0][1]))
    assert len(limits) >= len(found)
    assert told[0][2].endswith("slots")


def test_compiling_is_told_of_before_anything_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(jit_policy, "on_disk", lambda module: False)
    told: Told = []
    with watched(lambda *state: told.append(state)):
        Persistent().solve(unit_chain(30), 12)
    assert told[0] == (0, 0, PREPARING)
    assert any(what.endswith("slots") for _, _, what in told)


def test_a_watcher_is_told_nothing_after_the_block_and_may_interrupt_the_solver() -> None:
    told: Told = []
    with watched(lambda *state: told.append(state)):
        pass
    Persistent().solve(unit_chain(30), 12)
    assert told == []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(interrupt):
        Persistent().solve(unit_chain(30), 12)
