"""Which partitions there are to choose from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.backends.debugging import boxed_nop

from rotor_py.compile import candidates, partitioner
from rotor_py.compile.candidates import Candidate
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partitioner import BudgetPartitioner
from rotor_py.compile.peak import GraphCosts
from tests.compile.partition.compiled_steps import Loss
from tests.fields import raises


def test_of_two_equal_partitions_that_of_pytorch_is_taken_since_inductor_makes_better_code_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours: list[Candidate] = []
    both: list[Candidate] = []
    honest = candidates.candidates

    def seen(joint: JointGraph, costs: GraphCosts, usual: Candidate | None) -> list[Candidate]:
        ours[:] = honest(joint, costs)
        with monkeypatch.context() as patch:
            patch.setattr(candidates, "torch_partitions", lambda *_: [each.partition for each in ours])
            both[:] = honest(joint, costs, usual)
        return both

    monkeypatch.setattr(partitioner, "candidates", seen)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    chooser = BudgetPartitioner(1, fused=True, estimated=True)
    backend = AotAutograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=chooser)
    with raises(Exception, "limit_too_small"):
        torch.compile(Loss(nn.Sequential(*layers)), backend=backend)(torch.randn(64, 32))
    peaks, seconds = [each.weight.peak for each in both], [each.weight.seconds for each in both]
    assert len(both) > 1
    assert peaks == sorted(set(peaks))
    assert seconds == sorted(set(seconds), reverse=True)
    own = {id(each.partition) for each in ours}
    assert sum(id(each.partition) in own for each in both) >= len(both) - 1  # and the usual one
    assert {each.weight for each in both if id(each.partition) in own} <= {each.weight for each in ours}
