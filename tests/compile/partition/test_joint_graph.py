"""What belongs to the forward of a joint graph, and what is left out of the backward."""

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_py.compile.joint_graph import JointGraph, saved_by_torch
from rotor_py.compile.partition import extract, partition_keeping
from rotor_py.compile.partitioner import BudgetPartitioner
from tests.checkpointable.steps import Residual
from tests.compile.partition.compiled_steps import noted_usual

aten = torch.ops.aten


def test_what_the_forward_reads_belongs_to_it_whoever_has_traced_it() -> None:
    """A pass may put a node of the backward in the place of an equal one of the forward."""
    graph = fx.Graph()
    primal, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    merged = graph.call_function(aten.relu.default, (primal,))
    merged.meta["partitioner_tag"] = "is_backward"
    unread = graph.call_function(aten.neg.default, (merged,))
    returned = graph.call_function(aten.sin.default, (primal,))
    gradient = graph.call_function(aten.mul.Tensor, (tangent, unread))
    written = graph.output((returned, gradient))
    written.meta["desc"] = [None, None]
    joint = JointGraph(fx.GraphModule(nn.Module(), graph), 1)
    assert joint.forward == [merged, unread, returned]
    assert joint.backward == [gradient]


def test_what_is_random_and_kept_is_not_left_in_the_backward() -> None:
    """PyTorch leaves an operator with several outputs there, where eager random numbers are wanted: attention, too."""
    graph = fx.Graph()
    primal, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    product = graph.call_function(aten.mm.default, (primal, primal))
    dropout = graph.call_function(aten.native_dropout.default, (product, 0.5, True))
    drawn = graph.call_function(operator.getitem, (dropout, 0))
    returned = graph.call_function(aten.mul.Tensor, (product, drawn))
    scaled = graph.call_function(aten.mul.Tensor, (tangent, drawn))
    gradient = graph.call_function(aten.mm.default, (scaled, product))
    written = graph.output((returned, gradient))
    written.meta["desc"] = [None, None]
    with FakeTensorMode() as mode:
        value = torch.empty(8, 8)
    for node in graph.nodes:
        node.meta["val"] = (value, value) if node is dropout else value
    joint = JointGraph(fx.GraphModule(nn.Module(), graph), 1)
    with inductor_config.patch(fallback_random=True), tracing(TracingContext(mode)):
        forward, backward = extract(joint, partition_keeping(joint, {product, drawn}), None)
    assert len(forward.graph.find_nodes(op="call_function", target=aten.native_dropout.default)) == 1
    assert not backward.graph.find_nodes(op="call_function", target=aten.native_dropout.default)


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
    model, value = made(), torch.randn(8, 16)
    gradients = step(model, value, partition_fn=BudgetPartitioner("1GB", fused=True))
    ((joint, chosen),) = found
    (saved,) = saved_by_torch(joint, [1])
    early = {node for node in saved if joint.allocating(node) in joint.early}
    assert len(early) > 1, "the model shows nothing"
    assert early <= chosen.partition.saved
    assert not PRODUCTS & {run.node.target for run in chosen.partition.backward if run.node in chosen.partition.forward}
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
