"""Tables number by number against the recurrence, their windows, and the example of the Note."""

import inspect
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import chains as benchmarks
from rotor_solver import Chain, InfeasibleError, InvalidStateError, Option, Persistent, Stage, frontier, simulate, solve
from rotor_solver.grouping import coarse_chain, fine_sequence, stored_bound
from rotor_solver.persistent import table_kernels
from rotor_solver.persistent.layout import Problem, Spacing, nodes_of
from rotor_solver.persistent.recurrence import optimum
from rotor_solver.persistent.table import Table
from rotor_solver.persistent.table_kernels import need_of
from rotor_solver.segments import even_segments, min_bytes, recompute_all, store_all
from rotor_solver.watching import watched
from tests.fields import raises
from tests.solver.long_chains import fresh_process, limit_between, random_chain, repeated_chain, rich_chain
from tests.solver.naive import exhaustive_optimum, naive_optimum
from tests.solver.plans import least_limit, makespan
from tests.solver.strategies import limited, plain_chains, rich_chains


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_jit_policy` compares plain Python with them."""
    fresh_process(monkeypatch, spent=math.inf)


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
        for node, i in enumerate(grid.stage.tolist()):
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


def filled_table(chain: Chain, fraction: float, slots: int, limit: float = 10.0, spacing: Any = None) -> Table:
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


@pytest.mark.parametrize(("seed", "fraction", "limit"), [(0, 0.3, 0.1), (1, 0.3, 0.4), (2, 0.8, 10.0)])
def test_every_number_is_that_of_the_recurrence_but_for_times_above_the_limit(seed, fraction, limit) -> None:
    chain = rich_chain(14 + seed, seed, whole=seed % 2 == 1)
    filled = filled_table(chain, fraction, 150, limit)
    grid, left_out = filled.grid, 0
    for (node, last), expected in plain_rows(filled).items():
        i = int(grid.stage[node])
        if last < len(chain) and last > grid.band[i]:
            continue
        row = grid.tail + node if last == len(chain) else grid.start[node] + last - i
        found, useful = row_values(filled, row), expected <= filled.rows.limit[row]
        assert found[useful] == pytest.approx(expected[useful], rel=1e-9), (i, grid.state[node], last)
        assert not np.isfinite(found[~useful]).any()
        left_out += int(np.isfinite(expected[~useful]).sum())
    assert left_out > 100 or limit > 1


SPACINGS = [Spacing(1), Spacing(3), Spacing(2, 4)]


@pytest.mark.parametrize(("seed", "spacing"), [*enumerate(SPACINGS)])
def test_no_number_exceeds_that_of_an_interval_it_stands_for(seed: int, spacing: Spacing) -> None:
    chain, fraction = rich_chain(25 + seed, seed, whole=seed == 1), [0.02, 0.2, 0.5][seed]
    few = filled_table(chain, fraction, 120, spacing=spacing)
    plain, grid, below = plain_rows(few), few.grid, 0
    for row, (node, last) in enumerate(zip(nodes_of(grid), grid.last, strict=True)):
        found = row_values(few, row)
        for stage in range(last, int(grid.stop[last])):
            assert (found <= plain[node, stage] * (1 + 1e-9)).all(), (grid.stage[node], last, stage)
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
    unit, windows = max(1, room // (finer * slots)), coarse.windows(good * above)
    inside, everything = (Table(problem, room, unit, good * above, later, windows=each) for each in (windows, None))
    inside.fill()
    everything.fill()
    return coarse, inside, everything, good


def repeated(seed: int) -> Chain:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, (3, 2)).tolist()
    kinds = tuple(Stage(a, (Option(1 + rng.uniform(), 2.0, a + s),)) for a, s in sizes)
    return Chain(kinds * 16, kinds[-1].activation)


@pytest.mark.parametrize("slots", [3, 12])
@pytest.mark.parametrize(
    ("seed", "fraction", "above"), [(0, 0.0, 1.0), (1, 0.05, 1.2), (2, 0.3, 1.0), (0, 0.3, 1.2), (3, 0.1, 1.0)]
)
def test_where_slots_are_exact_the_optimum_is_inside(seed: int, fraction: float, above: float, slots: int) -> None:
    chain = rich_chain(12 + seed, seed, whole=True) if seed < 3 else repeated(0)
    coarse, inside, everything, good = tables(chain, fraction, slots, 10**6, above)
    assert any(len(set(each.owner.tolist())) < len(each.owner) for each in (coarse, inside)) or seed < 3
    assert inside.grid.unit == 1 < coarse.grid.unit
    assert everything.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    assert inside.lower_bound(inside.room) == pytest.approx(good, rel=1e-6)
    _, seconds = inside.sequence(inside.room, good * above * (1 + 1e-6))
    assert seconds == pytest.approx(good, rel=1e-6)


@pytest.mark.parametrize(("seed", "slots", "above"), [(0, 10, 1.3), (1, 10**6, 1.0)])
@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_optimum_lies_inside_their_windows(seed: int, spacing: Spacing, slots: int, above: float) -> None:
    chain = rich_chain(24 + seed, seed, whole=True)
    later, exact = np.zeros(len(chain) + 1), filled_table(chain, 0.03 * seed, 10**6, 2.0)
    problem, room = exact.problem, exact.room
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


def test_most_of_a_long_chain_lies_outside_and_the_bound_inside_is_as_good() -> None:
    coarse, inside, everything, good = tables(random_chain(80), 0.2, 300, 4, 1.0)
    assert inside.size < 0.2 * everything.size
    assert inside.guess < 0.05 * everything.guess
    assert everything.lower_bound(inside.room) <= inside.lower_bound(inside.room) * (1 + 1e-9)
    assert inside.lower_bound(inside.room) <= good
    windows = coarse.windows(coarse.scale)
    assert np.isfinite(windows.outside[0, 80])
    assert 0.005 < np.isfinite(windows.outside).mean() < 0.2


NOTE = " ".join(line.removeprefix("#").strip() for line in (inspect.getdoc(table_kernels) or "").splitlines())
NOTE = " ".join(NOTE.split())
ROOM, SCALE = 96, 16.0  # a power of two: times stay whole numbers
TIMES = [1, 2, 3, 2, 1], [2, 4, 6, 4, 2, 0]
EXAMPLE = Chain.from_arrays(*TIMES, [8] * 6, [24, 40, 16, 32, 24], [0] * 5, [0] * 6)


def table_of(unit: int, scale: float = SCALE, windows: Any = None) -> Table:
    return Table(Problem(EXAMPLE), ROOM, unit, scale, np.zeros(6), windows=windows)


def line(table: Table, row: int) -> str:
    rows, i = table.rows, table.grid.stage[nodes_of(table.grid)[row]]
    begin, high, position = int(rows.begin[row]), int(rows.high[row]), int(rows.position[row])
    values = table.values[position + begin : position + high] * SCALE
    changes = [m for m in range(high - begin) if m == 0 or values[m] != values[m - 1]]
    steps = ", ".join(f"{values[m]:g} from {begin + m}" for m in changes) or "none"
    return f"[{i}, {table.grid.last[row]}] {begin} {high} {rows.final[row] * SCALE:g} {steps}"


def test_the_example_of_the_note_has_these_rows_and_windows() -> None:
    table = table_of(4)
    table.fill()
    places = zip(table.grid.stage[nodes_of(table.grid)].tolist(), table.grid.last.tolist(), strict=True)
    rows = {place: row for row, place in enumerate(places)}
    for interval in ((0, 0), (0, 1), (0, 2), (2, 5), (3, 5), (4, 5), (0, 5)):
        assert line(table, rows[interval]) in NOTE
    best = simulate(EXAMPLE, solve(EXAMPLE, ROOM + 8)).makespan - table.problem.stored
    found = table.windows(best)
    reached = {(i, last): found.low[i, last] for i, last in np.argwhere(np.isfinite(found.outside)).tolist()}
    assert reached == {(0, 1): 77, (0, 5): 93, (1, 1): 53, (2, 5): 85, (3, 5): 69, (4, 5): 37, (5, 5): 5}
    assert "7 of the 21 rows have a window: [0, 1] from 77 bytes on, [1, 1] from 53, [2, 5] from 85" in NOTE
    assert "[3, 5] from 69, [4, 5] from 37, the loss from 5, and [0, 5] from 93 to 100" in NOTE
    finer = [each.rows for each in (table_of(1, best, found), table_of(1, best))]
    assert [int(np.maximum(0, each.high - each.begin).sum()) for each in finer] == [14, 172]
    assert "has 14 entries; without windows it would have 172" in NOTE


@settings(max_examples=24, deadline=None)
@given(limited(plain_chains()))
def test_plans_are_as_fast_as_the_best_of_all_persistent_sequences(case: tuple[Chain, int]) -> None:
    assert makespan(Persistent(), *case) == exhaustive_optimum(*case, persistent=True)


@settings(max_examples=36, deadline=None)
@given(limited(rich_chains(max_stages=6)), st.integers(1, 12))
def test_plans_bounds_and_the_least_limit_are_what_the_recurrence_says_and_hold_with_coarse_slots(case, slots) -> None:
    chain, found = case[0], makespan(Persistent(), *case)
    assert found == naive_optimum(*case) <= makespan(Persistent(slots), *case)
    assert optimum(*case) == pytest.approx(found)
    stored = store_all(chain)
    if math.isfinite(found):  # one byte per slot: nothing is rounded
        assert solve(*case).lower_bound == pytest.approx(found)
        assert solve(*case, slots=slots).lower_bound <= found
        assert stored.lower_bound <= stored_bound(*case, stored.lower_bound) <= found * (1 + 1e-9)
    assert solve(chain, simulate(chain, stored).peak + slots - 1) == stored
    least = least_limit(Persistent(), chain)
    assert least == min_bytes(chain) == simulate(chain, recompute_all(chain)).peak
    assert math.isinf(naive_optimum(chain, least - 1))


@settings(max_examples=20, deadline=None)
@given(rich_chains(max_stages=8), st.integers(1, 8), st.integers(0, 60))
def test_a_coarse_sequence_fits_whenever_it_seems_to(chain: Chain, count: int, more: int) -> None:
    groups = even_segments(len(chain), count)
    coarse = coarse_chain(chain, groups)
    least = recompute_all(coarse)
    middle = solve(coarse, simulate(coarse, least).peak + more)
    for sequence in (store_all(coarse), least, middle):
        seeming, true = simulate(coarse, sequence), simulate(chain, fine_sequence(chain, groups, sequence))
        assert true.peak <= seeming.peak
        assert abs(true.makespan - seeming.makespan) < 1e-9


RUNS = Chain(tuple(stage for stage in random_chain(3, seed=4).stages for _ in range(40)), 10**7)


@pytest.mark.parametrize("chain", [random_chain(120), repeated_chain(120), RUNS])
def test_the_certified_gap_is_below_half_a_percent(chain: Chain) -> None:
    for limit in (limit_between(chain, fraction) for fraction in (0.0, 0.003, 0.1, 0.6)):
        plan = solve(chain, limit)
        found = simulate(chain, plan)
        assert found.peak <= limit
        assert plan.lower_bound <= found.makespan <= plan.lower_bound * 1.005


@pytest.mark.parametrize(("seed", "fraction"), [(0, 0.3), (6, 0.5)])
def test_no_gap_is_left_where_the_work_suffices(seed: int, fraction: float) -> None:
    rng, length = np.random.default_rng(seed), 100
    sizes = rng.integers(1, 10, length + 1)
    times = rng.integers(1, 10, length), rng.integers(1, 20, length + 1)
    scratch = [0] * length, [0] * (length + 1)
    chain = Chain.from_arrays(*times, sizes, sizes[1:] + rng.integers(0, 12, length), *scratch)
    limit = limit_between(chain, fraction)
    plan = solve(chain, limit, slots=limit)
    best = simulate(chain, plan).makespan
    assert plan.lower_bound == pytest.approx(best, rel=1e-9)
    assert makespan(Persistent(limit, work=0), chain, limit) > best


def test_tables_that_lower_no_gap_end_the_search() -> None:
    """Beside 10 TB, a byte is nothing to any table: 21 of them took 90 seconds."""
    big, tables = 10**13, set[str]()
    sizes = [3, 7 * big, 4 * big, 3 * big, 7, 3, 4 * big, 6 * big, 5]
    saved = [7 * big + 1, 11 * big, 8 * big, 3 * big + 7, 10, 4 * big + 3, 6 * big + 4, 2 * big + 5]
    chain = Chain.from_arrays([4, 4, 8, 2, 5, 3, 1, 7], [1, 3, 4, 4, 1, 8, 6, 8, 1], sizes, saved, [0] * 8, [0] * 9)
    with watched(lambda _done, _total, table: tables.add(table)):
        plan = solve(chain, limit_between(chain, 0.5))
    assert simulate(chain, plan).makespan > 1.02 * plan.lower_bound
    assert len(tables) < 12


def test_more_memory_is_never_slower() -> None:
    chain = benchmarks.random_chain(32, 13)
    limits = [limit_between(chain, each / 40) for each in range(30, 40)]
    for work, slower in ((0, True), (1e8, False)):
        seconds = [makespan(Persistent(work=work), chain, limit) for limit in limits]
        assert any(after > before * (1 + 1e-12) for before, after in pairwise(seconds)) == slower
    found = frontier(chain, limits, slots=20).makespans
    assert list(found) == sorted(found, reverse=True)


def test_a_very_long_chain_is_planned_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_solver.grouping._LONGEST", 900)
    chain = repeated_chain(1000, 2)
    least, whole = min_bytes(chain), simulate(chain, store_all(chain)).peak
    limit = least + whole // 10
    plan = solve(chain, limit)
    found = simulate(chain, plan)
    assert found.peak <= limit
    assert plan.lower_bound <= found.makespan <= 1.07 * plan.lower_bound
    with raises(InfeasibleError, "limit_too_small", min_bytes=least):
        solve(chain, least - 1)
    assert simulate(chain, recompute_all(chain)).peak <= least < 0.02 * whole


def test_tables_beyond_memory_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "fill", Mock(side_effect=MemoryError))
    with raises(InvalidStateError, "tables_too_large", name="solve"):
        Persistent().solve(random_chain(30), limit_between(random_chain(30), 0.2))


@pytest.mark.parametrize(("period", "fraction", "gradient"), [(1, 0.02, 0), (3, 0.5, 0), (3, 0.02, 10**7)])
def test_shared_rows_change_no_number(period: int, fraction: float, gradient: int) -> None:
    """The same table, with rows shared and with every row computed. Gradients make the later stages different."""
    plain = repeated_chain(100, period)
    stages = [replace(stage, gradient=gradient) for stage in plain.stages]
    stages[4] = replace(stages[4], nograd_time=7.0)  # another kind, of the same sizes
    chain = replace(plain, stages=tuple(stages))
    problem, room = Problem(chain), limit_between(chain, fraction) - chain.input_bytes
    scale = simulate(chain, problem.least_sequence()).makespan - problem.stored
    shared = Table(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    assert (shared.owner != np.arange(len(shared.owner))).any() == (gradient == 0)
    shared.fill()
    alone = Table(problem, room, room // 300, scale, np.zeros(len(chain) + 1))
    alone.owner = np.arange(len(alone.owner))
    sizes = np.maximum(0, alone.rows.high - alone.rows.begin) + 1
    position = np.cumsum(sizes) - sizes - alone.rows.begin
    alone.rows, alone.size = alone.rows._replace(position=position), int(sizes.sum())
    alone.fill()
    assert shared.later() == pytest.approx(alone.later(), rel=1e-9)
    for less in (0, room // 7, room // 3):
        assert shared.lower_bound(room - less) == pytest.approx(alone.lower_bound(room - less), rel=1e-9)
