"""The reference chains: 40 chains, seven limits each, whose optimum and least limit are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rotor_solver import Chain, InfeasibleError, Sequence, min_bytes, recompute_all, simulate, solve, store_all
from rotor_solver.persistent.recurrence import Effort

CHAINS = json.loads((Path(__file__).resolve().parents[1] / "data" / "chains.json").read_text())


def chain_of(entry: dict[str, Any]) -> Chain:
    names = ("forward_time", "backward_time", "activation", "forward_temp", "backward_temp")
    return Chain.from_arrays(**{name: entry[name] for name in names}, saved=entry["saved"][1:])


@pytest.mark.parametrize("entry", CHAINS, ids=range(len(CHAINS)))
def test_least_limit_ends_of_the_scale_and_every_optimum(entry: dict[str, Any]) -> None:
    chain = chain_of(entry)
    assert min_bytes(chain) == entry["least"] == simulate(chain, recompute_all(chain)).peak
    assert simulate(chain, store_all(chain)).peak == entry["store_all_peak"]
    for point in entry["points"]:
        if point["optimum"] is None:
            with pytest.raises(InfeasibleError) as caught:
                solve(chain, point["limit"])
            assert caught.value.min_bytes == entry["least"]
            continue
        sequence = solve(chain, point["limit"])
        result = simulate(chain, sequence)
        assert result.makespan == point["optimum"]
        assert result.peak <= point["limit"]
        assert sequence.lower_bound == pytest.approx(point["optimum"], rel=1e-9)


@pytest.mark.parametrize("entry", CHAINS, ids=range(len(CHAINS)))
@pytest.mark.parametrize("slots", [5, 30])
def test_coarse_slots_give_a_bound_that_holds(entry: dict[str, Any], slots: int, monkeypatch) -> None:
    monkeypatch.setattr("rotor_solver.persistent.recurrence.THOROUGH", Effort(close=0.0, pairs=1e5, numbers=2**18))
    chain = chain_of(entry)
    for point in entry["points"]:
        if point["optimum"] is not None:
            sequence = solve(chain, point["limit"], slots=slots)
            assert sequence.lower_bound is not None
            assert sequence.lower_bound <= point["optimum"] <= simulate(chain, sequence).makespan


@pytest.mark.parametrize("entry", CHAINS, ids=range(len(CHAINS)))
def test_sequences_of_the_published_program_are_understood(entry: dict[str, Any]) -> None:
    chain = chain_of(entry)
    for point in entry["points"]:
        if not point["rotor_sequence"]:
            continue
        sequence = Sequence.parse(point["rotor_sequence"])
        assert Sequence.parse(str(sequence)) == sequence
        if point["rotor_valid"]:
            result = simulate(chain, sequence)
            assert result.makespan == point["rotor_makespan"]
            assert result.peak == point["rotor_peak"]
            if result.peak <= point["limit"]:
                assert result.makespan >= point["optimum"]


def test_the_published_program_is_beaten_where_scratch_memory_is_large() -> None:
    """The reference has 22 of 280 such cases: the test would be void without them."""
    points = [point for entry in CHAINS for point in entry["points"] if point["rotor_makespan"] and point["optimum"]]
    assert sum(point["optimum"] < point["rotor_makespan"] for point in points) >= 20
