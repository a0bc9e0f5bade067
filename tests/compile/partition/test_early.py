"""What the backward of a graph computes without a gradient: the forward may run it, and save that and nothing else."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.backends.debugging import boxed_nop

from rotor_py.compile.joint_graph import usually_saved
from rotor_py.compile.partitioner import BudgetPartitioner
from tests.compile.partition.compiled_steps import Residual, noted_usual

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default}


def made() -> nn.Module:
    """Of norms, deviations divided by the width are saved, and of the ReLU where it was zero."""
    wide = Residual(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    norms = nn.Linear(16, 16), wide, Residual(nn.LayerNorm(16), nn.Linear(16, 16)), nn.LayerNorm(16)
    mask = nn.Linear(16, 64), nn.ReLU(), nn.Unflatten(1, (8, 8)), nn.Softmax(1), nn.Flatten(1), nn.Linear(64, 3)
    return nn.Sequential(*norms, *mask)


def step(model: nn.Module, value: torch.Tensor, **partition: Any) -> list[torch.Tensor]:
    """The gradients of a step in the operators that Inductor would be given, which run one by one."""
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    table = select_decomp_table()
    backend = AotAutograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, decompositions=table, **partition)
    run: Any = torch.compile(model, backend=backend)
    run(value).square().sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_what_pytorch_saves_of_it_is_saved_and_no_product_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = noted_usual(monkeypatch)
    torch.manual_seed(0)
    model, value = made(), torch.randn(8, 16)
    gradients = step(model, value, partition_fn=BudgetPartitioner("1GB", fused=True))
    ((joint, chosen),) = found
    (saved,) = usually_saved(joint, [1])
    early = {node for node in saved if joint.allocating(node) in joint.early}
    assert len(early) > 1, "the model shows nothing"
    assert early <= chosen.partition.saved
    assert not PRODUCTS & {node.target for node in chosen.partition.replayed}
    storages = {key: size for node in saved for key, size in joint.allocations[node].items()}
    callers = {key for node in (*joint.primals, *joint.outputs) for key in joint.allocations[node]}
    assert chosen.weight.saved == sum(size for key, size in storages.items() if key not in callers)
    model.zero_grad()
    assert all(map(torch.equal, gradients, step(model, value)))
    # Right after what it reads: at the end of the forward, all of that would be there at once.
    position = {node: number for number, node in enumerate(chosen.partition.forward)}
    for node in (node for node in chosen.partition.forward if node in joint.early):
        latest = max(position[each] for each in node.all_input_nodes if each in position)
        assert set(chosen.partition.forward[latest + 1 : position[node]]) <= set(joint.early)
