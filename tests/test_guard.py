"""benchmarks/guard.py: records that are the same each time, and a line for whatever differs."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import guard  # beside the other benchmarks
import guard_cases
import guard_mutations
import guard_record


def record() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with guard_record.fixed_clocks():
            return guard_record.record_model(lambda: guard_cases.chain_model(width=16, blocks=2, batch=64))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return record()


def test_two_records_of_a_case_are_the_same(recorded: dict[str, Any]) -> None:
    assert recorded["limits"]["least"]["sequence"] != recorded["limits"]["store-all"]["sequence"]
    assert list(guard.differences(recorded, record())) == []


def test_a_checkpoint_kept_too_long_is_reported(recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    gelu = nn.functional.gelu

    def keeping(value: Any) -> Any:
        kept.append(gelu(value))
        return kept[-1]

    monkeypatch.setattr(nn.functional, "gelu", keeping)
    lines = list(guard.differences(recorded, record()))
    assert any("held_after_step" in line for line in lines)
    assert any("curve" in line for line in lines)


def test_each_difference_is_a_line_but_for_numbers_of_another_processor(recorded: dict[str, Any]) -> None:
    other = copy.deepcopy(recorded)
    other["limits"]["halfway"]["measured_peak"] += 8
    other["stages"][1]["options"][0][1] -= 4
    del other["names"]
    lines = list(guard.differences(recorded, other))
    assert len(lines) == 3
    assert lines[0] == "names: is gone"
    assert lines[1].startswith("stages[1] / options[0][1]: ")
    assert lines[2].startswith("limits / halfway / measured_peak: ")
    other = copy.deepcopy(recorded)
    other["limits"]["least"]["digests"][0]["gradients"] = "other bits"
    assert len(list(guard.differences(recorded, other))) == 1
    assert list(guard.differences(recorded, other, numbers=False)) == []


def test_every_planted_fault_has_a_place_in_the_code() -> None:
    for each in guard_mutations.MUTATIONS:
        guard_mutations.place_of(each.old, guard_mutations.ROOT)
