"""Tensor and sequence parallelism (`parallelize_module`), alone and with `fully_shard`: one plan, and local sizes."""

import pytest
import torch

from tests.distributed import tensor_parallel
from tests.distributed.processes import Processes, assert_same_inside

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("chain", 0.2),
        pytest.param("uneven", 0.2, marks=slow),  # captured, and parts of several sizes
        pytest.param("all shared", 0.4, marks=slow),  # DTensors from layer to layer, each with a part of the sequence
    ],
)
def test_numbers_are_those_of_plain_training_inside_the_limit(processes: Processes, kind: str, share: float) -> None:
    found = processes.run(tensor_parallel.same_as_plain, kind, "tensor", share)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


@slow
def test_with_fully_shard_on_a_mesh_of_two_dimensions(four_processes: Processes) -> None:
    found = four_processes.run(tensor_parallel.same_as_plain, "chain", "both", 0.2)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="nn.Linear refuses a DTensor whose batch is not first")
def test_processes_measure_equally_often_where_gradients_arrive_in_other_layouts(processes: Processes) -> None:
    found = processes.run(tensor_parallel.with_parts_of_other_layouts)
    assert [walks for walks, _ in found] == [2] * len(found)
    assert len({str(layouts) for _, layouts in found}) == len(found)
