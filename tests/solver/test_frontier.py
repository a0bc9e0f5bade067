"""The whole trade-off between memory and time, and its picture."""

import math
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_solver import Chain, InfeasibleError, frontier, limit_for, min_bytes, simulate, solve, store_all
from tests.fields import raises
from tests.solver.long_chains import random_chain
from tests.solver.naive import naive_optimum
from tests.solver.strategies import rich_chains, unit_chain


@settings(max_examples=40, deadline=None)
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
    for limit, makespan, sequence in zip(found.limits, found.makespans, found.sequences, strict=True):
        result = simulate(chain, sequence)
        assert (result.peak, result.makespan) == (limit, makespan)
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


def test_only_the_limits_that_were_asked_for() -> None:
    chain = unit_chain(12)
    least, whole = min_bytes(chain), simulate(chain, store_all(chain)).peak
    found = frontier(chain, [whole + 100, least - 1, least + 3, 7.9])
    assert found.limits == (7, least + 3, whole + 100)
    singles = [simulate(chain, solve(chain, limit)).makespan for limit in found.limits]
    assert [found.makespan(limit) for limit in found.limits] == singles
    assert len(frontier(chain, [0])) == 0
    assert limit_for(chain, 0.1) == frontier(chain).limit_for(0.1)


def test_bad_questions_about_the_frontier_are_refused_in_words() -> None:
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


def test_a_chain_of_no_stages_and_one_without_times() -> None:
    none = Chain.from_arrays([], [3], [10], [], [], [4])
    assert list(frontier(none)) == [(24, 3.0)]
    still = Chain.from_arrays([0] * 5, [0] * 6, [1] * 6, [2] * 5, [0] * 5, [0] * 6)
    assert list(frontier(still)) == [(min_bytes(still), 0.0)]


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
