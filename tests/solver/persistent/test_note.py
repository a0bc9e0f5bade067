"""The example of Note [Rows, chunks and windows], computed again: the Note has to say what comes out."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from rotor_solver import Chain, simulate, solve
from rotor_solver.persistent import kernels
from rotor_solver.persistent.kernels import BEYOND, CHUNK
from rotor_solver.persistent.layout import Problem, nodes_of
from rotor_solver.persistent.table import Table

NOTE = " ".join(line.removeprefix("#").strip() for line in (inspect.getdoc(kernels) or "").splitlines())
NOTE = " ".join(NOTE.split())
ROOM, SCALE = 96, 16.0  # a power of two: times stay whole numbers


def example(first_saved: int = 24) -> Chain:
    return Chain.from_arrays(
        forward_time=[1, 2, 3, 2, 1],
        backward_time=[2, 4, 6, 4, 2, 0],
        activation=[8] * 6,
        saved=[first_saved, 40, 16, 32, 24],
        forward_temp=[0] * 5,
        backward_temp=[0] * 6,
    )


def table_of(chain: Chain, unit: int, scale: float = SCALE, **more: object) -> Table:
    return Table.of(Problem.of(chain), ROOM, unit, scale, np.zeros(6), **more)  # type: ignore[arg-type] # as given


def filled(unit: int) -> Table:
    table = table_of(example(), unit)
    table.fill()
    return table


def line(table: Table, row: int) -> str:
    """A row as the Note writes it."""
    rows, i = table.rows, table.grid.place[nodes_of(table.grid)[row]]
    begin, high, position = int(rows.begin[row]), int(rows.high[row]), int(rows.position[row])
    values = table.values[position + begin : position + high] * SCALE
    changes = [m for m in range(high - begin) if m == 0 or values[m] != values[m - 1]]
    steps = ", ".join(f"{values[m]:g} from {begin + m}" for m in changes) or "none"
    return f"[{i}, {table.grid.last[row]}] {begin} {high} {rows.final[row] * SCALE:g} {steps}"


def rows_of(table: Table) -> dict[tuple[int, int], int]:
    """The number of every row by its interval."""
    places = table.grid.place[nodes_of(table.grid)]
    return {(int(i), int(last)): row for row, (i, last) in enumerate(zip(places, table.grid.last, strict=True))}


def test_rule_1_what_the_fastest_option_takes_is_whole_slots() -> None:
    assert table_of(example(), 4).grid.offset.tolist() == [0] * 6
    assert table_of(example(25), 4).grid.offset.tolist() == [0] + [3] * 5
    assert "the offsets of later stages would be 3" in NOTE
    assert all(4 * m - 25 == 4 * (m - 7) + 3 for m in range(26))


def test_rule_2_the_rows_of_the_example() -> None:
    table = filled(4)
    rows = rows_of(table)
    assert len(table.grid.last) == 21
    for interval in ((0, 0), (0, 1), (0, 2), (2, 5), (3, 5), (4, 5), (0, 5)):
        assert line(table, rows[interval]) in NOTE
    assert table.problem.full[0, 0, 5] == 152


def test_rule_3_where_their_numbers_lie() -> None:
    table = filled(4)
    row = rows_of(table)[0, 1]
    assert table.rows.position[row] == 96
    assert (table.values[112:116] * SCALE).tolist() == [1] * 4
    assert table.size == 21 * (CHUNK + BEYOND) == 21 * (32 + 64)
    assert BEYOND % CHUNK == 0
    assert (table.rows.position % CHUNK == 0).all()


def test_rule_4_chunks_that_are_skipped() -> None:
    table = filled(1)
    rows, costs, grid = table.rows, table.costs, table.grid
    row = rows_of(table)[0, 5]
    assert (rows.begin[row], rows.high[row]) == (64, 98)
    first = (int(rows.position[row]) + 64) // CHUNK
    kernels.begin_row(table.values, rows, row)
    kernels.enable(table.values, rows, costs, grid, 0, row, 5, 0)
    looked_at = {}
    for j in range(1, 6):
        looked_at[j] = kernels.checkpoints(table.values, rows, costs, grid, 0, row, 5, j, j)
        if j >= 2:  # nothing changes any more
            assert (rows.marks[first : first + 2] * SCALE).tolist() == [9, 3]
    assert looked_at == {1: 34, 2: 34, 3: 32, 4: 32, 5: 0}  # pairs of slots, by chunks that are not left out
    for j, parts, total in ((3, (6, 0, 1), 7), (4, (8, 0, 3), 11)):
        right, left = rows_of(table)[j, 5], rows_of(table)[0, j - 1]
        assert (costs.split[j] * SCALE, mark(table, right, 95 - 8), mark(table, left, 95)) == parts
        assert f"a_{j} chunk 64: {parts[0]} + {parts[1]} + {parts[2]} = {total}" in NOTE


def mark(table: Table, row: int, slot: int) -> float:
    """The mark of the chunk in which a slot of a complete row lies."""
    return float(table.rows.marks[(int(table.rows.position[row]) + slot) // CHUNK] * SCALE)


def test_rule_5_windows_of_plans_that_are_no_slower_than_the_best() -> None:
    chain = example()
    best = simulate(chain, solve(chain, ROOM + 8)).makespan - Problem.of(chain).stored
    assert best == 3
    table = filled(4)
    found = table.windows(best)
    reached = np.argwhere(np.isfinite(found.outside)).tolist()
    assert [[i, last, int(found.low[i, last])] for i, last in reached] == [
        [0, 1, 77],
        [0, 5, 93],
        [1, 1, 53],
        [2, 5, 85],
        [3, 5, 69],
        [4, 5, 37],
        [5, 5, 5],
    ]
    assert "7 of the 21 rows have a window: [0, 1] from 77 bytes on, [1, 1] from 53, [2, 5] from 85" in NOTE
    assert "[3, 5] from 69, [4, 5] from 37, the loss from 5, and [0, 5] from 93 to 100" in NOTE
    assert found.high[0, 5] == 100
    assert found.outside[0, 1] == 3
    assert table.costs.run[3] * SCALE == 6
    finer = table_of(chain, 1, best, windows=found)
    assert (numbers(finer), numbers(table_of(chain, 1, best))) == (14, 172)
    assert "has 14 numbers; without windows it would have 172" in NOTE
    finer.fill()
    sequence, seconds = finer.sequence(ROOM, 2 * best)
    assert sequence is not None
    assert seconds == pytest.approx(best)
    assert simulate(chain, sequence).peak <= ROOM + 8


def numbers(table: Table) -> int:
    """Slots that are computed, all rows together."""
    return int(np.maximum(0, table.rows.high - table.rows.begin).sum())


def test_a_plan_of_the_example_by_hand() -> None:
    chain = example()
    assert str(solve(chain, ROOM + 8)) == ("CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0")
