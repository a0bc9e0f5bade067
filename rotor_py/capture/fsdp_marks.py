"""Where the modules of `fully_shard` begin and end in a captured graph.

TorchDynamo would break the graph at every hook of FSDP's, and sees parameters of which a process has a part. While it
looks at the model, these hooks are others, which leave a mark in the graph; and in the place of every sharded parameter
is a hole: a parameter of the whole shape, without memory. When the graph runs, a mark does what the hook would have
done there: parameters are gathered and let go, and gradients sent, by PyTorch, where they are in plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rotor_py.distributed.shard_groups import ShardedParameter, ShardGroup, Tensors, cast, groups_of
from rotor_py.errors import UnsupportedModelError

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_OLDEST = (2, 11)
"""The oldest version of torch that this was tested with; what PyTorch does in a backward differs before."""

Table = dict[str, nn.Parameter | None]
Place = tuple[Table, str]
"""A module's table of parameters, and a name there."""


def enter(place: str, *tensors: torch.Tensor) -> Tensors:
    """The mark where a module begins: what of its input needs a gradient passes through it.

    `place` has the numbers of its group and of the module there. In a text, since TorchDynamo makes variables of
    numbers that differ from one model to the next.
    """
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


def leave(place: str, *tensors: torch.Tensor) -> Tensors:
    """The mark where a module ends: what of its output needs a gradient passes through it."""
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


MARKS: dict[Any, str] = {enter: "enter", leave: "leave"}
for _mark in MARKS:
    torch._dynamo.allow_in_graph(_mark)


class FSDPMarks:
    """The groups of a model's parameters, as its captured graph meets them."""

    def __init__(self, model: nn.Module) -> None:
        """UnsupportedModelError if whole parameters would not do in the place of those that are gathered."""
        self.groups = groups_of(model)
        self.measuring = False
        """Whether stages run by themselves, with parameters that are there already."""
        self._model = model
        self._holes: dict[int, nn.Parameter] = {}
        self._kept: list[tuple[dict[Any, Any], Any, Any]] = []
        if self.groups and TORCH < _OLDEST:
            raise UnsupportedModelError(
                f"fully_shard was applied to {type(model).__name__}, which is no nn.Sequential; that takes torch "
                f"{'.'.join(map(str, _OLDEST))} or newer, and this is {torch.__version__}"
            )
        for group in self.groups:
            if group.unsupported:
                raise UnsupportedModelError(
                    f"a parameter of {type(group.modules[0]).__name__} {group.unsupported}, and the graph cannot be "
                    "captured with it; shard the model with fully_shard alone, or write it as an nn.Sequential"
                )

    @classmethod
    def of(cls, model: nn.Module) -> FSDPMarks | None:
        """Those of a model, if `fully_shard` was applied to it."""
        found = cls(model)
        return found if found.groups else None

    @property
    def signature(self) -> Hashable:
        """What models have to have in common for their graphs to have the same marks."""
        order = {id(module): position for position, module in enumerate(self._model.modules())}
        return tuple(
            (number, tuple(order[id(module)] for module in group.modules), group.input_dtype, group.output_dtype)
            for number, group in enumerate(self.groups)
            if self._model not in group.modules
        )

    @property
    def places(self) -> dict[int, tuple[Place, ShardGroup]]:
        """Where the parameter is that belongs into a hole, and its group, by the id of the hole."""
        return {
            id(self._hole(each)): ((each.places[0][0]._parameters, each.places[0][1]), group)
            for group in self.groups
            for each in group.parameters
        }

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Put holes in the place of parameters, and marks in the place of hooks."""
        self._mark()
        try:
            yield
        finally:
            self._put_back()

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Inside `marked`: as if outside of it."""
        self._put_back()
        try:
            yield
        finally:
            self._mark()

    def _mark(self) -> None:
        new: list[tuple[dict[Any, Any], Any, Any]] = []
        for number, group in enumerate(self.groups):
            for each in group.parameters:
                new += [(module._parameters, name, self._hole(each)) for module, name in each.places]
            for position, module in enumerate(group.modules):
                if module is not self._model:  # its hooks run around the call
                    place = f"{number} {position}"
                    hooks = _before(place, group.input_dtype), _after(place, group.output_dtype)
                    new += [(*kept, hook) for kept, hook in zip(group.hook_places(position), hooks, strict=True)]
        self._kept = [(table, key, table[key]) for table, key, _ in new]
        for table, key, value in new:
            table[key] = value

    def _put_back(self) -> None:
        for table, key, value in self._kept:
            table[key] = value
        self._kept = []

    def _hole(self, parameter: ShardedParameter) -> nn.Parameter:
        sharded = parameter.sharded
        if id(sharded) not in self._holes:
            memory = torch.empty(sharded.shape, dtype=parameter.dtype, device=parameter.device)
            memory.untyped_storage().resize_(0)
            self._holes[id(sharded)] = nn.Parameter(memory, sharded.requires_grad)
        return self._holes[id(sharded)]

    # What runs in the place of the marks

    def enter(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """As FSDP's hook before the module's forward; where it is run again in the backward, to gather and no more."""
        group, module = self.at(place)
        if self.measuring:
            return tensors
        if _in_backward():
            group.gather()
            return tensors
        return group.enter(module, tensors)

    def leave(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """As FSDP's hook after the module's forward."""
        group, module = self.at(place)
        if self.measuring:
            return tensors
        if _in_backward():
            group.let_go()
            return tensors
        return group.leave(module, tensors)

    def at(self, place: str) -> tuple[ShardGroup, int]:
        """The group and the module there that a mark's `place` says."""
        number, position = map(int, place.split())
        return self.groups[number], position


@cache
def _before(place: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """A hook that leaves the mark `enter`."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _passed(enter, place, cast((args, kwargs), dtype))

    return hook


@cache
def _after(place: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """A hook that leaves the mark `leave`."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(_passed(leave, place, output), dtype)

    return hook


def _passed(mark: Callable[..., Tensors], place: str, value: Any) -> Any:
    flat, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    through = mark(place, *[flat[i] for i in at])
    for i, tensor in zip(at, through, strict=False):
        flat[i] = tensor
    return tree_unflatten(flat, spec)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
