"""Which values of a graph autograd saves for the backward, found by running the graph on tensors without memory.

torch has no table of what each operator saves: that depends on which inputs need a gradient, and on the version of
torch. So the stage is run with autograd on, and with hooks that see every saved tensor. On fake tensors that takes
milliseconds and no memory, for a stage of any size. A real run would need the very memory that the plan is to avoid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from rotor_profiling.storage import local
from rotor_py.capture.graph.graph_nodes import attribute_of
from rotor_py.capture.graph.parts.prices import FlopCount, kind_of
from rotor_py.capture.graph.sizes import Sizes, example_of


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What a run of a graph with autograd shows: the nodes whose memory is `saved`; for every node with a tensor the
    one that allocated its memory (`roots`); the nodes whose tensor is `in_graph`; the `flops` of those that take long.
    """

    saved: set[fx.Node]
    roots: dict[fx.Node, fx.Node]
    in_graph: set[fx.Node]
    flops: dict[fx.Node, int]


def find_saved_values(body: fx.GraphModule, sizes: Sizes) -> SavedValues:
    """What autograd saves of `body`.

    `sizes` says what the symbols of the graph stand for. Raises TypeError for tensors of a subclass or without strides.
    What an operator raises that does not take tensors without memory passes through.
    """
    maker: dict[int, fx.Node] = {}
    roots: dict[fx.Node, fx.Node] = {}
    saved: set[fx.Node] = set()
    unknown: dict[int, torch.Tensor] = {}
    """what operators saved of memory that no node has returned yet: their own outputs, or what only they know"""
    in_graph: set[fx.Node] = set()
    flops: dict[fx.Node, int] = {}
    values: dict[fx.Node, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # By memory, not by tensor: what is saved is often a view of what a node returned.
        memory = local(tensor).untyped_storage()._cdata
        node = maker.get(memory)
        if node is not None:
            saved.add(node)
        else:
            unknown[memory] = tensor  # alive, so that its storage's number is not used twice
        return tensor

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        for node in body.graph.nodes:
            if node.op == "output":
                break
            # All values stay alive to the end, so that no storage's number is used twice.
            with FlopCount() if kind_of(node) else nullcontext() as count:
                values[node] = _run(body, node, values, mode, sizes)
            if count is not None:
                flops[node] = count.total
            for tensor in _tensors(values[node]):
                if tensor.requires_grad:
                    in_graph.add(node)
                memory = local(tensor).untyped_storage()._cdata
                roots[node] = maker.setdefault(memory, node)
                if unknown.pop(memory, None) is not None:
                    saved.add(node)
    return SavedValues(saved, roots, in_graph, flops)


def _run(body: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode, sizes: Sizes) -> Any:
    if node.op == "placeholder":
        return fx.node.map_aggregate(example_of(node), lambda each: _like(each, sizes))
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


def _like(value: Any, sizes: Sizes) -> Any:
    """A tensor of this mode like one of Dynamo's, which belongs to a mode of its own and has symbolic shapes."""
    if isinstance(value, DTensor):
        part = _like(value._local_tensor, sizes).requires_grad_(value.requires_grad)
        shape, strides = torch.Size(map(sizes.number, value.shape)), tuple(map(sizes.number, value.stride()))
        return DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides
        )
    if isinstance(value, torch.Tensor):
        _refuse_special(value)
        size, stride = list(map(sizes.number, value.shape)), list(map(sizes.number, value.stride()))
        like = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)
    return sizes.number(value)


def _refuse_special(tensor: torch.Tensor) -> None:
    """TypeError for a tensor whose memory is not simply strided, so that bytes and views of it mean something else."""
    tensor = local(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{type(tensor).__name__} of layout {tensor.layout}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
