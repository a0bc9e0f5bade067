"""rotor-plan --compare: every strategy at one limit."""

from __future__ import annotations

import json
import re
import runpy

import pytest
import torch

from rotor_py import Checkpointable
from tests.cli.conftest import FICKLE


def test_the_optimal_plan_comes_first_nothing_that_fits_is_faster_and_each_that_fits_trains(
    plan, report, model_file, tmp_path
):
    stored, file = report(model_file(), "--sweep")["store_all"]["peak_bytes"], tmp_path / "report.json"
    shown = plan(model_file(), "--mem-limit", int(0.85 * stored), "--compare", "--verify", "--json", file).stdout
    found = json.loads(file.read_text())
    listed, rows = found["compare"], {row["strategy"]: row for row in found["compare"]}
    assert listed[0]["strategy"] == "optimal"
    assert listed[0]["peak_bytes"] == found["plan"]["peak_bytes"]
    assert listed[0]["overhead"] == found["plan"]["overhead"]
    expected = {"optimal", "level 1", "sqrt", "revolve", "griewank-heterogeneous", "store-all", "recompute-all"}
    assert expected < set(rows)
    (every,) = (name for name in rows if name.startswith("every "))
    fitting = [row for row in listed if row["fits"]]
    assert 1 < len(fitting) < len(listed)
    assert listed[: len(fitting)] == fitting
    for row in listed:
        assert row["fits"] == (row["peak_bytes"] <= found["mem_limit"]) == ("measured_peak_bytes" in row)
        assert row["overhead"] == pytest.approx(row["step_seconds"] / found["store_all"]["step_seconds"])
        if row["fits"]:
            assert 0.98 * row["peak_bytes"] <= row["measured_peak_bytes"] <= row["peak_bytes"]
            assert row["max_grad_difference"] == 0
            assert row["measured_step_seconds"] > 0
    peaks = {row["measured_peak_bytes"] for row in fitting}
    assert max(peaks) > 1.1 * min(peaks), "all strategies trained in the same way"
    assert rows["optimal"]["measured_peak_bytes"] == found["verify"]["measured_peak_bytes"]
    assert rows["store-all"]["peak_bytes"] == found["store_all"]["peak_bytes"] == stored
    assert rows["store-all"]["overhead"] == 1
    assert rows["recompute-all"]["peak_bytes"] == found["min_bytes"]
    # The table is shown below the plan.
    heading, *lines = shown.partition("\nstrategy ")[2].splitlines()
    assert heading.split() == ["fits", "peak", "time", "overhead", "peak", "time"]
    cells = {line.split("  ")[0]: line.split() for line in lines if line.strip()}
    assert next(iter(cells)) == "optimal"
    assert "yes" in cells["optimal"]
    assert "+0.0%" in cells["store-all"]
    assert "no" in cells["store-all"]
    # A row is what a Checkpointable does that is asked for it by hand.
    for name, argument in (("level 1", {"level": 1}), (every, {"every_n_layers": int(every.split()[1])})):
        given = runpy.run_path(model_file())
        optimizer = given["optimizer"](given["model"].parameters())
        network = Checkpointable(
            given["model"], torch.randn(8, 3, 32, 32), loss=given["loss"], optimizer=optimizer, **argument
        )
        assert network.budget.peak_bytes(network.sequence) == rows[name]["peak_bytes"]


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
