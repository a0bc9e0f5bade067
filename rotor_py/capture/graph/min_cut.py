"""What a captured stage that is stored in part keeps: the fewest bytes from which cheap operators make the rest again.

Which values to keep is a minimum cut. Memory flows from what cannot be made again cheaply, through the cheap operators,
to what autograd saves. A cut through the values separates the two, and its capacity is the bytes of the values that it
cuts. The cut of least capacity is the least memory from which all that autograd saves can be made. PyTorch's compiler
decides in the same way what a backward recomputes (torch._functorch.partitioners).
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.nn import functional as F

from rotor_profiling.storage import layout_of
from rotor_py.capture.graph.graph_nodes import overwrites, tensors_of
from rotor_py.capture.graph.saved_values import find_saved_values
from rotor_py.capture.graph.sizes import Sizes
from rotor_py.stage.ways.partial_saving import Call, Recipe, Value

_log = logging.getLogger("rotor_py")

_WORTHWHILE = 0.1
"""The least part of the saved bytes that has to be dropped. A guess: for less, a second way to run the stage is not
worth measuring, and would only make the solver slower.
"""
# fmt: off
_OPERATORS = (
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv", "neg", "negative", "pow",
    "square", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "expm1", "log", "log1p", "log2", "erf", "tanh", "sigmoid",
    "sin", "cos", "where", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "mean", "sum", "var", "amax",
    "softmax", "log_softmax", "cat", "concat", "stack", "relu", "rms_norm", "layer_norm", "group_norm", "clone",
    "contiguous", "softplus", "celu", "selu", "masked_fill", "to", "type_as", "float", "half", "bfloat16",
)
_LAYERS = (
    "silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardswish",
    "hardsigmoid", "hardtanh", "tanh", "sigmoid", "logsigmoid", "softsign", "softmax", "log_softmax", "layer_norm",
    "rms_norm", "group_norm", "glu", "normalize",
)
# fmt: on
_CHEAP: set[Any] = {
    *(getattr(module, name) for name in _OPERATORS for module in (torch, operator) if hasattr(module, name)),
    *(getattr(module, name) for name in _LAYERS for module in (F, torch._C._nn) if hasattr(module, name)),
    *_OPERATORS,
}
"""Operators that take no longer than reading and writing their tensors, as functions and as names of methods. Matrix
products, convolutions and attention take longer. Random operators would have to draw again from the same state.
"""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a stage stored in part keeps for its backward, what it drops, and how to make that again.

    Values are named by the number of their node in the stage's graph, so that they mean the same for all equal stages.
    """

    kept: frozenset[int]
    dropped: frozenset[int]
    recipe: Recipe

    def instrumented(self, body: fx.GraphModule, stage: fx.Graph) -> fx.GraphModule:
        """A copy of a graph on `body` whose first input is a `PartialSaving`.

        The copy hands it every value to keep or drop, as soon as the value is there. The copy has no attributes: it is
        run on those of `body`, so that parameters are there once.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        saving = graph.placeholder("saving")
        graph.output(graph.graph_copy(stage, copies))
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for number, node in enumerate(stage.nodes):
            if number in self.kept or number in self.dropped:
                with graph.inserting_after(last if node.op == "placeholder" else copies[node]):
                    how = "drop" if number in self.dropped else "keep"
                    graph.call_method(how, (saving, number, copies[node]))
        found = fx.GraphModule(body, graph, "PartialGraphStage")
        for attributes in (found._parameters, found._buffers, found._modules):
            attributes.clear()
        return found


def find_saved_part(body: fx.GraphModule, shared: int, sizes: Sizes) -> SavedPart | None:
    """What `body` keeps if it is stored in part; None if that saves less than a tenth, or cannot be found.

    Its last `shared` inputs are those that all stages share, and in memory in any case. `sizes` says what its symbols
    stand for.
    """
    nodes = list(body.graph.nodes)
    # What an operator has overwritten is lost, and a value that was made under a mode would be made again without it.
    if any(node.op == "call_module" or node.target in _MODES or _writes(node) for node in nodes):
        return None
    try:
        saved, roots = find_saved_values(body, sizes)
    except Exception as error:  # an operator may refuse tensors without memory, in ways of its own
        _log.debug("a stage is stored whole or not at all, since its graph cannot be run without memory: %s", error)
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {*(node for node in nodes if node.op == "get_attr"), *inputs[len(inputs) - shared :]}
    bytes_of = {node: _size(node, sizes) for node in nodes}
    cut = _cut(nodes, saved, roots, free, bytes_of)
    dropped = saved - cut
    if not dropped or _total(dropped, bytes_of) < _WORTHWHILE * _total(saved - free, bytes_of):
        return None
    numbers = {node: number for number, node in enumerate(nodes)}
    calls: dict[int, Call] = {}
    kept: set[int] = set()
    pending = list(dropped)
    while pending:
        node = pending.pop()
        if node in cut or node not in roots:  # without a tensor, it is a number, which costs nothing to keep
            kept.add(numbers[node])
        elif numbers[node] not in calls:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value_in(numbers))
            # Methods by name: those of a DTensor are none of a plain tensor.
            function: Any = partial(_call_method, node.target) if isinstance(node.target, str) else node.target
            calls[numbers[node]] = Call(function, args, kwargs)
            pending.extend(node.all_input_nodes)
    found = frozenset(numbers[node] for node in dropped)
    return SavedPart(frozenset(kept), found, Recipe(calls, {number: _needs(calls, kept, number) for number in found}))


def _call_method(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _value_in(numbers: dict[fx.Node, int]) -> Any:
    """What stands for a node in the arguments of a `Call`."""
    return lambda node: Value(numbers[node])


def _needs(calls: dict[int, Call], kept: set[int], number: int) -> frozenset[int]:
    """The kept values from which value `number` is made."""
    found: set[int] = set()
    pending, seen = [number], set[int]()

    def read(each: Any) -> Any:
        if isinstance(each, Value):
            pending.append(each.number)
        return each

    while pending:
        each = pending.pop()
        if each in kept:
            found.add(each)
        elif each not in seen:
            seen.add(each)
            fx.node.map_aggregate((calls[each].args, calls[each].kwargs), read)
    return frozenset(found)


_MODES = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)


def _writes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and overwrites(node)


def _size(node: fx.Node, sizes: Sizes) -> int:
    return max(map(sizes.bytes_of, tensors_of(node)), default=0)


def _total(nodes: set[fx.Node], bytes_of: dict[fx.Node, int]) -> int:
    return sum(map(bytes_of.__getitem__, nodes))


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node that allocates memory can be run again in little time."""
    tensors = tensors_of(node)
    known = node.op in ("call_function", "call_method") and node.target in _CHEAP
    # Of a DTensor, an operator may send something.
    return known and len(tensors) == 1 and tensors[0].is_floating_point() and layout_of(tensors[0]) is None


