"""The floating program against a slow twin, a search over all sequences, and the persistent program."""

import math
import pickle
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, Persistent, frontier, limit_for, min_bytes, simulate, solve, store_all
from rotor_solver.floating import Floating
from rotor_solver.max_flow import Network
from rotor_solver.persistent.table import Table
from tests.fields import raises
from tests.solver.long_chains import limit_between, random_chain
from tests.solver.naive import beside, columns_of, exhaustive_optimum, naive_optimum, with_graph
from tests.solver.plans import least_limit, makespan
from tests.solver.strategies import limited, plain_chains, rich_chains, unit_chain


def naive_floating(chain: Chain, limit: int) -> float:
    length, columns, sizes = len(chain), columns_of(chain), chain.activation

    @cache
    def best(s: int, t: int, last: int, memory: int, inside: bool) -> float:
        """`memory` does not count a_s if it is `inside` the ā_s of the stage before, and counts it otherwise."""
        if t > last:
            return 0.0
        room = memory - (0 if inside else sizes[s])
        if s == length:
            return chain.loss_time if room >= sizes[length] + chain.loss_temp else math.inf
        times = [math.inf]
        for option in chain.stages[s].options if s == t else ():
            need, seconds = with_graph(columns, s, last, option, inside)
            if room >= need:
                rest = room + columns.released[s][inside] - option.saved
                times.append(seconds + best(s + 1, s + 1, last, rest, True))
        if room >= beside(columns, last) + sizes[s + 1] + columns.nograd_temp[s]:
            if s < t:
                times.append(columns.nograd_time[s] + best(s + 1, t, last, memory, False))
            for j in range(t + 1, last + 1):
                both = best(s + 1, j, last, room, False) + best(s, t, j - 1, memory, inside)
                times.append(columns.nograd_time[s] + both)
        return min(times)

    return best(0, 0, length, limit, False)


@settings(max_examples=30, deadline=None)
@given(limited(rich_chains()))
def test_plans_are_as_fast_and_the_least_limit_is_as_the_recurrence_says(case: tuple[Chain, int]) -> None:
    chain, limit = case
    found = makespan(Floating(), chain, limit)
    assert found == naive_floating(chain, limit)
    assert found <= naive_optimum(chain, limit)
    if math.isfinite(found):  # one byte per slot: nothing is rounded
        assert Floating().solve(chain, limit).lower_bound == pytest.approx(found)
    least = least_limit(Floating(), chain)
    assert least <= min_bytes(chain)
    assert math.isinf(naive_floating(chain, least - 1))


# Of 3606 random chains, with limits between the least and that of storing everything, 3604 were equal.
@settings(max_examples=8, deadline=None)
@given(limited(plain_chains()))
def test_plans_are_between_the_best_of_all_sequences_and_the_best_persistent_one(case: tuple[Chain, int]) -> None:
    chain, limit = case
    found = makespan(Floating(), chain, limit)
    assert exhaustive_optimum(chain, limit, persistent=False) <= found <= makespan(Persistent(), chain, limit)


