"""The benchmark of all families of transformers: its rows, on the smallest cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
pytest.importorskip("transformers")
zoo = pytest.importorskip("zoo")


def test_there_are_families_of_every_task() -> None:
    found = zoo.families()
    assert {family.task for family in found.values()} == {*zoo.TASKS, "diffusers"}
    assert len(found) > 100


@pytest.mark.filterwarnings("ignore")
def test_a_family_is_planned_trained_and_compared() -> None:
    row = zoo.trained("opt")
    assert row["result"] == zoo.SAME
    assert row["difference"] == 0
    assert row["least_bytes"] < row["measured_bytes"] <= row["limit_bytes"] < row["store_all_bytes"]
    assert zoo.line(row).endswith("| same gradients |")
    assert "| CausalLM | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in zoo.summary([row])


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_is_refused_says_why() -> None:
    row = zoo.trained("reformer")  # its layers are a function of autograd's own, which computes them backwards
    assert row["result"] == zoo.REFUSED
    assert "transformers/models/reformer/modeling_reformer.py" in row["why"]
    assert row["why"] in zoo.summary([row])
