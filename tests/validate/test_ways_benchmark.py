"""benchmarks/ways.py in short: its columns are plans over one measurement, with the ways that each may use."""

import sys
from typing import Any

import pytest

from rotor_py import Checkpointable
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
