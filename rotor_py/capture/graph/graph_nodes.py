"""What a single node of a captured graph says about itself: its tensors, its memory, whether it writes into an input
or draws random numbers.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, Set
from functools import cache
from inspect import signature
from typing import Any

import sympy  # torch needs it for its symbols
import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rotor_profiling.storage import local
from rotor_profiling.torch_compat import tree_leaves

# The sizes of a graph's tensors in numbers: one graph serves many shapes, and has symbols for what may differ.
#
# Cuts and what stages keep are decided by bytes. A symbol has a size that TorchDynamo saw when it traced the graph, but
# that may have been for another input, or for another model that is built alike. What counts is what comes in now.

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Sizes:
    """Numbers for the symbols of a graph whose `placeholders` are called with `arguments`."""

    def __init__(self, placeholders: Iterable[fx.Node] = (), arguments: Iterable[Any] = ()) -> None:
        self._known: dict[Any, sympy.Integer] = {}
        for node, argument in zip(placeholders, arguments, strict=True):
            example = example_of(node)
            if isinstance(example, torch.Tensor) and isinstance(argument, torch.Tensor):
                # The part that this process has of a `DTensor` has symbols of its own.
                for seen, given in ((example, argument), (local(example), local(argument))):
                    for size, found in zip(seen.shape, given.shape, strict=False):
                        self._learn(size, found)
            else:
                self._learn(example, argument)

    def _learn(self, size: Any, found: Any) -> None:
        expression = getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) else None
        if expression is not None and expression.is_Symbol:
            self._known[expression] = sympy.Integer(int(found))

    def number(self, value: Any) -> Any:
        """A size, stride or other number of the graph, without symbols. Of unknown ones, what TorchDynamo saw counts.

        What is no symbolic number is returned as it is; None for a number that nobody knows before the graph runs.
        """
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = getattr(value.node, "expr", None)
        found = None if expression is None else expression.xreplace(self._known)
        if found is None or not found.is_number:
            return value.node.hint
        kind: type = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
        return kind(found)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor in this process; a dimension that nobody knows counts as one.

        Of a `DTensor` in parts of several sizes, it is the largest part: all processes have to decide alike.
        """
        count = tensor.element_size()
        for size in self._largest_part(tensor):
            count *= 1 if size is None else size
        return count

    def _largest_part(self, tensor: torch.Tensor) -> list[int | None]:
        if not isinstance(tensor, DTensor):
            return list(map(self.number, local(tensor).shape))
        sizes: list[int | None] = list(map(self.number, tensor.shape))
        for number, placement in enumerate(tensor.placements):
            divided = getattr(placement, "dim", None)  # of shards of any kind
            if divided is not None and (whole := sizes[divided]) is not None:
                sizes[divided] = -(-whole // tensor.device_mesh.size(number))
        return sizes


def example_of(node: fx.Node) -> Any:
    """The node's value as Dynamo saw it, with fake tensors, which have no data."""
    # Dynamo writes "example_value"; graphs from torch's other tracers have "val".
    return node.meta.get("example_value", node.meta.get("val"))


_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "exponential", "uniform")
"""Parts of the names of operators that draw random numbers; torch has no list of them for functions and methods."""
_IN_PLACE = {operator.setitem, operator.delitem}
_IN_PLACE |= {
    getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")
}
_NOT_IN_PLACE = {operator.and_, operator.or_, operator.not_, operator.is_}
"""Python's functions for `and`, `or`, `not` and `is` end in an underscore because those words are reserved."""
# fmt: off
_ALLOCATING = {
    "add", "sub", "mul", "div", "truediv", "neg", "pow", "exp", "sin", "cos", "tanh", "sigmoid", "softmax", "mean",
    "sum", "cat", "stack", "clone", "relu", "gelu", "silu", "leaky_relu", "elu", "softplus", "hardswish", "hardtanh",
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "grouped_products", "scaled_dot_product_attention", "embedding",
    "batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "cross_entropy",
}
# fmt: on
"""Operators that write what they make into new memory. Others do so if they have to: `contiguous`, or `dropout` of
nothing; and whether they have to is not told by Dynamo's tensors, which have other strides, from other kernels.
"""
_NAMED_BY_CONVENTION = {"torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator"}
_NAMED_BY_CONVENTION |= {"rotor_py.capture.patches"}
"""Where functions come from of which the names say whether they write. Others may be named in any way."""


def carries_gradient(node: fx.Node) -> bool:
    """Whether a tensor of the node's value needs a gradient."""
    return any(tensor.requires_grad for tensor in tensors_of(node))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the node's value as Dynamo saw them: fake tensors, which have no data."""
    example = example_of(node)
    if isinstance(example, torch.Tensor):  # of most nodes; all of them are asked many times
        return [example]
    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]


