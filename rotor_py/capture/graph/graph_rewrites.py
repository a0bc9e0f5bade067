"""Rewrite a captured graph before it is cut: autograd functions, functorch transforms, recurrent layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rotor_profiling import torch_compat
from rotor_py.capture.graph.graph_nodes import (
    carries_gradient,
    example_of,
    line_of,
    name_of,
    tensors_of,
    written_by,
)
from rotor_py.errors import UnsupportedModelError

# A model's own `torch.autograd.Function` in a captured graph.
#
# Dynamo's operator for a call makes a class, which owns the saved tensors until the next garbage collection. Here
# autograd owns them, and frees them in the backward.


def with_saving_functions(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and name_of(node) == autograd_function_apply.__name__:
            node.target = autograd_function_apply
    graph_module.recompile()


def autograd_function_apply(forward: fx.GraphModule, backward: fx.GraphModule, *values: Any, **how: Any) -> Any:
    """Run `forward` on `values` as torch's operator of this name does; `backward` reads gradients and saved values."""
    return SavingFunction.apply(forward, backward, how, *values)  # type: ignore[no-untyped-call]  # torch's


class SavingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: fx.GraphModule, backward: fx.GraphModule, how: dict[str, Any], *values: Any) -> Any:
        output, saved = forward(*values)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if dirty := how.get("dirty_idx"):
            ctx.mark_dirty(*(outputs[number] for number in dirty))
        if without_gradient := how.get("non_differentiable_idx"):
            ctx.mark_non_differentiable(*(outputs[number] for number in without_gradient))
        ctx.backward_graph = backward
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in saved]
        ctx.positions = [number for number, each in enumerate(saved) if isinstance(each, torch.Tensor)]
        # A tensor kept as `ctx.x = x` may be written over, so it is saved without its version counter. An attribute of
        # `ctx` would live as long as the autograd graph, and not end with the backward.
        guarded = how.get("saved_for_backward_idx", ())
        ctx.save_for_backward(*(saved[at] if at in guarded else saved[at].data for at in ctx.positions))
        return output

    @staticmethod
    @once_differentiable  # TorchDynamo traced it so
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        values = list(ctx.others)
        for number, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            values[number] = tensor
        found = ctx.backward_graph(*gradients, *values)
        return None, None, None, *(found if isinstance(found, (tuple, list)) else (found,))


# Turn each region of `torch.vmap` and other transforms in a captured graph into one node.
#
# Its operators work on wrapped tensors, which have no memory of their own and do not say whether they carry a gradient.
# A region as one node takes and returns plain tensors.

_TRANSFORMS = ("_vmap", "_grad", "_jvp")
_ENTER = {f"{name}_increment_nesting" for name in _TRANSFORMS}
_EXIT = {f"{name}_decrement_nesting" for name in _TRANSFORMS}
# One function for each kind of region, so that stages with equal regions are equal, and measured once.
_functions: dict[Hashable, Callable[..., Any]] = {}


def with_whole_transforms(graph_module: fx.GraphModule) -> None:
    """Make each region of function transforms one node; it must not write into a tensor from outside."""
    region: list[fx.Node] = []
    depth = 0
    for node in list(graph_module.graph.nodes):
        name = name_of(node) if node.op == "call_function" else ""
        depth += name in _ENTER
        if depth:
            region.append(node)
        depth -= name in _EXIT
        if region and not depth:
            _replace(graph_module.graph, region)
            region = []
    graph_module.recompile()


def _replace(graph: fx.Graph, region: list[fx.Node]) -> None:
    members = set(region)
    inputs = list(dict.fromkeys(each for node in region for each in node.all_input_nodes if each not in members))
    outputs = [node for node in region if any(user not in members for user in node.users)]
    for node in region:
        if not set(inputs).isdisjoint(written_by(node)):
            raise UnsupportedModelError(
                f"{line_of(node)} writes into a tensor inside of a function that torch.func transforms, and running a "
                "stage again would write again; let it make a new tensor there",
                kind="in_place_input",
                name=line_of(node),
            )
    with graph.inserting_before(region[0]):
        whole = graph.call_function(_function_of(region, inputs, outputs), tuple(inputs))
        whole.meta = {**region[0].meta, "example_value": tuple(example_of(node) for node in outputs)}
        for number, node in enumerate(outputs):
            taken = graph.call_function(_take, (whole, number))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken, lambda user: user not in members)
    for node in reversed(region):
        graph.erase_node(node)


