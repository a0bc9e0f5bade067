"""benchmarks/ways.py in short: its columns are plans over one measurement, with the ways that each may use."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.stage.low_precision import word_of
from rotor_py.stage.storage_modes import ELSEWHERE
from tests.docs.pages import ROOT

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

import ways

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models' library


@pytest.mark.slow
def test_columns_are_plans_over_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Checkpointable] = []
    measure = Checkpointable.measure

    def counted(model: Checkpointable, *given: Any) -> None:
        measured.append(model)
        measure(model, *given)

    monkeypatch.setattr(Checkpointable, "measure", counted)
    monkeypatch.setattr(ways, "SHARES", (0.8,))
    monkeypatch.setattr(ways, "TURNS", 1)
    rows = {row["ways"]: row for row in ways.run("tiny")}
    assert len(measured) == 1
    assert list(rows) == ["two ways", "exact", "file", "bf16"]
    predicted = {name: row["predicted"] for name, row in rows.items()}
    assert predicted["file"] <= predicted["exact"]
    assert {row["distance"] for name, row in rows.items() if name != "bf16"} == {0.0}
    assert max(row["peak"] for row in rows.values()) <= 1
    assert "| tiny | 80% |" in ways.table(list(rows.values()))


@pytest.mark.slow
def test_a_column_has_its_own_ways_alone(tmp_path: Any) -> None:
    torch.manual_seed(0)
    found = ways.Measured(ways.CASES["tiny"](), str(tmp_path))
    names = [("", *each) for each in found.measurement.way_names]
    used = {
        column: {
            stage[option]
            for stage, options in zip(names, found.algorithm(column).options, strict=True)
            for option in options
        }
        for column in ways.COLUMNS
    }
    assert used["two ways"] == {"", "in part"}
    assert word_of(used["exact"] | used["file"]) is None
    assert ELSEWHERE.name in used["file"]
    assert ELSEWHERE.name not in used["exact"] | used["bf16"]
    assert word_of(used["bf16"]) == "bf16"
    assert used["exact"] - {"", "in part"}
