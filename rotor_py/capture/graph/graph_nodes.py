"""What a single node of a captured graph says about itself: its tensors, its memory, whether it writes into an input
or draws random numbers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from rotor_profiling.storage import local
from rotor_py.capture.graph.sizes import Sizes, example_of

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "exponential", "uniform")
"""Parts of the names of operators that draw random numbers; torch has no list of them for functions and methods."""
_IN_PLACE = {operator.setitem, operator.delitem}
_IN_PLACE |= {
    getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")
}
_NOT_IN_PLACE = {operator.and_, operator.or_, operator.not_, operator.is_}
"""Python's functions for `and`, `or`, `not` and `is` end in an underscore because those words are reserved."""


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
    known = {_memory(tensor) for each in node.all_input_nodes for tensor in tensors_of(each)}
    return [tensor for tensor in tensors_of(node) if _memory(tensor) not in known]


def overwrites(node: fx.Node) -> bool:
    """Whether the node may write into one of its inputs."""
    name = name_of(node)
    if node.target in _NOT_IN_PLACE:
        return False
    # torch's convention: `add_` writes, `__and__` does not.
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    return bool(node.kwargs.get("inplace") or node.kwargs.get("out") is not None)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that the node may write into; those of a norm that are its running statistics are not among them."""
    if node.op not in ("call_function", "call_method") or not overwrites(node):
        return []
    out = [each for each in tree_leaves(node.kwargs.get("out")) if isinstance(each, fx.Node)]
    return out or node.all_input_nodes[:1]


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
