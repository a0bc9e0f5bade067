"""What belongs to the forward of a joint graph, and what is left out of the backward."""

import operator

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partition import extract, in_time

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
        forward, backward = extract(joint, in_time(joint, {product, drawn}), None)
    assert len(forward.graph.find_nodes(op="call_function", target=aten.native_dropout.default)) == 1
    assert not backward.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
