"""The joint graph of forward and backward that AOTAutograd hands over."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols
from torch.utils.checkpoint import CheckpointPolicy

from rotor_profiling import torch_compat
from rotor_profiling.storage import allocated, tensors_in
from rotor_profiling.torch_compat import is_tangent, partitioners
from rotor_py.errors import record_fields

# A graph of forward and backward together, as AOTAutograd traces it: who allocates what, and what may run again.
#
# AOTAutograd hands a partitioner one graph for both directions. Its values are immutable, so a value can be made again
# from other values at any time. Three kinds of nodes never run again: random ones would draw anew, collectives and
# effects would happen twice, and what reads a buffer that the forward overwrites would read what is there afterwards.


_size_hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint", None)
"""Its name since torch 2.13, and in torch 2.11."""
_REPLAYED = ("aten", "prims", "_quantized", "quantized", "quantized_decomposed")
"""Namespaces of operators that are known to be functions of their arguments. An operator of anybody else may not be."""
UNKNOWN_SIZE = 4096
"""What stands for a size that nobody knows while compiling; the number that PyTorch's own partitioner takes."""
_RUNNING_STATISTICS = {"running_mean", "running_var"}
"""Arguments of a batch norm that its outputs do not depend on in training."""


@dataclass
class JointGraph:
    """The graph of `module`, whose first `num_outputs` outputs are those of the forward."""

    module: fx.GraphModule
    num_outputs: int
    stand_ins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """By value that cannot run again, another node with the same value that can."""

    @cached_property
    def outputs(self) -> list[fx.Node]:
        """What the forward returns, values that it writes into its inputs included."""
        return self._ends[0]

    @cached_property
    def gradients(self) -> list[fx.Node]:
        """What the backward returns."""
        return self._ends[1]

    @cached_property
    def _ends(self) -> tuple[list[fx.Node], list[fx.Node]]:
        found = partitioners._extract_fwd_bwd_outputs(self.module, num_fwd_outputs=self.num_outputs)[:2]
        forward, backward = ([node for node in nodes if isinstance(node, fx.Node)] for nodes in found)
        return forward, backward

    @cached_property
    def forward(self) -> list[fx.Node]:
        """What runs forward, in order: what the outputs need, and what is not known to belong to the backward."""
        before = self._before_gradients
        # With what these read: a pass may have put a node of the backward in the place of an equal one of the forward.
        needed = ancestors([*self.outputs, *(node for node in before if not _tagged_backward(node))])
        return [node for node in before if node in needed]

    @cached_property
    def early(self) -> list[fx.Node]:
        """What autograd runs backward and may as well run forward: it reads no gradient. A ReLU's mask, for example.

        No random operator is among it: it would draw in another order.
        """
        forward = set(self.forward)
        found, ready = [], {*self.primals, *forward}
        for node in self._before_gradients:
            functional = node.target is operator.getitem or self._is_function(node)
            inputs = (each for each in node.all_input_nodes if each.op != "get_attr")
            if node not in forward and functional and not _must_run_backward(node) and ready.issuperset(inputs):
                found.append(node)
                ready.add(node)
        return found

    @cached_property
    def _before_gradients(self) -> list[fx.Node]:
        after: set[fx.Node] = {node for node in self.inputs if is_tangent(node)}
        for node in self._calls:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        return [node for node in self._calls if node not in after]

    @cached_property
    def backward(self) -> list[fx.Node]:
        """What runs backward, in the order in which autograd would run it."""
        forward = set(self.forward)
        return [node for node in self._calls if node not in forward]

    @cached_property
    def _calls(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @cached_property
    def inputs(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @cached_property
    def primals(self) -> list[fx.Node]:
        """Inputs of the forward: parameters, buffers and what the caller passes."""
        return [node for node in self.inputs if not is_tangent(node)]

    @cached_property
    def tangents(self) -> list[fx.Node]:
        """Gradients of the outputs, which come into the backward."""
        return [node for node in self.inputs if is_tangent(node)]

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: position for position, node in enumerate(self.module.graph.nodes)}

    def in_turn(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """`nodes` of the forward, some of which may be `early`: these run right after what they read."""
        when = {node: self.order[node] for node in self.forward}
        for node in self.early:
            when[node] = max((when[each] for each in node.all_input_nodes if each in when), default=0)
        return sorted(nodes, key=lambda node: (when[node], self.order[node]))

    @cached_property
    def allocations(self) -> dict[fx.Node, dict[int, int]]:
        """By node, the storages behind its tensors, and their bytes. A view has the storage of what it views."""
        return {node: _storages(node.meta.get("val")) for node in self.module.graph.nodes}

    @cached_property
    def root(self) -> dict[fx.Node, fx.Node]:
        """By node of the forward, the node that allocated its memory: itself, unless it is a view."""
        found: dict[fx.Node, fx.Node] = {}
        for node in (*self.primals, *self.forward):
            mine = self.allocations[node].keys()
            read = (
                each for each in node.all_input_nodes if each in found and not mine.isdisjoint(self.allocations[each])
            )
            viewed = next(read, None) if mine and node.target is not operator.getitem else None
            if node.target is operator.getitem:
                # The storage is new in the operator whose output it is, unless that returned one that it was given.
                source = node.all_input_nodes[0]
                given = (each for each in source.all_input_nodes if not mine.isdisjoint(self.allocations[each]))
                viewed = next(given, None) if mine else None
            found[node] = node if viewed is None else found[viewed]
        return found

    def allocating(self, node: fx.Node) -> fx.Node:
        """The node that allocated the memory of a node of the forward, or of one that runs `early`."""
        if node in self.root or node.target is operator.getitem:
            return self.root.get(node, node)
        mine = self.allocations[node]
        viewed = (each for each in node.all_input_nodes if not mine.keys().isdisjoint(self.allocations[each]))
        found = next(viewed, None)
        return node if found is None else self.allocating(found)

    def bytes_of(self, node: fx.Node) -> int:
        """The bytes of the memory that a node allocates or views."""
        return sum(self.allocations[node].values())

    @cached_property
    def overwritten(self) -> set[fx.Node]:
        """Inputs that the forward writes into: running statistics, for example."""
        writes = (node for node in self._calls if node.target is torch.ops.aten.copy_.default)
        return {node.args[0] for node in writes if isinstance(node.args[0], fx.Node)}

    @cached_property
    def replayable(self) -> set[fx.Node]:
        """The nodes of the forward that may run again in the backward."""
        found: set[fx.Node] = set()
        for node in self.forward:
            if node in self.stand_ins:
                found.add(node)
            elif node.target is operator.getitem:
                if node.args[0] in found:
                    found.add(node)
            elif self._is_function(node):
                found.add(node)
        return found

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What a node is made again from."""
        return [self.stand_ins[node]] if node in self.stand_ins else node.all_input_nodes

    def _is_function(self, node: fx.Node) -> bool:
        if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
            return False
        target = node.target
        if not isinstance(target, torch_compat.OpOverload):
            return is_number(node)
        if target.namespace not in _REPLAYED or target._schema.is_mutable:
            return False
        named = _named_arguments(node)
        if torch.Tag.nondeterministic_seeded in target.tags and named.get("dropout_p") != 0:
            return False
        statistics = named.get("training") is True or named.get("train") is True
        read = {each for name, each in named.items() if not (statistics and name in _RUNNING_STATISTICS)}
        return self.overwritten.isdisjoint(read)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes`, and all that they are made from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def usually_saved(joint: JointGraph, budgets: Sequence[float] = (1, 0.9999)) -> list[list[fx.Node]]:
    """What PyTorch's partitioner saves with each of these budgets, which are parts of what it saves without one.

    By default, that is without one, and with one that hardly binds.
    """
    found = partitioners.classify_nodes(joint.module, [], joint.num_outputs)
    never = int(1e9)
    for node in reversed(joint.module.graph.nodes):  # its cuts read how far a node is from the backward
        near = [user.dist_from_bw + 1 for user in node.users if node.op != "output"]
        node.dist_from_bw = 0 if node.op != "output" and not found.is_required_fw(node) else min([never, *near])
    # Of several budgets, just one below the whole returns before it solves for anything.
    return [partitioners.choose_saved_values_set(joint.module.graph, found, budget) for budget in budgets]


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a size or another number, and no tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def known(size: Any) -> int:
    """A size as a number: for a symbol, the size of the inputs that are compiled for."""
    return int(size) if isinstance(size, int) else int(_size_hint(size, fallback=UNKNOWN_SIZE))


def _tagged_backward(node: fx.Node) -> bool:
    return partitioners._has_tag_is_backward(node) or _must_run_backward(node)


def _must_run_backward(node: fx.Node) -> bool:
    found: bool = partitioners._has_tag_must_be_in_backward(node)
    return found


def _storages(value: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided:
            storage = each.untyped_storage()
            size = allocated(known(storage.nbytes()), each.device.type)
            if size:
                found[storage._cdata] = size
    return found


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch_compat.OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


_log = logging.getLogger("rotor_py")


def guard_sizes(inputs: list[fx.Node]) -> None:
    """Have TorchDynamo compile again where a size is larger than now: memory grows with every size.

    Sizes that depend on data have no bound. What stands for them is said in a warning.
    """
    for node in inputs:
        value = node.meta.get("val")
        sizes = [value] if isinstance(value, torch.SymInt) else [s for each in tensors_in(value) for s in each.shape]
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            environment: ShapeEnv = size.node.shape_env
            if any(map(environment.is_unbacked_symint, free_symbols(size))):
                _log.warning(
                    "a graph's sizes depend on data (%s); its memory budget is kept for a size of %d",
                    size.node.expr,
                    UNKNOWN_SIZE,
                    extra=record_fields("size_depends_on_data", name=str(size.node.expr), assumed=UNKNOWN_SIZE),
                )
            elif isinstance(size.node.expr, sympy.Symbol):
                bool(size <= known(size))  # a guard: Dynamo checks it before it uses what is compiled here