def _cut(
    nodes: list[fx.Node],
    saved: set[fx.Node],
    roots: dict[fx.Node, fx.Node],
    free: set[fx.Node],
    bytes_of: dict[fx.Node, int],
) -> set[fx.Node]:
    """The nodes to keep, of those that allocate memory. Of cuts of equal capacity, the one that makes least again.

    A node is two points of the network, "made" and "kept", with its bytes as the capacity between them. All other edges
    have no capacity, which networkx reads as an infinite one: a cut never goes through them.
    """
    flow = nx.DiGraph()
    flow.add_nodes_from(("saved", "made"))
    own = [node for node in nodes if roots.get(node) is node]
    for node in own:
        flow.add_edge((node, "made"), (node, "kept"), capacity=0 if node in free else bytes_of[node])
        if node in saved:
            flow.add_edge((node, "kept"), "saved")
        if not _is_cheap(node):  # a source: the cut has to pass between it and all that is saved
            flow.add_edge("made", (node, "made"))
        for each in _memory_read(node, roots):
            flow.add_edge((each, "kept"), (node, "made"))
    # networkx returns the cut nearest to the sink, "saved", so as little as possible has to be made again behind it.
    _, (before, _) = nx.minimum_cut(flow, "made", "saved")
    return {node for node in own if (node, "made") in before and (node, "kept") not in before}


def _memory_read(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that allocated the memory that a node reads, be it through views and numbers."""
    found, pending, seen = set(), list(node.all_input_nodes), set()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        if roots.get(each) is each:
            found.add(each)
        else:
            pending.extend(each.all_input_nodes)
    return found
