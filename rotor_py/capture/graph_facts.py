"""What is to be known of a graph before it is cut: what carries a gradient, what does not, and under which modes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from rotor_py.capture.fsdp_marks import MARKS, FSDPMarks, Place
from rotor_py.distributed.shard_groups import ShardGroup

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "exponential", "uniform")
_IN_PLACE = {operator.setitem, operator.delitem}
_IN_PLACE |= {
    getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")
}
_NEW = {operator.and_, operator.or_, operator.not_, operator.is_}
"""Operators whose names look as if they wrote into something."""
_GRAD_MODE = torch._C._set_grad_enabled
_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


@dataclass(frozen=True, slots=True)
class Modes:
    """What is switched on around a node: autocast regions, by the node that enters each, and gradients."""

    autocast: tuple[fx.Node, ...] = ()
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A graph, read once.

    `context` are the nodes that carry no gradient and can run before all others: masks, positions, tables. `body` is
    the rest, in order. `owned` are the placeholders that are parameters or buffers, by node.
    """

    context: list[fx.Node]
    body: list[fx.Node]
    outputs: list[Any]
    modes: dict[fx.Node, Modes]
    owned: dict[fx.Node, torch.Tensor]
    modules: dict[fx.Node, nn.Module]
    given: list[fx.Node]
    """The other placeholders: what the caller passes in."""
    marks: FSDPMarks | None = None
    sharded: dict[fx.Node, tuple[Place, ShardGroup]] = field(default_factory=dict)
    """Of the owned ones, those that are holes: where the parameter is, and the group that it is gathered with."""


def read_graph(
    graph_module: fx.GraphModule, inputs: Iterable[Any], buffers: frozenset[int], marks: FSDPMarks | None = None
) -> GraphFacts:
    """Read a graph that is to be called with `inputs`; `buffers` are the ids of tensors that are buffers."""
    places = marks.places if marks else {}
    sharded: dict[fx.Node, tuple[Place, ShardGroup]] = {}
    owned: dict[fx.Node, torch.Tensor] = {}
    modules: dict[fx.Node, nn.Module] = {}
    given, context, body, outputs = [], [], [], []
    modes: dict[fx.Node, Modes] = {}
    early: set[fx.Node] = set()
    used_late: set[fx.Node] = set()
    now = Modes()
    remaining = iter(inputs)
    for node in graph_module.graph.nodes:
        modes[node] = now
        if node.op == "placeholder":
            value = next(remaining)
            if isinstance(value, nn.Parameter) or id(value) in buffers or _named_buffer(node, value):
                owned[node] = value
                if id(value) in places:
                    sharded[node] = places[id(value)]
                elif not value.requires_grad and isinstance(value, nn.Parameter):
                    early.add(node)
            else:
                given.append(node)
                if not carries_gradient(node):
                    early.add(node)
        elif node.op == "output":
            outputs = list(node.args[0])
        elif node.op == "get_attr" and isinstance(found := attribute_of(graph_module, node.target), nn.Module):
            modules[node] = found
        elif node.target in (_GRAD_MODE, _ENTER, _EXIT):
            now = _switched(now, node)
        elif not any(each in sharded for each in node.all_input_nodes) and _is_early(node, early, owned, used_late):
            early.add(node)
            context.append(node)
        else:
            body.append(node)
            used_late.update(_root(each) for each in node.all_input_nodes)
    return GraphFacts(context, body, outputs, modes, owned, modules, given, marks, sharded)


def carries_gradient(node: fx.Node) -> bool:
    """Whether a tensor of the node's value needs a gradient."""
    return any(tensor.requires_grad for tensor in tensors_of(node))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The node's value as Dynamo saw it: tensors without numbers."""
    found = node.meta.get("example_value", node.meta.get("val"))
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def new_bytes(node: fx.Node) -> int:
    """Bytes of memory that the node makes; none if its value lies in its inputs' memory."""
    known = {_memory(tensor) for each in node.all_input_nodes for tensor in tensors_of(each)}
    return sum(size_of(tensor) for tensor in tensors_of(node) if _memory(tensor) not in known)


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, as Dynamo first saw it where its shape may change."""
    count = tensor.element_size()
    for size in tensor.shape:
        count *= size if isinstance(size, int) else int(size.node.hint or 1)
    return count


def overwrites(node: fx.Node) -> bool:
    """Whether the node may write into one of its inputs."""
    name = _name(node)
    if node.target in _NEW:
        return False
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    return bool(node.kwargs.get("inplace") or node.kwargs.get("out") is not None)


def written_input(facts: GraphFacts) -> fx.Node | None:
    """A node that writes into a tensor that the model is called with."""
    for node in facts.body:
        if node.op in ("call_function", "call_method") and overwrites(node) and node.all_input_nodes:
            target = _root(node.all_input_nodes[0])
            if target in facts.given and target.name.startswith(("l_args_", "l_kwargs_")):
                return node
    return None


def is_random(node: fx.Node) -> bool:
    """Whether the node may draw random numbers."""
    return any(word in _name(node) for word in _RANDOM)


def module_path(node: fx.Node) -> str:
    """The dotted path of the module whose forward the node belongs to, as in `named_modules`."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"^L\['\w+'\]\.?", "", str(list(stack.values())[-1][0]))
    path = re.sub(r"\['?", ".", path).replace("']", "").replace("]", "")
    return path.replace("_modules.", "").strip(".")


def attribute_of(module: Any, target: Any) -> Any:
    """What the dotted path `target` names in a module."""
    for part in str(target).split("."):
        module = getattr(module, part)
    return module


def _is_early(node: fx.Node, early: set[fx.Node], owned: dict[fx.Node, torch.Tensor], late: set[fx.Node]) -> bool:
    if carries_gradient(node) or is_random(node) or "_norm" in _name(node) or node.target in MARKS:
        return False
    inputs = node.all_input_nodes
    if not all(each in early or (each in owned and not owned[each].requires_grad) for each in inputs):
        return False
    if overwrites(node):
        target = _root(inputs[0])
        return target.op not in ("placeholder", "get_attr") and target not in late
    return node.op in ("call_function", "call_method", "get_attr")


def _switched(now: Modes, node: fx.Node) -> Modes:
    if node.target is _GRAD_MODE:
        return Modes(now.autocast, bool(node.args[0]))
    if node.target is _ENTER:
        return Modes((*now.autocast, node), now.gradients)
    return Modes(tuple(each for each in now.autocast if each is not node.args[0]), now.gradients)


def _root(node: fx.Node) -> fx.Node:
    """The node that made the memory in which the node's value lies, as far as can be told."""
    while (inputs := node.all_input_nodes) and new_bytes(node) == 0 and tensors_of(node):
        node = inputs[0]
    return node


def _name(node: fx.Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _named_buffer(node: fx.Node, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and "_buffers_" in str(node.target)
