"""The reference chains: 40 chains, seven limits each, whose optimum and least limit are known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import published_plan
from rotor_solver import Chain, Persistent, Sequence, min_bytes, recompute_all, simulate, solve, store_all
from tests.solver.plans import makespan

CHAINS = json.loads((Path(__file__).resolve().parents[1] / "data" / "chains.json").read_text())


def chain_of(entry: dict[str, Any]) -> Chain:
    names = ("forward_time", "backward_time", "activation", "forward_temp", "backward_temp")
    return Chain.from_arrays(**{name: entry[name] for name in names}, saved=entry["saved"][1:])


def test_least_limits_ends_of_the_scale_and_every_optimum() -> None:
    for entry in CHAINS:
        chain = chain_of(entry)
        assert min_bytes(chain) == entry["least"] == simulate(chain, recompute_all(chain)).peak
        assert simulate(chain, store_all(chain)).peak == entry["store_all_peak"]
        for point in entry["points"]:
            assert makespan(Persistent(), chain, point["limit"]) == (point["optimum"] or math.inf)
            if point["optimum"] is not None:
                bound = solve(chain, point["limit"]).lower_bound
                assert bound == pytest.approx(point["optimum"], rel=1e-9)


def test_sequences_of_the_published_program_are_understood_and_beaten_where_scratch_memory_is_large() -> None:
    beaten = 0
    for entry in CHAINS:
        chain = chain_of(entry)
        for point in entry["points"]:
            if len(chain) <= 10:
                plan = published_plan(chain, point["limit"], slots=point["limit"])
                assert (plan and simulate(chain, plan).makespan) == point["rotor_makespan"]
            if point["rotor_sequence"] and point["rotor_valid"]:
                result = simulate(chain, Sequence.parse(point["rotor_sequence"]))
                assert (result.makespan, result.peak) == (point["rotor_makespan"], point["rotor_peak"])
                assert result.peak > point["limit"] or result.makespan >= point["optimum"]
            beaten += bool(point["rotor_makespan"] and point["optimum"] and point["optimum"] < point["rotor_makespan"])
    assert beaten >= 20  # 22 of 280: the reference would be void without them
