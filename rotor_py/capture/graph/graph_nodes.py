"""Functions that tell a node's tensors, the memory that it allocates or writes into, and whether it is random."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Iterable
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import sympy  # a dependency of torch
import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rotor_profiling.storage import local
from rotor_profiling.torch_compat import tree_leaves

# To choose cuts and saved values, rotor_py needs the bytes of tensors, which depend on the current input's sizes. The
# hint of a symbolic size may be wrong: it is the size at tracing, maybe of another input or of another model's input.

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SymbolValues:
    """Values of a graph's symbolic sizes, read from the `arguments` that the graph's `placeholders` stand for."""

    def __init__(self, placeholders: Iterable[fx.Node] = (), arguments: Iterable[Any] = ()) -> None:
        self._known: dict[Any, sympy.Integer] = {}
        for node, argument in zip(placeholders, arguments, strict=True):
            example = example_of(node)
            pairs = [(example, argument)]
            if isinstance(example, torch.Tensor) and isinstance(argument, torch.Tensor):
                # Read the sizes of a `DTensor` and of its local shard: they have different symbols.
                alike = ((example, argument), (local(example), local(argument)))
                pairs = [pair for seen, given in alike for pair in zip(seen.shape, given.shape, strict=False)]
            for size, found in pairs:
                expression = getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) else None
                if expression is not None and expression.is_Symbol:
                    self._known[expression] = sympy.Integer(int(found))

    def number(self, value: Any) -> Any:
        """Return a symbolic `value` as an int, float or bool; if it is unknown, TorchDynamo's hint, maybe None."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = getattr(value.node, "expr", None)
        found = None if expression is None else expression.xreplace(self._known)
        if found is None or not found.is_number:
            return value.node.hint
        kind: type = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
        return kind(found)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return a tensor's bytes; of a `DTensor`, the bytes of its largest shard. Unknown sizes count as 1."""
        shape = tensor.shape if isinstance(tensor, DTensor) else local(tensor).shape
        sizes: list[int | None] = list(map(self.number, shape))
        if isinstance(tensor, DTensor):
            for number, placement in enumerate(tensor.placements):
                divided = getattr(placement, "dim", None)  # the tensor dimension that is sharded; none for replicas
                if divided is not None and (size := sizes[divided]) is not None:
                    sizes[divided] = -(-size // tensor.device_mesh.size(number))
        return tensor.element_size() * math.prod(1 if size is None else size for size in sizes)


def example_of(node: fx.Node) -> Any:
    """Return the value that the node had at tracing, in which tensors are fake."""
    # TorchDynamo writes the key "example_value"; torch's other tracers write "val".
    return node.meta.get("example_value", node.meta.get("val"))


_SIZES = (int, float, *_SYMBOLIC, torch.Size)


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number or a shape."""
    return isinstance(example_of(node), _SIZES)


# A function counts as random if its name contains one of these words, or if torch has tagged the operator of that name
# as random: torch has no list of random functions.
_RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "rrelu", "exponential", "uniform"),
    *("gumbel", "fractional", "lowrank"),
)
# Functions with the tag that draw only with dropout: for each, the position of its probability among the arguments.
_WITH_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # `draws_random_numbers` tells of these
_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")
_IN_PLACE = {operator.setitem, operator.delitem, *(getattr(operator, f"i{name}") for name in _AUGMENTED)}
# `operator.and_` and others end in an underscore because `and` is reserved, not because they work in place.
_NOT_IN_PLACE = {operator.and_, operator.or_, operator.not_, operator.is_}


def carries_gradient(node: fx.Node) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(node))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    example = example_of(node)
    if isinstance(example, torch.Tensor):  # a shortcut for most nodes: this is called very often
        return [example]
    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]


def need_gradients(nodes: Iterable[fx.Node]) -> list[bool]:
    return [tensor.requires_grad for node in nodes for tensor in tensors_of(node)]


def new_bytes(node: fx.Node, sizes: SymbolValues) -> int:
    return sum(map(sizes.bytes_of, _new_tensors(node)))


def _new_tensors(node: fx.Node) -> list[torch.Tensor]:
    known = {_memory(tensor) for each in node.all_input_nodes for tensor in tensors_of(each)}
    return [tensor for tensor in tensors_of(node) if _memory(tensor) not in known]


def overwrites(node: fx.Node) -> bool:
    name = name_of(node)
    if node.target in _NOT_IN_PLACE:
        return False
    # By torch's naming convention, `add_` writes into its input, and `__and__` does not.
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    place = _place_of_inplace(node.target) if node.op == "call_function" else len(node.args)
    given = node.args[place] if place < len(node.args) else node.kwargs.get("inplace")
    return bool(given) or node.kwargs.get("out") is not None


@cache
def _place_of_inplace(function: Any) -> int:
    if getattr(function, "__module__", None) != functional.__name__:
        return sys.maxsize
    names = list(signature(function).parameters)
    return names.index("inplace") if "inplace" in names else sys.maxsize


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the input nodes that a node may write into, in place or as `out`, without running statistics of norms."""
    if node.op not in ("call_function", "call_method") or not overwrites(node):
        return []
    out = [each for each in tree_leaves(node.kwargs.get("out")) if isinstance(each, fx.Node)]
    return out or node.all_input_nodes[: None if name_of(node).startswith("_foreach_") else 1]


def is_random(node: fx.Node) -> bool:
    name = name_of(node)
    if (place := _WITH_DROPOUT.get(name)) is not None:
        return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))
    return any(word in name for word in _RANDOM) or _is_tagged(name)


@cache
def _is_tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None or name in _RECURRENT else [getattr(packet, each) for each in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # TorchDynamo's path is a Python expression: L['model'].layers.0; older versions have `_modules` and ['0'] in it.
    path = re.sub(r"^L\['\w+'\]\.?", "", str(list(stack.values())[-1][0]))
    path = re.sub(r"\['?", ".", path).replace("']", "").replace("]", "")
    return path.replace("_modules.", "").strip(".")


def attribute_of(module: Any, target: Any) -> Any:
    return operator.attrgetter(str(target))(module)


GATHERED = "gathered"  # key in `node.meta`, set for sharded parameters, which FSDP gathers while the stage runs


def owned_by(module: Any, node: fx.Node) -> Any:
    """Return the value of a `get_attr` node; for a sharded parameter, a fake tensor like the gathered parameter."""
    return node.meta["example_value"] if GATHERED in node.meta else attribute_of(module, node.target)


def memory_root(node: fx.Node) -> fx.Node:
    """Return the node that allocated this node's memory: an earlier one for views and in-place operators, or itself."""
    while (inputs := node.all_input_nodes) and tensors_of(node) and not _new_tensors(node):
        node = inputs[0]
    return node


def name_of(node: fx.Node) -> str:
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def _memory(tensor: torch.Tensor) -> int:
    # Identify a storage by its C++ object: the data address of all fake tensors is 0.
    return int(local(tensor).untyped_storage()._cdata)


_OWN = str(Path(__file__).parent.parent)


def lines_of(node: fx.Node) -> list[str]:
    return [frame for frame in re.split(r"(?m)^(?=  File )", node.meta.get("stack_trace") or "") if _OWN not in frame]


def line_of(node: fx.Node) -> str:
    """Return the model's source line that a node comes from, as "path:number (text)"."""
    frames = lines_of(node)
    found = re.search(r'File "(.+)", line (\d+)[^\n]*\n\s*([^\n]*)', frames[-1]) if frames else None
    return "an unknown line" if found is None else f"{found[1]}:{found[2]} ({found[3].strip()})"
