"""Functions of the model's own with a forward and a backward (`torch.autograd.Function`) in a captured graph.

Dynamo makes them calls of one operator of torch, with both as graphs. The operator makes a class for each call, and the
class owns what is saved. A class is part of a reference cycle, so all of it stays until Python next collects garbage:
after the backward, and where there is no graph at all. Here autograd owns it, and lets go of it in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from rotor_py.capture.graph.graph_nodes import name_of


def with_saving_functions(graph_module: fx.GraphModule) -> None:
    """Have a graph, in place, call functions of the model so that what they save ends with autograd's graph."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and name_of(node) == autograd_function_apply.__name__:
            node.target = autograd_function_apply
    graph_module.recompile()


def autograd_function_apply(forward: fx.GraphModule, backward: fx.GraphModule, *values: Any, **how: Any) -> Any:
    """Run `forward` on `values`, with `backward` for the gradients, as torch's operator of this name does.

    `forward` returns its output and what `backward` reads after the gradients. `how` has the positions of outputs that
    have no gradient (`non_differentiable_idx`) or were written over (`dirty_idx`), and which of the tensors to be saved
    autograd guards against being written over (`saved_for_backward_idx`).
    """
    return _Function.apply(_Call(forward, backward, how), *values)  # type: ignore[no-untyped-call]  # torch's


class _Call:
    """One call, as long as it runs, and then what its graph needs of it."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, how: dict[str, Any]) -> None:
        self.forward, self.backward = forward, backward
        self.dirty = how.get("dirty_idx", ())
        self.without_gradient = how.get("non_differentiable_idx", ())
        self.guarded = frozenset(how.get("saved_for_backward_idx", ()))
        self.saved: tuple[Any, ...] = ()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *values: Any) -> Any:
        output, saved = call.forward(*values)
        call.saved = tuple(saved)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call: _Call = inputs[0]
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if call.dirty:
            ctx.mark_dirty(*(outputs[number] for number in call.dirty))
        if call.without_gradient:
            ctx.mark_non_differentiable(*(outputs[number] for number in call.without_gradient))
        ctx.backward_graph = call.backward
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in call.saved]
        ctx.positions = [number for number, each in enumerate(call.saved) if isinstance(each, torch.Tensor)]
        # What the function kept by itself, as `ctx.x = x`, may be written over. So it is saved without its counter of
        # versions. An attribute of `ctx` would stay as long as the graph, and not end with the backward.
        saved = [call.saved[number] if number in call.guarded else call.saved[number].data for number in ctx.positions]
        ctx.save_for_backward(*saved)
        call.saved = ()

    @staticmethod
    @once_differentiable  # TorchDynamo traced it so
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        values = list(ctx.others)
        for number, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            values[number] = tensor
        found = ctx.backward_graph(*gradients, *values)
        return None, *(found if isinstance(found, (tuple, list)) else (found,))
