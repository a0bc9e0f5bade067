"""Read the joint graph that AOTAutograd traces, one graph for forward and backward."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols
from torch.utils.checkpoint import CheckpointPolicy

from rotor_profiling import torch_compat
from rotor_profiling.isolate import main_device
from rotor_profiling.storage import allocated, tensors_in
from rotor_profiling.torch_compat import is_tangent, partitioners
from rotor_py.errors import record_fields
from rotor_solver.max_flow import reached

# Most nodes of a joint graph can be recomputed at any time, since no node overwrites their inputs. Three sorts of nodes
# cannot: random operators would draw other values, collectives and other operators with effects would have these twice,
# and operators that read a buffer which the forward overwrites would read its new values.


_size_hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint", None)
# Namespaces of operators whose results depend only on their arguments. Custom operators may read other state.
_REPLAYED = ("aten", "prims", "_quantized", "quantized", "quantized_decomposed")
UNKNOWN_SIZE = 4096  # the size assumed where a tensor's size depends on data, as in PyTorch's own partitioner
# Arguments of a batch norm on which its outputs do not depend in training.
_RUNNING_STATISTICS = {"running_mean", "running_var"}


@dataclass
class JointGraph:
    """The joint graph `module`. Its first `num_outputs` outputs are those of the forward, the others are gradients."""

    module: fx.GraphModule
    num_outputs: int

    def __post_init__(self) -> None:
        nodes = self.module.graph.nodes
        self.order = {node: position for position, node in enumerate(nodes)}
        self.calls = [node for node in nodes if node.op == "call_function"]
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.primals = [node for node in self.inputs if not is_tangent(node)]
        self.tangents = [node for node in self.inputs if is_tangent(node)]
        # The device whose memory is planned: the accelerator if an input is on one, else the CPU.
        self.device = main_device(tensors_in([node.meta.get("val") for node in self.inputs]))
        # Outputs of the forward include values that it writes into its inputs.
        returned = partitioners._extract_fwd_bwd_outputs(self.module, num_fwd_outputs=self.num_outputs)
        self.outputs, self.gradients = ([node for node in returned[i] if isinstance(node, fx.Node)] for i in (0, 1))
        # Maps each node to a dict from its tensors' storages to bytes. A view has the same storage as its base.
        self.allocations = {node: _storages(node.meta.get("val")) for node in nodes}
        # Inputs of the graph that the forward writes into, such as running statistics.
        writes = (node for node in self.calls if node.target is torch.ops.aten.copy_.default)
        self.overwritten = {node.args[0] for node in writes if isinstance(node.args[0], fx.Node)}

    @cached_property
    def forward(self) -> list[fx.Node]:
        """Nodes of the forward, in order: ancestors of the outputs, and nodes not tagged as part of the backward."""
        before = self._before_gradients
        # Include ancestors that are tagged as backward: a graph pass may have merged an equal forward node into one.
        tags = partitioners._has_tag_is_backward, partitioners._has_tag_must_be_in_backward
        own = (node for node in before if not any(tagged(node) for tagged in tags))
        needed = ancestors([*self.outputs, *own])
        return [node for node in before if node in needed]

    @cached_property
    def early(self) -> list[fx.Node]:
        """Nodes of the backward that read no gradient, so that they can run in the forward, such as a ReLU's mask."""
        forward = set(self.forward)
        found, ready = [], {*self.primals, *forward}
        for node in self._before_gradients:
            functional = node.target is operator.getitem or self._is_function(node)
            inputs = (each for each in node.all_input_nodes if each.op != "get_attr")
            elsewhere = node in forward or partitioners._has_tag_must_be_in_backward(node)
            if functional and not elsewhere and ready.issuperset(inputs):
                found.append(node)
                ready.add(node)
        return found

    @cached_property
    def _before_gradients(self) -> list[fx.Node]:
        after = set(self.tangents)
        for node in self.calls:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        return [node for node in self.calls if node not in after]

    @cached_property
    def backward(self) -> list[fx.Node]:
        forward = set(self.forward)
        return [node for node in self.calls if node not in forward]

    def in_run_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Sort `nodes` into the order in which they run: a node of `early` runs right after the last of its inputs."""
        when = {node: self.order[node] for node in self.forward}
        for node in self.early:
            when[node] = max((when[each] for each in node.all_input_nodes if each in when), default=0)
        return sorted(nodes, key=lambda node: (when[node], self.order[node]))

    @cached_property
    def root(self) -> dict[fx.Node, fx.Node]:
        """Maps each node of the forward to the node that allocated its memory: itself, unless it is a view."""
        found: dict[fx.Node, fx.Node] = {}
        for node in (*self.primals, *self.forward):
            # A `getitem` node shares memory with inputs of the operator that returned the tuple, if with any node.
            read = node.all_input_nodes[0].all_input_nodes if node.target is operator.getitem else node.all_input_nodes
            viewed = next((each for each in read if each in found and self._shares(node, each)), None)
            found[node] = node if viewed is None else found[viewed]
        return found

    def allocating(self, node: fx.Node) -> fx.Node:
        """Return the node that allocated the memory of `node`, which is in the forward or in `early`."""
        if node in self.root or node.target is operator.getitem:
            return self.root.get(node, node)
        found = next((each for each in node.all_input_nodes if self._shares(node, each)), None)
        return node if found is None else self.allocating(found)

    def _shares(self, node: fx.Node, other: fx.Node) -> bool:
        return not self.allocations[node].keys().isdisjoint(self.allocations[other])

    def bytes_of(self, node: fx.Node) -> int:
        return sum(self.allocations[node].values())

    @cached_property
    def replayable(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.forward:
            if node.args[0] in found if node.target is operator.getitem else self._is_function(node):
                found.add(node)
        return found

    def _is_function(self, node: fx.Node) -> bool:
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            return False
        target = node.target
        if not isinstance(target, torch_compat.OpOverload):
            return is_number(node)
        if target.namespace not in _REPLAYED or target._schema.is_mutable:
            return False
        names = (argument.name for argument in target._schema.arguments)
        named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if torch.Tag.nondeterministic_seeded in target.tags and named.get("dropout_p") != 0:
            return False
        statistics = named.get("training") is True or named.get("train") is True
        read = {each for name, each in named.items() if not (statistics and name in _RUNNING_STATISTICS)}
        return self.overwritten.isdisjoint(read)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return set(reached(nodes, lambda node: node.all_input_nodes))


def saved_by_torch(joint: JointGraph, budgets: Sequence[float] = (1, 0.9999)) -> list[list[fx.Node]]:
    """Return the nodes that PyTorch's partitioner saves for each budget, a share of the bytes saved by default."""
    found = partitioners.classify_nodes(joint.module, [], joint.num_outputs)
    never = int(1e9)
    for node in reversed(joint.module.graph.nodes):  # `choose_saved_values_set` reads each node's `dist_from_bw`
        near = [user.dist_from_bw + 1 for user in node.users if node.op != "output"]
        node.dist_from_bw = 0 if node.op != "output" and not found.is_required_fw(node) else min([never, *near])
    return [partitioners.choose_saved_values_set(joint.module.graph, found, budget) for budget in budgets]


