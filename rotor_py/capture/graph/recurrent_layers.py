"""Recurrent operators of a graph: the random numbers that they draw, and several layers taken apart.

`nn.LSTM(…, num_layers=4)` is one operator, of which a plan could only keep all or nothing. On the CPU it runs one layer
after the other, so one operator for each layer does the same work in the same order, to the last bit, and a stage may
end between them. cuDNN runs all layers at once and wants their weights in one piece of memory, so there they stay
together.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from rotor_py.capture.graph.graph_nodes import carries_gradient, tensors_of

_OPERATORS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What a recurrent operator is called with: each argument may be a node."""

    value: Any
    state: Any
    """A tuple of two for an LSTM."""
    weights: Any
    """A list, a number of them for each layer."""
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
        """Whether there is dropout between its layers."""
        probability = self.dropout
        if isinstance(probability, fx.Node):  # Dynamo makes a number that differs from model to model an input
            probability = probability.meta["example_value"].node.hint
        return bool(self.training and self.layers > 1 and probability)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the node is a recurrent operator that draws random numbers: for dropout between its layers."""
    return node.target in _OPERATORS and _Arguments(*node.args).drops


def draws_from_own_state(node: fx.Node) -> bool:
    """Whether the node draws them from a state of cuDNN's own, which nobody can set back."""
    on_cuda = any(tensor.device.type == "cuda" for tensor in tensors_of(node))
    return on_cuda and torch.backends.cudnn.enabled and draws_random_numbers(node)


def with_layers_apart(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with one operator for each recurrent layer, where that changes no number.

    It is `graph_module` itself if nothing is to be taken apart, and else a copy.
    """
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
    """Put an operator for each layer in the place of `node`, one operator for all of them."""
    made = _Maker(node).layers()
    for user in list(node.users):
        position: Any = user.args[1]
        new = made.result(position)
        new.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Maker:
    """Makes the operators that stand for the recurrent operator `node`, before it in its graph.

    Each gets an example of its value, as Dynamo would leave one: a tensor without data.
    """

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._all = _Arguments(*node.args)
        self._output: fx.Node | None = None
        self._states: list[list[fx.Node]] = []
        """The last states of every layer."""

    def layers(self) -> _Maker:
        """Make the layers."""
        # Time goes first in all of them, as inside the operator: dropout draws its numbers in the order of memory.
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
        """What the operator for all layers returned at this position: the output, or a last state."""
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
