"""Capturing a model of `fully_shard`: marks in the graph say where its modules begin and end.

TorchDynamo breaks the graph at every hook of FSDP, and would see only this process's part of every parameter. So while
TorchDynamo traces the model, other hooks replace FSDP's, and leave marks in the graph. Every sharded parameter is
replaced by a hole: a parameter that looks like the gathered one, without memory. When the graph runs, each mark calls
the hook that FSDP has there. PyTorch then gathers parameters, frees them and sends gradients where it does in plain
training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import tree_flatten, tree_unflatten
from rotor_py.distributed.sharding import ShardedParameter, ShardGroup, Tensors, cast, groups_of
from rotor_py.errors import UnsupportedModelError

# Nodes that mark in a captured graph where modules of `fully_shard` begin and end, and the hooks that leave them.

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
    torch_compat.allow_in_graph(_mark)


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


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_OLDEST = (2, 11)
"""The oldest version of torch that this was tested with. Older ones gather differently during a backward."""

Table = dict[str, nn.Parameter | None]
Place = tuple[Table, str]
"""A module's table of parameters, and the name of one in it."""


class FSDPMarks:
    """The groups of a model's sharded parameters, and what stands in the place of each while the model is captured.

    Raises UnsupportedModelError if this version of torch is too old, or if a parameter is gathered in a way of its own
    (a subclass of tensors), so that a hole would not look like it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.groups = groups_of(model)
        self.measuring = False
        """While stages are measured one by one, marks do nothing: parameters are gathered around each stage."""
        self._model = model
        self._holes: dict[int, nn.Parameter] = {}
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []
        if self.groups and TORCH < _OLDEST:
            raise UnsupportedModelError(
                f"fully_shard was applied to {type(model).__name__}, which is no nn.Sequential; that takes torch "
                f"{'.'.join(map(str, _OLDEST))} or newer, and this is {torch.__version__}",
                kind="torch_too_old",
                name=type(model).__name__,
            )
        for group in self.groups:
            if group.unsupported:
                raise UnsupportedModelError(
                    f"a parameter of {type(group.modules[0]).__name__} {group.unsupported}, and the graph cannot be "
                    "captured with it; shard the model with fully_shard alone, or write it as an nn.Sequential",
                    kind="unsupported_sharding",
                    name=type(group.modules[0]).__name__,
                )

    @classmethod
    def of(cls, model: nn.Module) -> FSDPMarks | None:
        """The marks of a model; None if `fully_shard` was not applied to it. Raises as the constructor does."""
        found = cls(model)
        return found if found.groups else None

    @property
    def model_name(self) -> str:
        """The class of the model, to name it in errors."""
        return type(self._model).__name__

    @property
    def signature(self) -> Hashable:
        """Equal for models whose graphs have the same marks."""
        # Modules by position, not by id: models that are built alike have to be equal.
        order = {id(module): position for position, module in enumerate(self._model.modules())}
        return tuple(
            (number, tuple(order[id(module)] for module in group.modules), group.input_dtype, group.output_dtype)
            for number, group in enumerate(self.groups)
            if self._model not in group.modules
        )

    @property
    def places(self) -> dict[int, tuple[Place, ShardGroup]]:
        """For every hole, by its id: where the parameter is that belongs there, and the group of the parameter."""
        # One place is enough where several modules share a parameter: FSDP puts the same one into all.
        return {
            id(self._hole(each)): ((each.places[0][0]._parameters, each.places[0][1]), group)
            for group in self.groups
            for each in group.parameters
        }

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Have holes in the place of parameters, and hooks that leave marks in the place of FSDP's."""
        self._mark()
        try:
            yield
        finally:
            self._put_back()

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Inside `marked`, have the model's own parameters and hooks back, so that a graph can run."""
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
                # Dynamo traces the model's `forward`; the model's own hooks run around it, and need no mark.
                if module is not self._model:
                    place = f"{number} {position}"
                    hooks = entering_hook(place, group.input_dtype), leaving_hook(place, group.output_dtype)
                    new += [(*at, hook) for at, hook in zip(group.hook_places(position), hooks, strict=True)]
        self._replaced = [(table, key, table[key]) for table, key, _ in new]
        for table, key, value in new:
            table[key] = value

    def _put_back(self) -> None:
        for table, key, value in self._replaced:
            table[key] = value
        self._replaced = []

    def _hole(self, parameter: ShardedParameter) -> nn.Parameter:
        sharded = parameter.sharded
        if id(sharded) not in self._holes:
            # Not a meta tensor: TorchDynamo traces operators on the devices that it sees.
            memory = torch.empty(parameter.size, dtype=parameter.dtype, device=parameter.device)
            hole = nn.Parameter(parameter.laid_out(memory), sharded.requires_grad)
            memory.untyped_storage().resize_(0)
            self._holes[id(sharded)] = hole
        return self._holes[id(sharded)]

    # What a mark does when the graph runs

    def enter(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Gather the parameters of the module that begins, as FSDP's hook before its forward does."""
        group, module = self.group_at(place)
        if self.measuring:
            return tensors
        # A stage is being run again. FSDP's hook would take it for a new forward, and wait for another backward.
        if _in_backward():
            group.gather()
            return tensors
        return group.enter(module, tensors)

    def leave(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Let go of the parameters of the module that ends, as FSDP's hook after its forward does."""
        group, module = self.group_at(place)
        if self.measuring:
            return tensors
        if _in_backward():
            group.let_go()
            return tensors
        return group.leave(module, tensors)

    def group_at(self, place: str) -> tuple[ShardGroup, int]:
        """The group that a mark's `place` names, and the position of the module in it."""
        number, position = map(int, place.split())
        return self.groups[number], position


def is_mark(node: fx.Node) -> bool:
    """Whether a node of a stage calls a hook of FSDP. What it returns is what came in, after the place of the mark."""
    return isinstance(getattr(node.target, "__self__", None), FSDPMarks)


def passed_through(place: str, *tensors: torch.Tensor) -> Tensors:
    """What a mark returns, without what it does."""
    return tensors


def _in_backward() -> bool:
    """Whether autograd runs a backward in this thread: then a stage is being run again."""
    # PyTorch has no public way to ask. Its own FSDP reads the same number.
    return bool(torch_compat.current_graph_task_id() != -1)
