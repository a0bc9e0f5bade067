"""Layers of an `nn.Sequential` of `fully_shard` are captured one by one, and stored in part in regions as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import fsdp_layers
from tests.distributed.processes import Processes, assert_same_inside


@pytest.mark.parametrize(
    ("how", "options", "share", "in_region"),
    [
        ("alone", {}, 0.5, True),
        ("alone", {"reshard_after_forward": False}, 0.7, False),
        ("together", {}, 0.2, True),
    ],
)
def test_layers_are_stored_in_part_inside_the_limit(
    processes: Processes, how: str, options: dict[str, Any], share: float, in_region: bool
) -> None:
    # Alone, a process has all parameters, and the optimizer's state with them.
    found = processes.run(fsdp_layers.same_in_part, how, options, max(share, 0.5 * (len(processes.processes) == 1)))
    assert_same_inside(found)
    if len(found) > 1:  # alone, its part of the parameters is all of them, so a share of the room is another plan
        sequence = found[0][0]
        assert "^" in sequence
        assert bool(re.search(r"CF_(\d+).* Fe_\1\^|Fn_(\d+).* Fe_\2\^", sequence)) == in_region


@pytest.mark.slow
def test_four_processes(four_processes: Processes) -> None:
    assert_same_inside(four_processes.run(fsdp_layers.same_in_part, "alone", {}, 0.4))


def test_a_layer_that_is_not_captured_as_it_stands_keeps_its_other_ways(processes: Processes) -> None:
    for captured in processes.run(fsdp_layers.which_are_captured):
        assert captured == [False, False, False, True, False]


def test_blocks_that_are_sharded_alike_are_measured_once(processes: Processes) -> None:
    assert processes.run(fsdp_layers.kinds) == [[0, 0, 0, 0, 4]] * len(processes.processes)


def test_no_layer_holds_whole_parameters_when_all_have_been_measured(processes: Processes) -> None:
    assert processes.run(fsdp_layers.held_after_measuring) == [0] * len(processes.processes)


def test_plans_serve_smaller_batches_and_other_models_and_hooks_that_come_later(
    processes: Processes, tmp_path: Path
) -> None:
    for warnings in processes.run(fsdp_layers.around_a_step, str(tmp_path)):
        assert [each for each in warnings if "layer 3 is stored whole and not in part" in each]
