"""What the backward of a captured stage can do without: values that cheap operators make from others that are kept.

Which ones to keep is a minimum cut. Memory flows from what cannot be made again cheaply, through the cheap operators,
to what autograd saves; the least memory from which all of that can be made is what a cut of least capacity goes
through. PyTorch's compiler decides likewise what a backward recomputes (torch._functorch.partitioners).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from rotor_py.capture.graph_facts import attribute_of, overwrites, size_of, tensors_of
from rotor_py.stage.partial_saving import Call, Recipe, Value

_log = logging.getLogger("rotor_py")

_WORTHWHILE = 0.1
"""The part of what is saved that has to be dropped at least."""
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
"""Operators that make each number of their output from few of their input, as functions and as names of methods."""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a run keeps for its backward and what it drops, by the numbers of nodes, and how to make that again."""

    kept: frozenset[int]
    dropped: frozenset[int]
    recipe: Recipe

    def telling(self, body: fx.GraphModule, graph_of_it: fx.Graph) -> fx.GraphModule:
        """`graph_of_it`, a graph on `body`, with a `PartialSaving` as its first input, which it tells."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        recomputation = graph.placeholder("recomputation")
        graph.output(graph.graph_copy(graph_of_it, copies))
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for number, node in enumerate(graph_of_it.nodes):
            if number in self.kept or number in self.dropped:
                with graph.inserting_after(last if node.op == "placeholder" else copies[node]):
                    how = "drop" if number in self.dropped else "keep"
                    graph.call_method(how, (recomputation, number, copies[node]))
        found = fx.GraphModule(body, graph, "PartialGraphStage")
        for attributes in (found._parameters, found._buffers, found._modules):
            attributes.clear()
        return found


def find_saved_part(body: fx.GraphModule, shared: int) -> SavedPart | None:
    """How `body` can do with less; None if there is nothing to gain. Its last `shared` inputs are there in any case."""
    nodes = list(body.graph.nodes)
    if any(node.op == "call_module" or node.target in _MODES or _writes(node) for node in nodes):
        return None
    try:
        saved, roots = _saved(body)
    except Exception as error:  # an operator may refuse tensors without memory, in ways of its own
        _log.debug("a stage is stored whole or not at all, since its graph cannot be run without memory: %s", error)
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {*(node for node in nodes if node.op == "get_attr"), *inputs[len(inputs) - shared :]}
    cut = _cut(nodes, saved, roots, free)
    dropped = saved - cut
    if not dropped or sum(map(_size, dropped)) < _WORTHWHILE * sum(map(_size, saved - free)):
        return None
    numbers = {node: number for number, node in enumerate(nodes)}
    calls: dict[int, Call] = {}
    kept: set[int] = set()
    pending = list(dropped)
    while pending:
        node = pending.pop()
        if node in cut or node not in roots:
            kept.add(numbers[node])
        elif numbers[node] not in calls:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value_in(numbers))
            function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            calls[numbers[node]] = Call(function, args, kwargs)
            pending.extend(node.all_input_nodes)
    found = frozenset(numbers[node] for node in dropped)
    return SavedPart(frozenset(kept), found, Recipe(calls, {number: _needs(calls, kept, number) for number in found}))


def _value_in(numbers: dict[fx.Node, int]) -> Any:
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


def _saved(body: fx.GraphModule) -> tuple[set[fx.Node], dict[fx.Node, fx.Node]]:
    """The nodes whose memory autograd saves, and for each node with a tensor the one that made its memory.

    Found out by running the graph on tensors without memory.
    """
    maker: dict[int, fx.Node] = {}
    roots: dict[fx.Node, fx.Node] = {}
    found: set[fx.Node] = set()
    values: dict[fx.Node, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        node = maker.get(tensor.untyped_storage()._cdata)
        if node is not None:
            found.add(node)
        return tensor

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        for node in body.graph.nodes:
            if node.op == "output":
                break
            values[node] = _run(body, node, values, mode)
            for tensor in _tensors(values[node]):
                roots[node] = maker.setdefault(tensor.untyped_storage()._cdata, node)
    return found, roots


def _refuse_special(tensor: torch.Tensor) -> None:
    """TypeError for a tensor that lies in memory in a way of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{type(tensor).__name__} of layout {tensor.layout}")


def _run(body: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    if node.op == "placeholder":
        example = node.meta.get("example_value", node.meta.get("val"))
        return fx.node.map_aggregate(example, lambda each: _example(each))
    if node.op == "get_attr":
        found = attribute_of(body, node.target)
        if not isinstance(found, torch.Tensor):
            return found
        _refuse_special(found)
        return mode.from_tensor(found)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a function


def _example(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        _refuse_special(value)
        size, stride = [_number(each) for each in value.shape], [_number(each) for each in value.stride()]
        like = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)
    return _number(value)


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _size(node: fx.Node) -> int:
    return max(map(size_of, tensors_of(node)), default=0)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node that makes memory of its own can be run again at little cost."""
    tensors = tensors_of(node)
    known = node.op in ("call_function", "call_method") and node.target in _CHEAP
    return known and len(tensors) == 1 and tensors[0].is_floating_point()


def _cut(nodes: list[fx.Node], saved: set[fx.Node], roots: dict[fx.Node, fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The nodes to keep, each in memory of its own. Of equal choices, the one that makes least again."""
    flow = nx.DiGraph()
    flow.add_nodes_from(("saved", "made"))
    own = [node for node in nodes if roots.get(node) is node]
    for node in own:
        flow.add_edge((node, "made"), (node, "kept"), capacity=0 if node in free else _size(node))
        if node in saved:
            flow.add_edge((node, "kept"), "saved")
        if not _is_cheap(node):
            flow.add_edge("made", (node, "made"))
        for each in _memory_read(node, roots):
            flow.add_edge((each, "kept"), (node, "made"))
    _, (before, _) = nx.minimum_cut(flow, "made", "saved")  # the one that is next to "saved"
    return {node for node in own if (node, "made") in before and (node, "kept") not in before}


def _memory_read(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that made the memory which a node reads, through views and numbers."""
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