def is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def known(size: Any) -> int:
    """Return a size as an int: if it is symbolic, its value for the inputs for which the graph is compiled."""
    return int(size) if isinstance(size, int) else int(_size_hint(size, fallback=UNKNOWN_SIZE))


def _storages(value: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided:
            storage = each.untyped_storage()
            size = allocated(known(storage.nbytes()), each.device.type)
            if size:
                found[storage._cdata] = size
    return found


_log = logging.getLogger("rotor_py")


def guard_sizes(inputs: list[fx.Node]) -> None:
    """Make TorchDynamo recompile for larger inputs, which need more memory; log a warning if a size depends on data."""
    for node in inputs:
        value = node.meta.get("val")
        sizes = [value] if isinstance(value, torch.SymInt) else [s for each in tensors_in(value) for s in each.shape]
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            environment: ShapeEnv = size.node.shape_env
            if any(map(environment.is_unbacked_symint, free_symbols(size))):
                said = "a tensor size depends on data (%s): the graph keeps its memory budget if the size is at most %d"
                fields = record_fields("size_depends_on_data", name=str(size.node.expr), assumed=UNKNOWN_SIZE)
                _log.warning(said, size.node.expr, UNKNOWN_SIZE, extra=fields)
            elif isinstance(size.node.expr, sympy.Symbol):
                bool(size <= known(size))  # `bool` adds a guard, which TorchDynamo checks before each call of the code