def test_a_checkpoint_that_is_dropped_early_saves_a_forward_or_fits_alone() -> None:
    # In 7 bytes, a_1 can be kept until Fn_1 reads it the last time, and saves a run of stage 0. It would not fit beside
    # B_2, which needs a_0, a_2, ā_3, δ_3 and δ_2: 1 + 2 + 1 + 1 + 2. So the persistent plan runs stage 0 four times.
    chain = Chain.from_arrays([1, 0, 1, 1], [0] * 5, [1, 1, 2, 1, 1], [3, 2, 1, 2], [0] * 4, [0] * 5)
    plan = Floating().solve(chain, 7)
    assert str(plan) == "CF_0, CF_1, Fn_2, Fe_3, L, B_3, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    assert simulate(chain, plan).peak == 7
    assert simulate(chain, plan).makespan == exhaustive_optimum(chain, 7, persistent=False) == 6
    assert plan.lower_bound == pytest.approx(6)
    assert makespan(Persistent(), chain, 7) == exhaustive_optimum(chain, 7, persistent=True) == 7
    # There are limits in which only a floating checkpoint fits.
    chain = Chain.from_arrays([9, 1, 1, 1], [0] * 5, [0, 1, 3, 6, 1], [2, 4, 6, 4], [12, 0, 0, 0], [0] * 5)
    assert makespan(Floating(), chain, 18) == exhaustive_optimum(chain, 18, persistent=False) == 24
    # CF_0, Fn_1, CF_0, Fn_2 … Fn_1 keeps a_1 without counting as a checkpoint of it: not persistent.
    assert math.isinf(makespan(Persistent(), chain, 18))
    assert math.isinf(exhaustive_optimum(chain, 18, persistent=True))
    assert min_bytes(chain) == 19


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_few_slots_cost_time_but_neither_memory_nor_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_solver.floating._FINER_CHOICES", 0)
    random = np.random.default_rng(seed)
    length = int(random.integers(4, 9))
    sizes, nothing = random.integers(0, 4, length + 1), [0] * (length + 1)
    saved = 10 * random.integers(1, 4, length)  # about whole slots: only checkpoints are rounded much
    chain = Chain.from_arrays(random.integers(0, 10, length), nothing, sizes, saved, nothing[1:], nothing)
    limit = limit_between(chain, random.uniform(0, 0.9))
    slots = -(-limit // 10)
    bound, best = Floating(slots).solve(chain, limit).lower_bound, naive_floating(chain, limit)
    assert bound <= best <= makespan(Floating(slots), chain, limit) <= makespan(Persistent(slots), chain, limit)
    real = random_chain(10, seed)  # bytes that are no whole slots
    limit = limit_between(real, seed / 12)
    assert makespan(Floating(), real, limit) <= makespan(Persistent(), real, limit)


def test_chains_that_are_too_long_are_refused_and_fewer_slots_allow_longer_ones() -> None:
    for length, slots in ((200, 500), (30, 200000)):
        chain = random_chain(length)
        with raises(ValueError, "table_too_large"):
            Floating(slots).solve(chain, limit_between(chain, 0.2))
    assert len(Floating(5).solve(chain, limit_between(chain, 0.2))) > 60


@settings(max_examples=24, deadline=None)
@given(rich_chains(), st.floats(0, 3))
def test_the_frontier_is_the_optimum_at_every_limit(chain: Chain, overhead: float) -> None:
    whole = simulate(chain, store_all(chain)).peak
    found = frontier(chain)
    assert found.limits[0] == min_bytes(chain)
    assert found.makespans[-1] == found.stored == simulate(chain, store_all(chain)).makespan
    for limit in range(min_bytes(chain), whole + 2):
        assert found.makespan(limit) == naive_optimum(chain, limit)
    assert found.lower_bounds == pytest.approx(found.makespans)
    assert list(found.limits) == sorted(set(found.limits))
    assert list(found.makespans) == sorted(set(found.makespans), reverse=True)
    for limit, seconds, sequence in zip(found.limits, found.makespans, found.sequences, strict=True):
        result = simulate(chain, sequence)
        assert (result.peak, result.makespan) == (limit, seconds)
        assert found.sequence(limit) == sequence
    limit, most = found.limit_for(overhead), found.stored * (1 + overhead)
    assert found.makespan(limit) <= most
    assert limit == min_bytes(chain) or found.makespan(limit - 1) > most


def test_a_long_chain_has_a_frontier_close_to_single_plans_and_bounds_that_hold() -> None:
    chain = random_chain(40)
    found = frontier(chain)
    assert found.limits[0] == min_bytes(chain)
    assert len(found) > 20
    for limit in found.limits[:: len(found) // 5]:
        single = solve(chain, limit)
        assert found.makespan(limit) <= simulate(chain, single).makespan * 1.02
        position = found.limits.index(limit)
        assert found.lower_bounds[position] <= simulate(chain, single).makespan
        assert single.lower_bound <= found.makespans[position]
    # Where few sizes fit together
    times, size = ([38, 19] * 6, [99, 21] * 6 + [20]), 65536
    chain = Chain.from_arrays(*times, [size] * 13, [size] * 12, [5064] * 12, [16640, size] * 6 + [size])
    found, whole = frontier(chain), simulate(chain, store_all(chain)).peak
    for limit in range(min_bytes(chain), whole, (whole - min_bytes(chain)) // 20):
        assert found.makespan(limit) <= simulate(chain, solve(chain, limit)).makespan


def test_all_tables_of_a_frontier_fit_into_memory_at_once(monkeypatch) -> None:
    tables, chain = [], random_chain(100)
    monkeypatch.setattr(Table, "fill", lambda table: tables.append(table))
    with pytest.raises(TypeError):  # they are empty
        frontier(chain, slots=100_000)
    assert len(tables) > 2
    assert sum(8 * table.size for table in tables) < 1.2 * 2**30


def test_a_frontier_has_only_the_limits_that_were_asked_for_and_bad_questions_are_refused_in_words() -> None:
    chain = unit_chain(12)
    least, whole = min_bytes(chain), simulate(chain, store_all(chain)).peak
    found = frontier(chain, [whole + 100, least - 1, least + 3, 7.9])
    assert found.limits == (7, least + 3, whole + 100)
    singles = [simulate(chain, solve(chain, limit)).makespan for limit in found.limits]
    assert [found.makespan(limit) for limit in found.limits] == singles
    assert len(frontier(chain, [0])) == 0
    assert limit_for(chain, 0.1) == frontier(chain).limit_for(0.1)
    chain = unit_chain(4)
    found = frontier(chain)
    for overhead in (-0.1, math.nan):
        with raises(ValueError, "not_an_overhead"):
            limit_for(chain, overhead)
    with raises(ValueError, "not_a_count", name="slots"):
        frontier(chain, slots=0)
    with raises(ValueError, "not_bytes", name="mem_limit"):
        frontier(chain, ["4GB"])  # type: ignore[list-item] # that is the point
    with raises(InfeasibleError, "limit_too_small", min_bytes=5, mem_limit=4):
        found.sequence(4)
    with raises(ValueError, "overhead_too_low", got=0):
        frontier(chain, [5]).limit_for(0)


def test_overheads_are_drawn_as_the_ending_says_or_the_error_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    found, (svg, png, txt) = frontier(unit_chain(6)), (tmp_path / f"curve.{each}" for each in ("svg", "png", "txt"))
    assert pickle.loads(pickle.dumps(found)) == found
    found.plot(svg)
    found.plot(str(png))
    assert "more time than storing everything" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="txt"):
        found.plot(txt)
    drawn: list[list[float]] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda f, *_, **__: drawn.extend(f.axes[0].lines[0].get_data()))
    found.plot(svg)
    assert [*map(list, drawn)] == [list(found.limits), [made / found.stored - 1 for made in found.makespans]]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'rotor-plan\[plot\]'") as caught:
        found.plot(svg)
    assert caught.value.name == "matplotlib"


POINTS = ("source", "sink", *range(7))
Edge = tuple[int | str, int | str, int | None]


@st.composite
def networks(draw: st.DrawFn) -> list[Edge]:
    """Edges between a few points; those without a capacity stay among the first points, or among the last."""
    pairs = draw(st.lists(st.tuples(st.sampled_from(POINTS), st.sampled_from(POINTS)), unique=True, max_size=30))
    early = {"source", 0, 1, 2}
    found: list[Edge] = []
    for begin, end in pairs:
        bounded = (begin in early) != (end in early) or draw(st.booleans())
        if begin != end:
            found.append((begin, end, draw(st.sampled_from((0, 1, 2, 5, 10**15))) if bounded else None))
    return found


@given(networks())
def test_what_is_behind_the_cut_is_what_networkx_finds(edges: list[Edge]) -> None:
    network, flow = Network("source", "sink"), nx.DiGraph()
    flow.add_nodes_from(POINTS)
    for begin, end, capacity in edges:
        network.add_edge(begin, end, capacity)
        flow.add_edge(begin, end, **({} if capacity is None else {"capacity": capacity}))
    _, (_, behind) = nx.minimum_cut(flow, "source", "sink")
    assert network.behind_least_cut() == behind
