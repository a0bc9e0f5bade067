"""Nodes that mark in a captured graph where modules of `fully_shard` begin and end, and the hooks that leave them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_py.distributed.shard_groups import Tensors, cast

Hook = Callable[..., Any]


def enter(place: str, *tensors: torch.Tensor) -> Tensors:
    """The mark where a module begins: the tensors of its input that need a gradient pass through it.

    `place` names its group and the module in it, by number. It is a string because TorchDynamo turns numbers that
    differ from one model to the next into variables.
    """
    return _passed(tensors)


def leave(place: str, *tensors: torch.Tensor) -> Tensors:
    """The mark where a module ends: the tensors of its output that need a gradient pass through it."""
    return _passed(tensors)


MARKS: dict[Any, str] = {enter: "enter", leave: "leave"}
# Otherwise TorchDynamo would trace into them, and the graph would have views instead of marks.
for _mark in MARKS:
    torch._dynamo.allow_in_graph(_mark)


@cache  # so that TorchDynamo meets the same function at every step, and in every model that is built alike
def entering_hook(place: str, dtype: torch.dtype | None) -> Hook:
    """A hook for before a module's forward that leaves the mark `enter`, and casts to `dtype` as FSDP's hook does."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _marked(enter, place, cast((args, kwargs), dtype))

    return hook


@cache
def leaving_hook(place: str, dtype: torch.dtype | None) -> Hook:
    """A hook for after a module's forward that leaves the mark `leave`, and casts to `dtype` as FSDP's hook does."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(_marked(leave, place, output), dtype)

    return hook


def _passed(tensors: Tensors) -> Tensors:
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


def _marked(mark: Callable[..., Tensors], place: str, value: Any) -> Any:
    """`value` with the tensors that need a gradient replaced by those that came through a mark."""
    # Modules take and return dicts, dataclasses and tuples of tensors, nested; FSDP looks through the same pytrees.
    flat, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    through = mark(place, *[flat[i] for i in at])
    for i, tensor in zip(at, through, strict=False):  # where there was none, an empty one came through
        flat[i] = tensor
    return tree_unflatten(flat, spec)