def need_gradients(nodes: Iterable[fx.Node]) -> list[bool]:
    """Of every tensor of the nodes' values, in order, whether it needs a gradient."""
    return [tensor.requires_grad for node in nodes for tensor in tensors_of(node)]


def new_bytes(node: fx.Node, sizes: Sizes) -> int:
    """Bytes of memory that the node allocates; none if its value lies in the memory of its inputs."""
    return sum(map(sizes.bytes_of, _new_tensors(node)))


def _new_tensors(node: fx.Node) -> list[torch.Tensor]:
    known = memories_of(node.all_input_nodes)
    return [tensor for tensor in tensors_of(node) if _memory(tensor) not in known]


def overwrites(node: fx.Node) -> bool:
    """Whether the node may write into one of its inputs."""
    name = name_of(node)
    if node.target in _NOT_IN_PLACE:
        return False
    # torch's convention: `add_` writes, `__and__` does not.
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    place = _place_of_inplace(node.target) if node.op == "call_function" else len(node.args)
    given = node.args[place] if place < len(node.args) else node.kwargs.get("inplace")
    return bool(given) or node.kwargs.get("out") is not None


@cache
def _place_of_inplace(function: Any) -> int:
    """The position of the parameter `inplace` of a function; beyond all if it has none."""
    if getattr(function, "__module__", None) != functional.__name__:
        return sys.maxsize
    names = list(signature(function).parameters)
    return names.index("inplace") if "inplace" in names else sys.maxsize


def written_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that the node may write into; those of a norm that are its running statistics are not among them."""
    if node.op not in ("call_function", "call_method") or not overwrites(node):
        return []
    out = [each for each in tree_leaves(node.kwargs.get("out")) if isinstance(each, fx.Node)]
    return out or node.all_input_nodes[: None if name_of(node).startswith("_foreach_") else 1]


def writes_into(node: fx.Node, given: Set[int]) -> bool:
    """Whether the node may write into the memories `given`, other than into the running statistics of a norm."""
    if node.op == "call_function" and getattr(node.target, "__module__", None) not in _NAMED_BY_CONVENTION:
        return True
    return not given.isdisjoint(memories_of(written_by(node)))


def memories_of(nodes: Iterable[fx.Node]) -> set[int]:
    """What the memories are known by in which the tensors of the nodes' values lie."""
    return {_memory(tensor) for node in nodes for tensor in tensors_of(node)}


def allocates(node: fx.Node) -> bool:
    """Whether it is known that what the node makes lies in new memory."""
    return (name_of(node) in _ALLOCATING or _drops_out(node)) and bool(_new_tensors(node))


def _drops_out(node: fx.Node) -> bool:
    """Whether the node is `functional.dropout(value, p, training)`, and drops something: else it returns `value`."""
    if node.target is not functional.dropout:
        return False
    given = dict(zip(("value", "p", "training"), node.args, strict=False)) | node.kwargs
    share, training = given.get("p", 0.5), given.get("training", True)
    return isinstance(share, float) and share > 0 and training is True


def is_random(node: fx.Node) -> bool:
    """Whether the node may draw random numbers."""
    return any(word in name_of(node) for word in _RANDOM)


def module_path(node: fx.Node) -> str:
    """The dotted path of the module whose forward the node belongs to, as in `named_modules`."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # Dynamo writes the path as an expression: L['model'].layers.0 in torch 2.13, with `_modules` and ['0'] in others.
    path = re.sub(r"^L\['\w+'\]\.?", "", str(list(stack.values())[-1][0]))
    path = re.sub(r"\['?", ".", path).replace("']", "").replace("]", "")
    return path.replace("_modules.", "").strip(".")


def attribute_of(module: Any, target: Any) -> Any:
    """The attribute of `module` that the dotted path `target` names."""
    for part in str(target).split("."):
        module = getattr(module, part)
    return module


GATHERED = "gathered"
"""In `meta` of a node that stands for a sharded parameter, which is whole while the stage runs."""


def owned_by(module: Any, node: fx.Node) -> Any:
    """What a `get_attr` node stands for; a sharded parameter as it looks when it is gathered, without memory."""
    return node.meta["example_value"] if GATHERED in node.meta else attribute_of(module, node.target)


def memory_root(node: fx.Node) -> fx.Node:
    """The node that allocated the memory in which the node's value lies, as far as can be told.

    From a node that allocates nothing, the search goes on with its first input: for views and in-place operators, that
    is the tensor that they look at or write into.
    """
    while (inputs := node.all_input_nodes) and tensors_of(node) and not _new_tensors(node):
        node = inputs[0]
    return node


def name_of(node: fx.Node) -> str:
    """The name of the node's operator, be it a function or a method."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def _memory(tensor: torch.Tensor) -> int:
    # Not the address of the data: all fake tensors have 0 there.
    return int(local(tensor).untyped_storage()._cdata)
