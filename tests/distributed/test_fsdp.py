"""`fully_shard` (FSDP2): the sequence as nested regions, parameters gathered and gradients sent by PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed import fsdp
from tests.distributed.processes import Processes, assert_same_inside

MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
"""Layers take what hooks have cast, so they are captured with these."""


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, MIXED], ids=["whole", "kept", "mixed"])
def test_numbers_are_those_of_plain_training_inside_the_limit(processes: Processes, options: dict[str, Any]) -> None:
    found = processes.run(fsdp.same_as_plain, options)
    assert_same_inside(found)
    assert "CF_" in found[0][0]


def test_stages_are_packed_inside_the_limit(processes: Processes) -> None:
    found = processes.run(fsdp.packed)
    assert_same_inside(found)
    assert "^" in found[0][0] or processes.backend == "nccl"  # where it may be faster to run stages again


@pytest.mark.slow
def test_four_processes(four_processes: Processes) -> None:
    assert_same_inside(four_processes.run(fsdp.same_as_plain, {}))
