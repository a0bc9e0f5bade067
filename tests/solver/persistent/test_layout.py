"""The layout of tables: which intervals have rows, which rows are shared, and how slots fit repeated blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rotor_solver import Chain, min_bytes, simulate, solve
from rotor_solver.persistent.layout import Problem, Spacing, Windows, fitting_unit, nodes_of, period_of
from rotor_solver.persistent.recurrence import levels, parts_of
from rotor_solver.persistent.table import Table
from tests.solver.long_chains import limit_between, random_chain, repeated_chain, rich_chain

SPACINGS = [Spacing(1), Spacing(3), Spacing(2, 4)]


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 201])
def test_an_interval_that_begins_later_ends_wherever_an_earlier_one_does(spacing: Spacing, length: int) -> None:
    ended = spacing.ended(length)
    assert ended.diagonal().all()
    assert ended[:, -1].all()
    assert not np.tril(ended, -1).any()
    for i in range(length - 1):
        assert not (ended[i, i + 1 :] & ~ended[i + 1, i + 1 :]).any()


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_rows_are_about_as_many_for_every_doubling_of_length(parts: int) -> None:
    ended = Spacing(parts).ended(1024)[0]
    for doubling in range(int(np.log2(2 * parts)), 10):
        assert parts - 1 <= np.count_nonzero(ended[2**doubling : 2 ** (doubling + 1)]) <= parts + 1
    assert ended[: 2 * parts].all()
    assert not Spacing(parts).dense(1024)
    assert Spacing(parts).ended(2 * parts)[0].all()
    assert Spacing(parts).dense(2 * parts)
    assert Spacing(3, 5).dense(15)
    assert not Spacing(3, 5).dense(17)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_row_has_room_for_all_that_it_stands_for(spacing: Spacing) -> None:
    """Its time limit and its slots are those of the interval that needs most."""
    rng = np.random.default_rng(0)
    chain = rich_chain(40, 1, whole=False)
    problem, room = Problem.of(chain), limit_between(chain, 0.3) - chain.input_bytes
    cut = 0.3 * problem.stored
    later = np.sort(rng.uniform(0, cut / 3, len(chain) + 1))[::-1].copy()
    nodes = len(Table.of(problem, room, room // 100, problem.stored, later).grid.place)
    low = rng.integers(0, room // 2, (nodes, len(chain) + 1))
    windows = Windows(low, low + rng.integers(0, room, low.shape), rng.uniform(0, cut / 3, low.shape))
    few = Table.of(problem, room, room // 100, cut, later, spacing=spacing, windows=windows)
    grid, rows, costs = few.grid, few.rows, few.costs
    for node, last in zip(*np.nonzero(grid.row[:, :-1] >= 0), strict=True):
        i, row, offset = grid.place[node], grid.row[node, last], grid.offset[node]
        limit = 1 - (later / cut)[last + 1] - (costs.split[last + 1] - costs.run[i])
        limit = min(limit, 1 - windows.outside[node, last] / cut)
        if limit < 0:
            continue
        assert rows.limit[row] >= limit
        least = max(problem.least[grid.state[node], i, last], windows.low[node, last])
        assert rows.begin[row] * grid.unit + offset < least + grid.unit or rows.begin[row] == rows.high[row]
        most = min(windows.high[node, last], problem.full[grid.state[node], i, last], room)
        assert rows.high[row] * grid.unit + offset >= most or rows.final[row] == 0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fraction", [0.05, 0.4])
def test_rows_are_shared_among_repeated_blocks_all_the_same(fraction: float, exact: bool) -> None:
    """Where slots do not fit the blocks, as some that are exact may not, only rows with the same slots are."""
    plain = repeated_chain(150, 3)
    slower = replace(plain.stages[12], nograd_time=7.0)  # another kind, of the same sizes
    chain = replace(plain, stages=(*plain.stages[:12], slower, *plain.stages[13:]))
    problem, room = Problem.of(chain), limit_between(chain, fraction) - chain.input_bytes
    few = Table.of(problem, room, room // 300, 1e3, np.zeros(len(chain) + 1), spacing=Spacing(4, 3), exact=exact)
    found, kinds, nodes = few.owner, problem.kinds, nodes_of(few.grid)
    assert exact or len(np.unique(found)) < 0.25 * len(found)
    for row, owner in enumerate(found[: few.grid.tail].tolist()):
        first, same = int(nodes[row]), int(nodes[owner])
        stages = [kinds[few.grid.place[s] : few.grid.last[r] + 1].tolist() for s, r in ((first, row), (same, owner))]
        assert stages[0] == stages[1]
        assert few.grid.offset[first] == few.grid.offset[same]


def test_a_chain_has_a_period_if_most_of_it_repeats_itself_without_a_break() -> None:
    turns = np.arange(90) % 3
    assert period_of(turns) == 3
    assert period_of(np.concatenate([[7], turns, [8, 9]])) == 3
    assert period_of(np.zeros(40, np.int64)) == 1
    assert period_of(np.arange(90) // 30) == 0
    assert period_of(np.concatenate([turns[:45], [5], turns[:44]])) == 0
    assert period_of(np.random.default_rng(0).integers(0, 3, 90)) == 0
    assert period_of(np.arange(50)) == 0
    assert period_of(np.zeros(0, np.int64)) == 0
    assert period_of(np.zeros(1, np.int64)) == 0


@pytest.mark.parametrize("unit", [1, 3, 1000, 931_000, 10**9])
def test_what_a_period_keeps_is_a_whole_number_of_slots_as_nearly_as_can_be(unit: int) -> None:
    taken = np.array([1_000_003, 64_000_000, 2**20] * 30)
    size = int(taken[:3].sum())
    found = fitting_unit(np.arange(90) % 3, 3, taken, unit)
    assert found <= unit
    if unit < size:
        assert found >= unit * 0.85
        assert size % found <= size % (size // -(-size // unit))
    else:
        assert found % size == 0


def test_where_less_fits_into_memory_a_first_table_has_more_rows() -> None:
    chain = random_chain(150)
    problem = Problem.of(chain)
    parts = [parts_of(problem, limit_between(chain, fraction)) for fraction in (0.0, 0.02, 0.2, 1.0)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > parts[-1] == 2


def test_levels_end_with_every_interval_and_exact_slots() -> None:
    chain = rich_chain(80, 3, whole=True)
    steps = list(levels(Problem.of(chain), limit_between(chain, 0.3), 50))
    units, exact, spacings = zip(*steps, strict=True)
    assert units[-1] == 1
    assert exact[-1]
    assert spacings[-1].dense(80)
    assert not spacings[0].dense(80)
    assert [each.parts for each in spacings] == sorted(each.parts for each in spacings)


@pytest.mark.parametrize("share", [0.0, 0.003, 0.02])
@pytest.mark.parametrize("kind", ["different", "in runs"])
def test_close_to_the_least_memory_the_gap_is_small_too(kind: str, share: float) -> None:
    blocks = random_chain(3, seed=4).stages
    runs = Chain(tuple(blocks[i // 40] for i in range(120)), 10**7)
    chain = random_chain(120) if kind == "different" else runs
    limit = limit_between(chain, share)
    assert limit >= min_bytes(chain)
    found = solve(chain, limit)
    assert found.lower_bound is not None
    assert simulate(chain, found).peak <= limit
    assert simulate(chain, found).makespan <= found.lower_bound * 1.005
