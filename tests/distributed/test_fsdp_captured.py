"""`fully_shard` of models that are no chain: gathered, let go and sent by PyTorch, at marks in the captured graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import fsdp_captured
from tests.distributed.processes import Processes, assert_same_inside

CASES = [
    pytest.param("tied llama", "mixed", 2, 0.4, marks=pytest.mark.slow),
    pytest.param("skips", "kept", 1, 0.5, marks=pytest.mark.slow),
    pytest.param("skips in parts", "plain", 1, 0.5, marks=pytest.mark.slow),
    pytest.param("skips together", "mixed, full out", 2, 0.3, marks=pytest.mark.slow),
    pytest.param("heavy skips", "plain", 2, 0.1, marks=pytest.mark.slow),
    ("twice", "plain", 1, 0.5),
]
"""Model, options, how many batches are added up, and the limit between the least and storing everything.

That groups may be inside of groups, stages that are stored in part show as well.
"""


@pytest.mark.parametrize(("kind", "options", "accumulated", "share"), CASES)
def test_numbers_are_those_of_plain_training_inside_the_limit(
    processes: Processes, kind: str, options: str, accumulated: int, share: float
) -> None:
    found = processes.run(fsdp_captured.same_as_plain, kind, options, accumulated, share)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


@pytest.mark.parametrize(
    ("kind", "options", "share", "in_region", "gathers"),
    [
        ("skips", "plain", 0.1, True, False),
        # Values are made from what another group gathers.
        pytest.param("skips in parts", "plain", 0.5, True, True, marks=pytest.mark.slow),
        pytest.param("twice", "mixed", 0.1, True, False, marks=pytest.mark.slow),
        pytest.param("tied llama", "mixed", 0.6, False, False, marks=pytest.mark.slow),
    ],
)
def test_stages_are_stored_in_part_inside_the_limit(
    processes: Processes, kind: str, options: str, share: float, in_region: bool, gathers: bool
) -> None:
    found = processes.run(fsdp_captured.same_in_part, kind, options, share)
    assert_same_inside(found)
    for sequence, *_, gathered in found:
        assert "^" in sequence
        assert bool(re.search(r"CF_(\d+).* Fe_\1\^", sequence)) == in_region
        assert bool(gathered) == gathers


def test_fewer_bits_are_kept_if_asked_for(processes: Processes) -> None:
    for names, different, apart in processes.run(fsdp_captured.rounded):
        assert any("bf16" in each for each in names)
        assert different == []
        assert 0 < apart < 0.02


@pytest.mark.slow
def test_four_processes(four_processes: Processes) -> None:
    assert_same_inside(four_processes.run(fsdp_captured.same_as_plain, "skips", "plain"))


def test_steps_make_plans_and_use_those_of_larger_batches_and_other_models(
    processes: Processes, tmp_path: Path
) -> None:
    processes.run(fsdp_captured.around_a_step, str(tmp_path))


@pytest.mark.slow
def test_what_is_run_again_may_begin_and_end_in_the_middle_of_layers(processes: Processes) -> None:
    for sequences in processes.run(fsdp_captured.cut_anywhere):
        assert all("Fn_" in sequence for sequence in sequences)


@pytest.mark.parametrize("kind", ["skips", "chain"])
def test_stages_that_are_run_again_are_not_gathered_all_at_once(processes: Processes, kind: str) -> None:
    for most, groups in processes.run(fsdp_captured.whole_at_once, kind):
        assert groups > 4
        assert most <= 3  # the model's own, the one that goes backward, and one that is run again


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("broken", "does not capture its forward as one graph"),
        ("wrapping", "no tensor with a gradient was found in what"),
        ("still", "nothing in the graph of"),
        ("old torch", "that takes torch 2.11 or newer"),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_sentence_by_all_processes(
    processes: Processes, kind: str, cause: str
) -> None:
    for said in processes.run(fsdp_captured.refusal, kind):
        assert cause in said
        assert "\n" not in said


def test_a_module_may_begin_without_an_input_that_needs_a_gradient(one_process: Processes) -> None:
    assert one_process.run(fsdp_captured.begun_with_nothing) == [()]
