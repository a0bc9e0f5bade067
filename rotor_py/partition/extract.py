"""A program as two graphs: what runs again is written into the joint graph, which PyTorch then cuts in two."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.utils import _is_bwd_seed_offset, _is_primal
from torch._functorch.compile_utils import raise_getitems
from torch.utils._ordered_set import OrderedSet

from rotor_py.partition.joint_graph import JointGraph, is_number
from rotor_py.partition.program import Program, Run


def extract(
    joint: JointGraph, program: Program, static_inputs: list[int] | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of the forward and of the backward, which run in the order of `program`."""
    graph = fx.Graph()
    copies: dict[fx.Node | Run, fx.Node] = {}
    runs = {*joint.forward, *program.forward}
    for node in joint.module.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in runs:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    last: dict[fx.Node, Run] = {}
    for run in program.backward:
        copies[run] = graph.node_copy(run.node, {each: copies[read] for each, read in run.reads.items()}.__getitem__)
        last[run.node] = run
        if run.node in runs:
            copies[run].meta["partitioner_tag"] = "is_backward"
            copies[run].meta.pop("recompute", None)
    end = next(iter(joint.module.graph.find_nodes(op="output")))
    returned = joint.module.graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    outputs = [_mapped(each, copies) for each in returned[: joint.num_outputs]]
    ends = [last.get(each, each) if isinstance(each, fx.Node) else None for each in returned[joint.num_outputs :]]
    gradients = [_mapped(each, copies) for each in ends]
    written = graph.output((*outputs, *gradients))
    written.meta = dict(end.meta)
    module = fx.GraphModule(joint.module, graph)

    saved = [copies[node] for node in sorted(program.saved, key=joint.order.__getitem__) if _passed_on(node)]
    numbers = [node for node in saved if is_number(node)]
    options: dict[str, Any] = {}
    # Torch 2.11 finds the nodes that are no tensors among the others by itself.
    if is_opaque := getattr(graph_compile, "is_opaque_node", None):
        options["saved_opaque_nodes"] = [node for node in saved if is_opaque(node)]
    apart = {*numbers, *options.get("saved_opaque_nodes", ())}
    rest = [node for node in saved if node not in apart]
    static = set(static_inputs or ())
    primals = [node for node in graph.find_nodes(op="placeholder") if _is_primal(node)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        rest,
        saved_sym_nodes=numbers,
        num_fwd_outputs=joint.num_outputs,
        static_lifetime_input_nodes=OrderedSet(node for position, node in enumerate(primals) if position in static),
        **options,
    )
    # PyTorch leaves a random operator of the forward in the backward, where nobody reads it, if all that it reads is
    # there. Attention counts as random, and takes long.
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)


def _mapped(value: object, copies: dict[fx.Node | Run, fx.Node]) -> fx.Node | None:
    return copies[value] if isinstance(value, fx.Node | Run) else None


def _passed_on(node: fx.Node) -> bool:
    """Whether a value is handed from the forward to the backward. Some reach the backward in other ways."""
    special = _is_bwd_seed_offset(node) or partitioners._is_backward_state(node)
    return node.op != "get_attr" and not special