def _function_of(region: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Callable[..., Any]:
    """A function that computes a region's outputs from its inputs; the same one for equal regions."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    numbers = {copy: number for number, copy in enumerate(copies.values())}
    key = tuple(
        (node.op, node.target, *map(str, fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)))
        for node in graph.nodes
    )
    if key not in _functions:
        module = fx.GraphModule(torch.nn.Module(), graph, "TransformedFunction")

        def transformed(*values: Any) -> Any:
            level = torch_compat.maybe_current_level()
            try:
                return type(module).forward(module, *values)
            except BaseException:
                # Generated code has no `with` blocks, so an error would leave the transform on.
                while torch_compat.maybe_current_level() != level:
                    torch_compat.pop_dynamic_layer_stack()
                raise

        # The names reveal random operators, and show that two graphs are the same but for sizes.
        transformed.__name__ = transformed.__qualname__ = f"transformed({', '.join(map(name_of, region))})"
        _functions[key] = transformed
    return _functions[key]


def _take(values: tuple[Any, ...], number: int) -> Any:
    return values[number]


# Recurrent operators of a graph: their random numbers, and the split into single layers.
#
# The CPU runs the layers of `nn.LSTM(…, num_layers=4)` one after the other, so one operator for each does the same,
# to the last bit, and a stage may end between them. cuDNN runs all layers at once, so there they stay together.

_OPERATORS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of a recurrent operator; each may be a node. The state of an LSTM is a pair."""

    value: Any
    state: Any
    weights: Any
    biases: Any
    layers: Any
    dropout: Any
    training: Any
    bidirectional: Any
    batch_first: Any

    @property
    def states(self) -> tuple[fx.Node, ...]:
        return self.state if isinstance(self.state, tuple) else (self.state,)

    @property
    def drops(self) -> bool:
        probability = self.dropout
        if isinstance(probability, fx.Node):  # Dynamo makes a number that differs from model to model an input
            probability = probability.meta["example_value"].node.hint
        return bool(self.training and self.layers > 1 and probability)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the node is a recurrent operator with dropout between its layers."""
    return node.target in _OPERATORS and _Arguments(*node.args).drops


def draws_from_own_state(node: fx.Node) -> bool:
    """Whether the node draws them from cuDNN's own state, which cannot be restored."""
    on_cuda = any(tensor.device.type == "cuda" for tensor in tensors_of(node))
    return on_cuda and torch.backends.cudnn.enabled and draws_random_numbers(node)


def with_layers_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph, copied, with one operator for each recurrent layer, where that changes no number."""
    if not any(_is_divisible(node) for node in graph_module.graph.nodes):
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    for node in list(graph.nodes):
        if _is_divisible(node):
            _divide(node)
    return fx.GraphModule(graph_module, graph, type(graph_module).__name__)


def _is_divisible(node: fx.Node) -> bool:
    if node.target not in _OPERATORS or any(user.target is not operator.getitem for user in node.users):
        return False
    arguments = _Arguments(*node.args)
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_of(node))
    return on_cpu and arguments.layers > 1 and all(isinstance(state, fx.Node) for state in arguments.states)


def _divide(node: fx.Node) -> None:
    made = _Maker(node).layers()
    for user in list(node.users):
        position: Any = user.args[1]
        new = made.result(position)
        new.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Maker:
    """Makes the operators that replace a recurrent operator, each with a fake example value, as from Dynamo."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._all = _Arguments(*node.args)
        self._output: fx.Node | None = None
        # The last states of every layer.
        self._states: list[list[fx.Node]] = []

    def layers(self) -> _Maker:
        # Time comes first in all of them, as inside the operator: dropout draws its numbers in the order of memory.
        example, *states = self._node.meta["example_value"]
        value = self._all.value
        if self._all.batch_first:
            example, value = example.transpose(0, 1), self._transposed(value)
        for layer in range(self._all.layers):
            last = layer == self._all.layers - 1
            value = self._layer(layer, value, example if last else torch.empty_like(example.detach()), states)
            if self._all.drops and not last:
                dropped = torch.empty_like(value.meta["example_value"].detach())
                dropped.requires_grad_(carries_gradient(value))
                value = self._call(F.dropout, (value, self._all.dropout, True), dropped)
        self._output = self._transposed(value) if self._all.batch_first else value
        return self

    def result(self, position: int) -> fx.Node:
        """The replacement of the operator's result at this position: the output, or a last state."""
        assert self._output is not None
        if position == 0:
            return self._output
        found = [states[position - 1] for states in self._states]
        example = torch.cat([each.meta["example_value"].detach() for each in found])
        return self._call(torch.cat, (found,), example)

    def _layer(self, layer: int, value: fx.Node, example: torch.Tensor, states: list[torch.Tensor]) -> fx.Node:
        directions = 2 if self._all.bidirectional else 1
        each = len(self._all.weights) // self._all.layers
        weights = list(self._all.weights[layer * each : (layer + 1) * each])
        given = tuple(self._narrowed(state, layer * directions, directions) for state in self._all.states)
        trained = any(map(carries_gradient, [value, *weights, *given])) and carries_gradient(self._node)
        if not example.requires_grad:
            example.requires_grad_(trained)
        ends = [torch.empty_like(s.detach()[:directions]).requires_grad_(trained) for s in states]
        state: Any = given if isinstance(self._all.state, tuple) else given[0]
        rest = (self._all.biases, 1, 0.0, self._all.training, self._all.bidirectional, False)
        made = self._call(self._node.target, (value, state, weights, *rest), (example, *ends))
        output, *last = [
            self._call(operator.getitem, (made, position), found) for position, found in enumerate((example, *ends))
        ]
        self._states.append(last)
        return output

    def _narrowed(self, state: fx.Node, start: int, length: int) -> fx.Node:
        example = state.meta["example_value"].narrow(0, start, length)
        return self._call(torch.narrow, (state, 0, start, length), example)

    def _transposed(self, value: fx.Node) -> fx.Node:
        return self._call(torch.transpose, (value, 0, 1), value.meta["example_value"].transpose(0, 1))

    def _call(self, target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
        with self._node.graph.inserting_before(self._node):
            made = self._node.graph.call_function(target, args)
        made.meta = {**self._node.meta, "example_value": example}
        return made
