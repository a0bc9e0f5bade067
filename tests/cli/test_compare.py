"""rotor-plan --compare: every strategy at one limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rotor_py import Checkpointable
from tests.cli.conftest import FICKLE


@pytest.fixture
def store_all_bytes(report, model_file) -> int:
    return report(model_file(), "--sweep")["store_all"]["peak_bytes"]


@pytest.fixture
def compared(report, model_file, store_all_bytes):
    """The report at a share of what storing everything needs, and its rows by strategy."""

    def run(share: float, *more: str) -> tuple[dict, dict[str, dict]]:
        found = report(model_file(), "--mem-limit", int(share * store_all_bytes), "--compare", *more)
        return found, {row["strategy"]: row for row in found["compare"]}

    return run


def test_the_optimal_plan_comes_first_and_nothing_that_fits_is_faster(compared, store_all_bytes):
    report, rows = compared(0.8)
    limit = report["mem_limit"]
    listed = report["compare"]
    assert listed[0]["strategy"] == "optimal"
    assert listed[0]["peak_bytes"] == report["plan"]["peak_bytes"]
    assert listed[0]["overhead"] == report["plan"]["overhead"]
    expected = {"optimal", "level 1", "sqrt", "revolve", "griewank-heterogeneous", "store-all", "recompute-all"}
    assert expected < set(rows)
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


def test_a_row_is_what_checkpointable_does_when_asked_for_it_by_hand(compared, model_file):
    _, rows = compared(0.8)
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


def test_verify_trains_a_step_with_every_strategy_that_fits(compared):
    report, rows = compared(0.85, "--verify")
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
    assert plan(model_file(), "--mem-limit", "140kB", "--compare").exit_code == 3
