"""The order in which both graphs run, and their extraction from the joint graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from rotor_profiling.torch_compat import (
    OrderedSet,
    graph_compile,
    is_bwd_seed_offset,
    is_primal,
    partitioners,
    raise_getitems,
)
from rotor_py.compile.joint_graph import JointGraph, ancestors, is_number


@dataclass(eq=False, slots=True)
class Run:
    """One run of a node in the backward. `reads` are the runs that made its inputs, or nodes from outside."""

    node: fx.Node
    reads: dict[fx.Node, Run | fx.Node]


@dataclass(frozen=True, slots=True)
class Partition:
    """`forward` runs, `saved` is kept from it (inputs included), then `backward` runs, recomputed nodes among it."""

    forward: tuple[fx.Node, ...]
    saved: frozenset[fx.Node]
    backward: tuple[Run, ...]

    @property
    def replayed(self) -> list[fx.Node]:
        own = set(self.forward)
        return [run.node for run in self.backward if run.node in own]


@dataclass
class BackwardWriter:
    """Writes the backward, run by run. Recomputes missing values right before they are read."""

    joint: JointGraph
    kept: set[fx.Node]
    """Values that the forward keeps: allocating nodes, including early ones."""
    runs: list[Run] = field(default_factory=list)
    there: dict[fx.Node, Run] = field(default_factory=dict)
    """Recomputed values of the forward, and values of the backward."""

    def __post_init__(self) -> None:
        self.forward = set(self.joint.forward)
        self.siblings: dict[fx.Node, list[fx.Node]] = {}
        for node in (*self.joint.forward, *self.joint.backward):
            if node.target is operator.getitem and not is_number(node):
                self.siblings.setdefault(node.all_input_nodes[0], []).append(node)

    def write(self, node: fx.Node) -> None:
        if node in self.there or node in self.kept:  # unpacked already, or made by the forward
            return
        for each in node.all_input_nodes:
            self.make(each)
        self._run(node)

    def make(self, node: fx.Node) -> None:
        pending, needed = [node], set()
        while pending:
            each = pending.pop()
            if each not in needed and each not in self.there and not self._from_outside(each):
                needed.add(each)
                pending.extend(each.all_input_nodes)
        for each in sorted(needed, key=self.joint.order.__getitem__):
            if each not in self.there:
                self._run(each)

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.there.pop(node, None)

    def partition(self) -> Partition:
        """Return the whole partition, without runs whose values are not read."""
        joint = self.joint
        needed = {run for node in joint.gradients if (run := self.there.get(node)) is not None}
        needed.update(run for run in self.runs if run.node not in self.forward and not run.node.users)
        backward = []
        for run in reversed(self.runs):
            if run in needed or (run.node not in self.forward and run.node.is_impure()):
                backward.append(run)
                needed.update(each for each in run.reads.values() if isinstance(each, Run))
        tangents = set(joint.tangents)
        saved = {each for run in backward for each in run.reads.values() if isinstance(each, fx.Node)}
        saved |= {node for node in joint.gradients if node not in self.there and node not in tangents}
        saved -= tangents
        needed_forward = ancestors([*joint.outputs, *saved])
        forward = joint.in_turn(node for node in (*joint.forward, *joint.early) if node in needed_forward)
        return Partition(tuple(forward), frozenset(saved), tuple(reversed(backward)))

    def _from_outside(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self.kept:
            return True
        return node in self.forward and (node not in self.joint.replayable or is_number(node))

    def _run(self, node: fx.Node) -> None:
        run = Run(node, {each: self.there.get(each, each) for each in node.all_input_nodes})
        self.runs.append(run)
        self.there[node] = run
        # A tuple keeps all of its tensors alive: it is unpacked at once.
        for each in self.siblings.get(node, ()):
            if each not in self.kept:
                self.there[each] = Run(each, {node: run})
                self.runs.append(self.there[each])
        if node in self.siblings:
            del self.there[node]  # but not its elements


def in_time(joint: JointGraph, kept: Iterable[fx.Node]) -> Partition:
    """Return the partition that keeps `kept`, and makes everything else once, right before its first read."""
    writer = BackwardWriter(joint, set(kept))
    for node in joint.backward:
        writer.write(node)
    return writer.partition()


def extract(
    joint: JointGraph, partition: Partition, static_inputs: list[int] | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graphs of the forward and of the backward, which run in the order of `partition`."""
    graph = fx.Graph()
    copies: dict[fx.Node | Run, fx.Node] = {}
    runs = {*joint.forward, *partition.forward}
    for node in joint.module.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in runs:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    last: dict[fx.Node, Run] = {}
    for run in partition.backward:
        copies[run] = graph.node_copy(run.node, {each: copies[read] for each, read in run.reads.items()}.__getitem__)
        last[run.node] = run
        if run.node in runs:
            copies[run].meta["partitioner_tag"] = "is_backward"
            copies[run].meta.pop("recompute", None)
    end = joint.module.graph.output_node()
    returned: Any = end.args[0]
    outputs = [copies.get(each) for each in returned[: joint.num_outputs]]
    gradients = [copies.get(last.get(each, each)) for each in returned[joint.num_outputs :]]
    graph.output((*outputs, *gradients)).meta = dict(end.meta)
    module = fx.GraphModule(joint.module, graph)

    saved = [
        copies[node]
        for node in sorted(partition.saved, key=joint.order.__getitem__)
        # Others reach the backward in other ways.
        if not (node.op == "get_attr" or is_bwd_seed_offset(node) or partitioners._is_backward_state(node))
    ]
    numbers = [node for node in saved if is_number(node)]
    options: dict[str, Any] = {}
    # torch 2.11 finds the nodes that are no tensors among the others itself.
    if is_opaque := getattr(graph_compile, "is_opaque_node", None):
        options["saved_opaque_nodes"] = [node for node in saved if is_opaque(node)]
    apart = {*numbers, *options.get("saved_opaque_nodes", ())}
    rest = [node for node in saved if node not in apart]
    static = set(static_inputs or ())
    primals = [node for node in graph.find_nodes(op="placeholder") if is_primal(node)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        rest,
        saved_sym_nodes=numbers,
        num_fwd_outputs=joint.num_outputs,
        static_lifetime_input_nodes=OrderedSet(node for position, node in enumerate(primals) if position in static),
        **options,
    )
    # PyTorch leaves an unread random operator of the forward in the backward if its inputs are available. Attention
    # counts as random, and takes long.
    backward.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
