"""Every number of a table against the recurrence written down plainly: no tiles, no shared or shortened rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, simulate
from rotor_solver.persistent import table
from rotor_solver.persistent.kernels import BLOCK, CHUNK, need_of
from rotor_solver.persistent.layout import Problem
from rotor_solver.persistent.table import Table
from tests.solver.persistent.test_scale import limit_between, random_chain


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
