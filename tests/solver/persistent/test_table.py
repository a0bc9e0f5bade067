"""Tables number by number against the recurrence; inner loops, windows, and the example of the Note."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
from rotor_solver.persistent.kernels import BEYOND, BLOCK, CHUNK, need_of

from rotor_solver import Chain, Option, Stage, simulate, solve
from rotor_solver.persistent import kernels, table
from rotor_solver.persistent.layout import Problem, nodes_of
from rotor_solver.persistent.table import Table
from tests.solver.persistent.test_program import limit_between, random_chain


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


def rich_chain(length: int, seed: int, *, whole: bool) -> Chain:
    """Options, gradients, large scratch, inputs that are released; sizes of a few bytes if `whole`."""
    rng = np.random.default_rng(seed)
    base = random_chain(length, seed)
    unit = 2e7 if whole else 1.0
    incoming, stages = base.input_bytes, []
    for stage in replace(base, input_bytes=int(base.input_bytes / unit)).stages:
        activation, saved = int(stage.activation / unit), int(stage.options[0].saved / unit)
        scratch = [int(rng.choice([0, 1, 4]) * rng.uniform() * saved) for _ in range(4)]
        first = replace(stage.options[0], saved=saved, forward_temp=scratch[0], backward_temp=scratch[1])
        second = Option(first.forward_time * 1.4, first.backward_time, int(saved * 0.6), scratch[2], scratch[3])
        stages.append(
            Stage(
                activation,
                (first, second) if rng.uniform() < 0.3 else (first,),
                nograd_time=first.forward_time * 0.8,
                nograd_temp=int(rng.choice([0, 0, 30]) * rng.uniform() * activation),
                gradient=int(rng.choice([0, 1]) * saved // 5),
                input_released=int(rng.choice([0, 1])) * int(incoming / unit),
            )
        )
        incoming = stage.activation
    return Chain(tuple(stages), int(base.input_bytes / unit), 0.1, output_held=bool(seed % 2))


def filled_table(chain: Chain, fraction: float, slots: int, limit: float | None) -> Table:
    """A table of all plans, or of those that take up to `limit` times the longest."""
    problem, room = Problem.of(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = simulate(chain, problem.least_sequence()).makespan - problem.stored
    filled = Table.of(problem, room, max(1, room // slots), scale * (limit or 10.0), np.zeros(len(chain) + 1))
    filled.fill()
    return filled


def row_values(filled: Table, row: int) -> np.ndarray:
    begin, high, start = (int(values[row]) for values in (filled.rows.begin, filled.rows.high, filled.rows.position))
    found = np.full(filled.grid.width, np.inf)
    found[begin:high] = filled.values[start + begin : start + high]
    found[max(begin, high) :] = 0
    return found


@pytest.mark.parametrize(("seed", "parallel"), [(0, False), (1, False), (2, False), (1, True)])
@pytest.mark.parametrize("whole", [False, True])
def test_every_number_is_that_of_the_recurrence(seed: int, whole: bool, parallel: bool, monkeypatch) -> None:
    monkeypatch.setattr(table, "_SERIAL", 0 if parallel else np.inf)
    chain = rich_chain(19 + seed, seed, whole=whole)
    compared = compare(filled_table(chain, [0.15, 0.4, 0.8][seed % 3], 150, None))
    assert compared > len(chain) ** 2 / 2


@pytest.mark.parametrize("fraction", [pytest.param(0.1, marks=pytest.mark.slow), 0.4])
def test_every_number_is_that_of_the_recurrence_in_many_tiles_and_chunks(fraction: float) -> None:
    chain = random_chain(BLOCK + BLOCK // 2, 7)
    filled = filled_table(chain, fraction, 20 * CHUNK, None)
    assert compare(filled) > len(chain) ** 2 / 2
    assert filled.values.dtype == np.float64


def compare(filled: Table) -> int:
    """How many rows are as they should be: all of them."""
    grid, compared = filled.grid, 0
    for (node, last), expected in plain_rows(filled).items():
        row = grid.tail + node if last == len(grid.band) else grid.start[node] + last - grid.place[node]
        assert row_values(filled, row) == pytest.approx(expected, rel=1e-9), (grid.place[node], grid.state[node], last)
        compared += 1
    return compared


@pytest.mark.parametrize("limit", [0.1, 0.4])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_left_out_is_what_takes_too_long(seed: int, limit: float) -> None:
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


SLOTS = 7 * CHUNK


class Flat:
    """Three rows of `SLOTS` slots one after the other: one to be lowered, and two complete ones that decrease."""

    def __init__(self, rng: np.random.Generator, steep: float) -> None:
        self.begins = [int(rng.integers(0, CHUNK)) for _ in range(3)]
        size = SLOTS + BEYOND
        self.flat = np.full(3 * size, -np.inf)
        self.marks = np.full(3 * size // CHUNK, np.inf)
        self.at = [0, size, 2 * size]
        for at, begin in zip(self.at, self.begins, strict=True):
            row = np.sort(rng.uniform(0, steep, SLOTS - begin))[::-1] + rng.uniform()
            self.flat[at + begin : at + SLOTS] = row
            self.flat[at + SLOTS : at + size] = row[-1]
        for chunk in range(SLOTS // CHUNK):
            self.marks[chunk] = self.flat[max(self.begins[0], chunk * CHUNK)]
        for chunk in range(size // CHUNK, 3 * size // CHUNK):
            self.marks[chunk] = self.flat[chunk * CHUNK + CHUNK - 1]

    def row(self, which: int, shift: int = 0) -> np.ndarray:
        """Its slots as seen from a row that has `shift` slots more."""
        slots = np.arange(SLOTS) - shift
        known = slots >= self.begins[which]
        return np.where(known, self.flat[self.at[which] + np.where(known, slots, SLOTS)], np.inf)

    def check(self, expected: np.ndarray) -> None:
        begin = self.begins[0]
        assert np.array_equal(self.flat[begin:SLOTS], expected[begin:])
        tops = np.maximum(begin, np.arange(0, SLOTS, CHUNK))
        assert (self.marks[: SLOTS // CHUNK] >= self.flat[tops]).all()


@pytest.mark.parametrize("steep", [0.1, 3.0])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_would_be_less_is_left_out(seed: int, steep: float) -> None:
    rng = np.random.default_rng(seed)
    rows, shift = Flat(rng, steep), int(rng.integers(2 * CHUNK))
    out, left, right = rows.at
    for seconds in (0.4, -0.2, -0.7):
        both = seconds + (rows.row(1) + rows.row(2, shift))
        one = seconds + (0.3 + rows.row(2, shift))
        low = max(*rows.begins, rows.begins[2] + shift) + int(rng.integers(CHUNK))
        for chosen, run in ((both, _by_both), (one, _by_one)):
            expected = rows.row(0)
            expected[low:] = np.minimum(expected[low:], chosen[low:])
            run(rows, out, left, right - shift, low, seconds)
            rows.check(expected)


def _by_both(rows: Flat, out: int, left: int, right: int, low: int, seconds: float) -> None:
    kernels.lower_by_both(rows.flat, rows.marks, out, left, right, rows.begins[0], low, SLOTS, seconds)


def _by_one(rows: Flat, out: int, _left: int, right: int, low: int, seconds: float) -> None:
    kernels.lower_by(rows.flat, rows.marks, out, right, rows.begins[0], low, SLOTS, 0.3, seconds)


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
