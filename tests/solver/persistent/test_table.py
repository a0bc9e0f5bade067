"""Tables number by number against the recurrence, their windows, and the example of the Note."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, simulate, solve
from rotor_solver.persistent import table_kernels
from rotor_solver.persistent.layout import Problem, Spacing, nodes_of, period_of
from rotor_solver.persistent.table import Table
from rotor_solver.persistent.table_kernels import need_of
from tests.solver.long_chains import limit_between, random_chain, rich_chain


def plain_rows(filled: Table) -> dict[tuple[int, int], np.ndarray]:
    """[slots] by (node, last stage): the recurrence of `kernels.fill`, slot by slot."""
    costs, grid, problem = filled.costs, filled.grid, filled.problem
    length, slots = len(problem.chain), np.arange(grid.width)
    rows: dict[tuple[int, int], np.ndarray] = {}

    def after(row: np.ndarray, size: int, node: int, following: int) -> np.ndarray:
        """The row as seen from `node`, with `size` bytes less."""
        shift = (size + int(grid.offset[following]) - int(grid.offset[node])) // grid.unit
        seen = np.full(grid.width, np.inf)
        seen[slots >= shift] = row[np.minimum(slots - shift, grid.width - 1)[slots >= shift]]
        return seen

    for distance in range(length + 1):
        for node, i in enumerate(grid.place.tolist()):
            last, state, memory = i + distance, int(grid.state[node]), slots * grid.unit + int(grid.offset[node])
            if last > length:
                continue
            found = np.full(grid.width, np.inf) if i < length else np.zeros(grid.width)
            for k in range(costs.first[i], costs.first[i + 1]) if i < length else ():
                following = int(grid.node[1, i + 1])
                rest = after(rows[following, last], costs.taken[state, k], node, following) if last > i else 0.0
                fits = memory >= need_of(costs, grid, state, i, last, k)
                found = np.minimum(found, np.where(fits, costs.extra[k] + rest, np.inf))
            for j in range(i + 1, last + 1):
                at = int(grid.node[0, j])
                whole = after(rows[at, last], costs.activation[j], node, at) + rows[node, j - 1]
                fits = memory >= costs.base[last] + costs.check_need[i, j]
                found = np.minimum(found, np.where(fits, costs.run[j] - costs.run[i] + whole, np.inf))
            found[memory >= problem.full[state, i, last]] = 0
            found[memory < problem.least[state, i, last]] = np.inf
            rows[node, last] = found
    return rows


def filled_table(
    chain: Chain, fraction: float, slots: int, limit: float = 10.0, spacing: Spacing | None = None
) -> Table:
    """A table of plans that take up to `limit` times the longest."""
    problem, room = Problem(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = limit * (simulate(chain, problem.least_sequence()).makespan - problem.stored)
    made = Table(problem, room, max(1, room // slots), scale, np.zeros(len(chain) + 1), spacing=spacing)
    made.fill()
    return made


def row_values(filled: Table, row: int) -> np.ndarray:
    begin, high, start = (int(values[row]) for values in (filled.rows.begin, filled.rows.high, filled.rows.position))
    found = np.full(filled.grid.width, np.inf)
    found[begin:high] = filled.values[start + begin : start + high]
    found[max(begin, high) :] = 0
    return found


@pytest.mark.parametrize(("seed", "whole"), [(0, False), (1, True), (2, False)])
def test_every_number_is_that_of_the_recurrence(seed: int, whole: bool) -> None:
    chain = rich_chain(15 + seed, seed, whole=whole)
    filled = filled_table(chain, [0.15, 0.4, 0.8][seed], 100)
    grid, expected = filled.grid, plain_rows(filled)
    assert len(expected) > len(chain) ** 2 / 2
    for (node, last), values in expected.items():
        row = grid.tail + node if last == len(grid.band) else grid.start[node] + last - grid.place[node]
        assert row_values(filled, row) == pytest.approx(values, rel=1e-9), (grid.place[node], grid.state[node], last)


@pytest.mark.parametrize(("seed", "limit"), [(0, 0.1), (1, 0.4)])
def test_rows_omit_only_times_above_their_limit(seed: int, limit: float) -> None:
    chain = rich_chain(22, seed, whole=seed % 2 == 0)
    filled = filled_table(chain, 0.3, 200, limit)
    grid, rows = filled.grid, filled.rows
    left_out = 0
    for (node, last), expected in plain_rows(filled).items():
        i = int(grid.place[node])
        if last < len(chain) and last > grid.band[i]:
            continue
        row = grid.tail + node if last == len(chain) else grid.start[node] + last - i
        found = row_values(filled, row)
        useful = expected <= rows.limit[row]
        assert found[useful] == pytest.approx(expected[useful], rel=1e-9)
        assert not np.isfinite(found[~useful]).any()
        left_out += int(np.isfinite(expected[~useful]).sum())
    assert left_out > 100


SPACINGS = [Spacing(1), Spacing(3), Spacing(2, 4)]


@pytest.mark.parametrize("spacing", SPACINGS)
def test_an_interval_that_begins_later_ends_wherever_an_earlier_one_does(spacing: Spacing) -> None:
    for length in (1, 2, 7, 100):
        ended = spacing.ended(length)
        assert ended.diagonal().all()
        assert ended[:, -1].all()
        assert not np.tril(ended, -1).any()
        for i in range(length - 1):
            assert not (ended[i, i + 1 :] & ~ended[i + 1, i + 1 :]).any()


def test_rows_are_about_as_many_for_every_doubling_of_length() -> None:
    for parts in (1, 4, 16):
        ended = Spacing(parts).ended(1024)[0]
        for doubling in range(int(np.log2(2 * parts)), 10):
            assert parts - 1 <= np.count_nonzero(ended[2**doubling : 2 ** (doubling + 1)]) <= parts + 1
        assert ended[: 2 * parts].all()
        assert not Spacing(parts).dense(1024)
        assert Spacing(parts).dense(2 * parts)
    assert Spacing(3, 5).dense(15)
    assert not Spacing(3, 5).dense(17)


def test_a_chain_has_a_period_if_most_of_it_repeats_itself_without_a_break() -> None:
    turns, zeros = np.arange(90) % 3, np.zeros(40, np.int64)
    periodic = {3: [turns, np.concatenate([[7], turns, [8, 9]])], 1: [zeros]}
    broken = np.concatenate([turns[:45], [5], turns[:44]])
    periodic[0] = [np.arange(90) // 30, broken, np.arange(50), zeros[:0], zeros[:1]]
    for period, kinds in periodic.items():
        assert [period_of(each) for each in kinds] == [period] * len(kinds)


@pytest.mark.parametrize(("seed", "spacing"), [*enumerate(SPACINGS)])
def test_no_number_exceeds_that_of_an_interval_it_stands_for(seed: int, spacing: Spacing) -> None:
    chain, fraction = rich_chain(25 + seed, seed, whole=seed == 1), [0.02, 0.2, 0.5][seed]
    few = filled_table(chain, fraction, 120, spacing=spacing)
    plain, grid, below = plain_rows(few), few.grid, 0
    for row, (node, last) in enumerate(zip(nodes_of(grid), grid.last, strict=True)):
        found = row_values(few, row)
        for stage in range(last, int(grid.stop[last])):
            assert (found <= plain[node, stage] * (1 + 1e-9)).all(), (grid.place[node], last, stage)
            below += int((found < plain[node, stage]).sum())
    assert below > 0
    assert few.lower_bound(few.room) <= filled_table(chain, fraction, 120).lower_bound(few.room)


def tables(chain: Chain, fraction: float, slots: int, finer: int, above: float) -> tuple[Table, Table, Table, float]:
    """A coarse table of plans up to `above` times a good one, a finer one in its windows, all of it, and the good."""
    limit = limit_between(chain, fraction)
    problem, room = Problem(chain), limit - chain.input_bytes
    good = simulate(chain, solve(chain, limit)).makespan - problem.stored
    later = np.zeros(len(chain) + 1)
    coarse = Table(problem, room, max(1, room // slots), good * above, later)
    coarse.fill()
    windows = coarse.windows(good * above)
    inside = Table(problem, room, max(1, room // (finer * slots)), good * above, later, windows=windows)
    everything = Table(problem, room, max(1, room // (finer * slots)), good * above, later)
    inside.fill()
    everything.fill()
    return coarse, inside, everything, good


@pytest.mark.parametrize("slots", [3, 40])
@pytest.mark.parametrize(("seed", "fraction", "above"), [(0, 0.0, 1.0), (1, 0.05, 1.2), (2, 0.3, 1.0), (0, 0.3, 1.2)])
def test_where_slots_are_exact_the_optimum_is_inside(seed: int, fraction: float, above: float, slots: int) -> None:
    chain = rich_chain(12 + seed, seed, whole=True)
    coarse, inside, everything, good = tables(chain, fraction, slots, 10**6, above)
    assert inside.grid.unit == 1 < coarse.grid.unit
    assert everything.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    assert inside.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    found, seconds = inside.sequence(inside.room, good * above * (1 + 1e-6))
    assert found is not None
    assert seconds == pytest.approx(good, rel=1e-6)


@pytest.mark.parametrize(("slots", "above"), [(10, 1.3), (10**6, 1.0)])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_lies_inside_their_windows(seed: int, spacing: Spacing, slots: int, above: float) -> None:
    chain = rich_chain(24 + seed, seed, whole=True)
    problem, room = Problem(chain), limit_between(chain, [0.0, 0.03, 0.1, 0.3][seed % 4]) - chain.input_bytes
    later = np.zeros(len(chain) + 1)
    most = 2 * (simulate(chain, problem.least_sequence()).makespan - problem.stored)
    exact = Table(problem, room, 1, most, later)
    exact.fill()
    good = exact.lower_bound(room)
    windows, bounds = None, []
    for each in (spacing, Spacing(4 * spacing.parts, spacing.period), None):
        unit = max(1, room // slots) if each else 1
        filled = Table(problem, room, unit, good * above, later, spacing=each, windows=windows)
        filled.fill()
        bounds.append(filled.lower_bound(room))
        windows = filled.windows(good * above)
    assert max(bounds) <= good * (1 + 1e-6)
    assert bounds[-1] == pytest.approx(good, rel=1e-6)


@pytest.mark.parametrize(("seed", "above"), [(0, 1.0), (1, 1.1)])
def test_shared_rows_have_windows_that_are_right_for_all_of_them(seed: int, above: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, (3, 2)).tolist()
    kinds = tuple(Stage(a, (Option(1 + rng.uniform(), 2.0, a + s),)) for a, s in sizes)
    chain = Chain(kinds * 16, kinds[-1].activation)
    coarse, inside, _, good = tables(chain, 0.1 + 0.1 * seed, 12, 10**6, above)
    assert any(len(set(each.owner.tolist())) < len(each.owner) for each in (coarse, inside))
    assert inside.grid.unit == 1 < coarse.grid.unit
    assert inside.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)


def test_most_of_a_long_chain_lies_outside_and_the_bound_inside_is_as_good() -> None:
    coarse, inside, everything, good = tables(random_chain(80), 0.2, 300, 4, 1.0)
    assert inside.size < 0.2 * everything.size
    assert inside.pairs < 0.05 * everything.pairs
    assert everything.lower_bound(inside.room) <= inside.lower_bound(inside.room) * (1 + 1e-9)
    assert inside.lower_bound(inside.room) <= good
    windows = coarse.windows(coarse.scale)
    assert np.isfinite(windows.outside[0, 80])
    assert 0.005 < np.isfinite(windows.outside).mean() < 0.2


NOTE = " ".join(line.removeprefix("#").strip() for line in (inspect.getdoc(table_kernels) or "").splitlines())
NOTE = " ".join(NOTE.split())
ROOM, SCALE = 96, 16.0  # a power of two: times stay whole numbers


def example(first_saved: int = 24) -> Chain:
    saved = [first_saved, 40, 16, 32, 24]
    return Chain.from_arrays([1, 2, 3, 2, 1], [2, 4, 6, 4, 2, 0], [8] * 6, saved, [0] * 5, [0] * 6)


def table_of(chain: Chain, unit: int, scale: float = SCALE, **more: object) -> Table:
    return Table(Problem(chain), ROOM, unit, scale, np.zeros(6), **more)  # type: ignore[arg-type] # as given


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


def test_rules_1_to_3_offsets_rows_and_final_of_the_example() -> None:
    assert table_of(example(), 4).grid.offset.tolist() == [0] * 6
    assert table_of(example(25), 4).grid.offset.tolist() == [0] + [3] * 5
    assert "the offsets of later stages would be 3" in NOTE
    table = table_of(example(), 4)
    assert table.size == numbers(table) + len(table.grid.last) == numbers(table) + 21
    table.fill()
    places = table.grid.place[nodes_of(table.grid)]
    found = {(int(i), int(last)): row for row, (i, last) in enumerate(zip(places, table.grid.last, strict=True))}
    for interval in ((0, 0), (0, 1), (0, 2), (2, 5), (3, 5), (4, 5), (0, 5)):
        assert line(table, found[interval]) in NOTE
    assert table.problem.full[0, 0, 5] == 152
    assert (table.values[table.rows.position + table.rows.high] == table.rows.final).all()


def test_rule_4_windows_of_plans_that_are_no_slower_than_the_best() -> None:
    chain = example()
    plan = solve(chain, ROOM + 8)
    assert str(plan) == "CF_0, Fn_1, Fe_2, Fe_3, Fe_4, L, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0"
    best = simulate(chain, plan).makespan - Problem(chain).stored
    assert best == 3
    table = filled(4)
    found = table.windows(best)
    reached = {(i, last): found.low[i, last] for i, last in np.argwhere(np.isfinite(found.outside)).tolist()}
    assert reached == {(0, 1): 77, (0, 5): 93, (1, 1): 53, (2, 5): 85, (3, 5): 69, (4, 5): 37, (5, 5): 5}
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
