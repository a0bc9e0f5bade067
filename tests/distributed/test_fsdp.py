"""`fully_shard` (FSDP2): parameters gathered, freed and sent by PyTorch, inside of a plan's regions and graphs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import fsdp
from tests.distributed.processes import Processes, assert_same_inside

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "options", "accumulated", "share"),
    [
        ("chain", "plain", 1, 0.5),
        ("chain", "kept", 1, 0.5),
        ("twice", "plain", 1, 0.5),
        pytest.param("tied llama", "mixed", 1, 0.4, marks=slow),
        pytest.param("skips together", "mixed, full out", 2, 0.3, marks=slow),
    ],
)
def test_numbers_are_those_of_plain_training_inside_the_limit(
    processes: Processes, kind: str, options: str, accumulated: int, share: float
) -> None:
    found = processes.run(fsdp.same, kind, options, accumulated, share)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


@pytest.mark.parametrize(
    ("kind", "options", "share", "in_region", "gathers"),
    [
        ("skips", "plain", 0.1, True, False),
        ("layers", "kept", 0.7, False, False),
        # Values are made from what another group gathers.
        pytest.param("skips in parts", "plain", 0.5, True, True, marks=slow),
    ],
)
def test_stages_are_stored_in_part_inside_the_limit(
    processes: Processes, kind: str, options: str, share: float, in_region: bool, gathers: bool
) -> None:
    found = processes.run(fsdp.same_in_part, kind, options, share)
    assert_same_inside(found)
    for sequence, *_, gathered in found if len(found) > 1 else []:  # one alone has all parameters: another plan
        assert "^" in sequence
        assert bool(re.search(r"CF_(\d+).* Fe_\1\^|Fn_(\d+).* Fe_\2\^", sequence)) == in_region
        assert bool(gathered) == gathers


@slow
def test_steps_make_plans_and_use_those_of_larger_batches_and_other_models(
    processes: Processes, tmp_path: Path
) -> None:
    processes.run(fsdp.around_a_step, str(tmp_path))


def test_a_layer_that_gets_a_hook_is_stored_whole_and_a_warning_says_so(processes: Processes, tmp_path: Path) -> None:
    for said in processes.run(fsdp.hooks_that_come_later, str(tmp_path)):
        assert any("is stored whole and not in part" in each for each in said)


def test_layers_of_a_chain_are_captured_one_by_one_and_measured_without_holding_whole_parameters(
    processes: Processes,
) -> None:
    # No graph has the first as it stands, the second saves something else, a part of the third is sharded.
    for found in processes.run(fsdp.stored_in_part, "odd layers"):
        assert found == ([False, False, False, True, False], 0)
    assert processes.run(fsdp.kinds) == [2] * len(processes.processes)


@pytest.mark.parametrize("kind", ["chain", "skips"])
def test_stages_that_are_run_again_are_not_gathered_all_at_once(processes: Processes, kind: str) -> None:
    for most, groups, sequence in processes.run(fsdp.whole_at_once, kind, 4):
        assert groups > 4
        assert most <= 3  # the model's own, the one that goes backward, and one that is run again
        assert "Fn_" in sequence


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("broken", "does not capture its forward as one graph"),
        ("wrapping", "no tensor with a gradient was found in what"),
        ("still", "nothing in the graph of"),
        ("old torch", "that takes torch 2.11 or newer"),
    ],
)
def test_models_that_cannot_be_captured_are_refused_in_one_sentence_by_all_processes(
    processes: Processes, kind: str, cause: str
) -> None:
    for said in processes.run(fsdp.refusal, kind):
        assert cause in said
        assert "\n" not in said


def test_a_module_may_begin_without_an_input_that_needs_a_gradient(one_process: Processes) -> None:
    assert one_process.run(fsdp.begun_with_nothing) == [()]
