"""rotor-plan --compare: every strategy at one limit."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.trials.compare import EVERY, at_limit, leanest, named, strategies
from rotor_py.trials.verify import verify
from rotor_solver import InfeasibleError, Periodic, StoreAll, recompute_all, simulate, store_all
from tests.cli.conftest import FICKLE
from tests.solver.strategies import unit_chain


def compared(result) -> tuple[dict, dict[str, dict]]:
    report = json.loads(result.stdout)
    return report, {row["strategy"]: row for row in report["compare"]}


@pytest.fixture
def store_all_bytes(plan, model_file) -> int:
    return json.loads(plan(model_file(), "--sweep", "--json", "-").stdout)["store_all"]["peak_bytes"]


def test_the_optimal_plan_comes_first_and_nothing_that_fits_is_faster(plan, model_file, store_all_bytes):
    limit = int(0.8 * store_all_bytes)
    report, rows = compared(plan(model_file(), "--mem-limit", limit, "--compare", "--json", "-"))
    listed = report["compare"]
    assert listed[0]["strategy"] == "optimal"
    assert listed[0]["peak_bytes"] == report["plan"]["peak_bytes"]
    assert listed[0]["overhead"] == report["plan"]["overhead"]
    wanted = {"optimal", "level 1", "sqrt", "revolve", "griewank-heterogeneous", "store-all", "recompute-all"}
    assert wanted < set(rows)
    assert len([name for name in rows if name.startswith("every ")]) == 1
    fitting = [row for row in listed if row["fits"]]
    assert 1 < len(fitting) < len(listed)
    assert listed[: len(fitting)] == fitting
    seconds = [row["step_seconds"] for row in fitting]
    assert seconds == sorted(seconds)
    for row in listed:
        assert row["fits"] == (row["peak_bytes"] <= limit)
        assert row["overhead"] == pytest.approx(row["step_seconds"] / report["store_all"]["step_seconds"])
    assert rows["store-all"]["peak_bytes"] == report["store_all"]["peak_bytes"] == store_all_bytes
    assert rows["store-all"]["overhead"] == 1
    assert rows["recompute-all"]["peak_bytes"] == report["min_bytes"]


def test_a_row_is_what_checkpointable_does_when_asked_for_it_by_hand(plan, model_file, store_all_bytes):
    _, rows = compared(plan(model_file(), "--mem-limit", int(0.8 * store_all_bytes), "--compare", "--json", "-"))
    distance = next(name.split()[1] for name in rows if name.startswith("every "))
    for name, argument in (("level 1", {"level": 1}), (f"every {distance} layers", {"every_n_layers": int(distance)})):
        namespace: dict = {}
        exec(Path(model_file()).read_text(), namespace)
        model = namespace["model"]
        optimizer = namespace["optimizer"](model.parameters())
        network = Checkpointable(
            model, torch.randn(8, 3, 32, 32), loss=namespace["loss"], optimizer=optimizer, **argument
        )
        assert network.budget.peak_bytes(network.sequence) == rows[name]["peak_bytes"]


def test_verify_trains_a_step_with_every_strategy_that_fits(plan, model_file, store_all_bytes):
    limit = int(0.85 * store_all_bytes)
    result = plan(model_file(), "--mem-limit", limit, "--compare", "--verify", "--json", "-")
    assert result.exit_code == 0
    report, rows = compared(result)
    for row in rows.values():
        assert ("measured_peak_bytes" in row) == row["fits"]
        if row["fits"]:
            assert 0.98 * row["peak_bytes"] <= row["measured_peak_bytes"] <= row["peak_bytes"]
            assert row["max_grad_difference"] == 0
            assert row["measured_step_seconds"] > 0
    peaks = {row["measured_peak_bytes"] for row in rows.values() if row["fits"]}
    assert max(peaks) > 1.1 * min(peaks), "all strategies trained in the same way"
    assert rows["optimal"]["measured_peak_bytes"] == report["verify"]["measured_peak_bytes"]


def test_a_strategy_that_changes_gradients_ends_with_5_and_is_named(plan, model_file):
    # The plan stores everything, and is right; only what computes again meets a layer that then does something else.
    path = model_file(FICKLE, "fickle_net.py")
    assert plan(path, "--mem-limit", "1GB", "--verify").exit_code == 0
    result = plan(path, "--mem-limit", "1GB", "--verify", "--compare")
    assert result.exit_code == 5
    found = re.fullmatch(
        r"rotor-plan: (\S.*): gradients or buffers differ from plain training by up to \S+\n", result.stderr
    )
    assert found, result.stderr
    assert found[1] not in ("optimal", "store-all")


def test_what_fits_is_planned_to_fit_and_what_does_not_is_as_lean_as_it_can_be():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    network = Checkpointable(model, torch.randn(32, 64), loss=torch.sum)
    budget = replace(network.budget, snapshot_bytes=10_000)
    for name, algorithm in strategies(model, network.names, 500).items():
        lean = budget.peak_bytes(leanest(budget, algorithm))
        assert budget.peak_bytes(at_limit(budget, algorithm, lean - 1)) == lean, name
        for limit in (lean, lean + 3000, lean + 9_999, lean + 30_000, 10**9):
            assert budget.peak_bytes(at_limit(budget, algorithm, limit)) <= limit, name
        for limit in range(lean, lean + 60_000, 4096):
            found, room = at_limit(budget, algorithm, limit), budget.chain_limit(limit)
            with suppress(InfeasibleError):
                slower = simulate(budget.chain, algorithm.solve(budget.chain, room)).makespan
                assert simulate(budget.chain, found).makespan <= slower, name
    stored = budget.peak_bytes(store_all(budget.chain))
    for algorithm in (StoreAll(), Periodic()):  # what computes nothing twice needs no snapshot
        assert at_limit(budget, algorithm, stored) == store_all(budget.chain)


def test_after_other_strategies_were_verified_the_plan_is_what_it_was():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    sample = torch.randn(32, 64)
    network = Checkpointable(model, sample, mem_limit="1GB", loss=torch.sum)
    planned, other = network.sequence, recompute_all(network.chain)
    found = verify(network, sample, torch.sum, None, torch.device("cpu"), fresh_grads=False, others=[other])
    assert network.sequence is planned
    assert [each.max_grad_difference for each in found] == [0, 0]
    peaks = [network.budget.peak_bytes(sequence) for sequence in (planned, other)]
    assert [each.measured_peak_bytes for each in found] == pytest.approx(peaks, rel=0.01)


def test_only_levels_that_the_model_has_are_listed():
    block = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    flat = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    deep = nn.Sequential(*[nn.Sequential(*block) for _ in range(3)])
    found = strategies(flat, ["0", "1", "2"], 500)
    assert [name for name in found if name.startswith("level")] == ["level 1"]
    stages = [f"{outer}.{inner}.{leaf}" for outer in range(3) for inner in range(3) for leaf in range(2)]
    found = strategies(deep, stages, 500)
    assert [name for name in found if name.startswith("level")] == ["level 1", "level 2"]


def test_the_distance_is_read_off_the_sequence():
    chain = unit_chain(12)
    for distance in range(1, 13):
        sequence = Periodic(every=distance).solve(chain, 10**9)
        assert named(EVERY, sequence) == ("every layer" if distance == 1 else f"every {distance} layers")
    assert named("sqrt", sequence) == "sqrt"


def test_the_table_is_shown_below_the_plan(plan, model_file, store_all_bytes):
    result = plan(model_file(), "--mem-limit", int(0.8 * store_all_bytes), "--compare")
    assert result.exit_code == 0
    table = result.stdout.partition("strategy ")[2]
    assert "predicted peak" in table
    assert "measured" not in table
    rows = {line.split("  ")[0]: line.split() for line in table.splitlines()[1:] if line.strip()}
    assert next(iter(rows)) == "optimal"
    assert "yes" in rows["optimal"]
    assert "no" in rows["store-all"]
    assert rows["store-all"][-1] == "+0.0%"


def test_where_no_plan_fits_there_is_nothing_to_compare(plan, model_file):
    result = plan(model_file(), "--mem-limit", "50kB", "--compare")
    assert result.exit_code == 3
    assert "a limit of" in result.stderr
