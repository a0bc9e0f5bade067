"""Capture a model of `fully_shard`: during tracing, hooks that leave marks replace FSDP's, which would break the graph,
and a hole without storage replaces every sharded parameter. When the graph runs, marks call FSDP's own hooks.
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
from rotor_py.distributed.sharding import ShardedParameter, ShardGroup, Tensors, cast
from rotor_py.errors import UnsupportedModelError

Hook = Callable[..., Any]


def enter(place: str, *tensors: torch.Tensor) -> Tensors:
    """Mark where a module begins. `place` is a string, which TorchDynamo never makes a variable of."""
    return _passed(tensors)


def leave(place: str, *tensors: torch.Tensor) -> Tensors:
    return _passed(tensors)


MARKS: dict[Any, str] = {enter: "enter", leave: "leave"}
# Otherwise TorchDynamo would trace into them, and the graph would have views instead of marks.
for _mark in MARKS:
    torch_compat.allow_in_graph(_mark)


@cache  # TorchDynamo has to meet the same functions at every step, and in every model built alike
def marking_hooks(place: str, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> tuple[Hook, Hook]:
    """A forward pre-hook and a forward hook that leave marks, and cast as FSDP's hooks do."""

    def entering(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _marked(enter, place, cast((args, kwargs), input_dtype))

    def leaving(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(_marked(leave, place, output), output_dtype)

    return entering, leaving


def _passed(tensors: Tensors) -> Tensors:
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


def _marked(mark: Callable[..., Tensors], place: str, value: Any) -> Any:
    """Pass the tensors of `value` that need a gradient through a mark."""
    # Modules take and return nested dicts, dataclasses and tuples; FSDP looks through the same pytrees.
    flat, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    through = mark(place, *[flat[i] for i in at])
    for i, tensor in zip(at, through, strict=False):  # without such tensors, an empty one came through
        flat[i] = tensor
    return tree_unflatten(flat, spec)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Oldest tested version of torch. Older ones gather differently during a backward.
_OLDEST = (2, 11)

Table = dict[str, nn.Parameter | None]
Place = tuple[Table, str]  # a module's table of parameters, and a name in it


class FSDPMarks:
    """The groups of a model's sharded parameters, and the holes that replace these during capture. Raises
    UnsupportedModelError if torch is too old, or a parameter is a tensor subclass that no hole can look like.
    """

    def __init__(self, model: nn.Module, groups: list[ShardGroup]) -> None:
        self.groups = groups
        # Disables marks while stages are measured one by one: parameters are gathered around each stage.
        self.measuring = False
        self._model = model
        self.model_name = type(model).__name__
        self._holes: dict[int, nn.Parameter] = {}
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []
        if TORCH < _OLDEST:
            raise UnsupportedModelError(
                f"fully_shard on {self.model_name}, which is no nn.Sequential, takes torch "
                f"{'.'.join(map(str, _OLDEST))} or newer, got {torch.__version__}",
                kind="torch_too_old",
                name=self.model_name,
            )
        for group in filter(lambda each: each.unsupported, self.groups):
            name = type(group.modules[0]).__name__
            raise UnsupportedModelError(
                f"shard the model with fully_shard alone, or write it as an nn.Sequential: a parameter of {name} "
                f"{group.unsupported}, so the graph cannot be captured",
                kind="unsupported_sharding",
                name=name,
            )

    @property
    def signature(self) -> Hashable:
        """A key equal for models whose graphs have the same marks."""
        # Modules by position, not by id: models built alike have to be equal.
        order = {id(module): position for position, module in enumerate(self._model.modules())}
        return tuple(
            (number, tuple(order[id(module)] for module in group.modules), group.input_dtype, group.output_dtype)
            for number, group in enumerate(self.groups)
            if self._model not in group.modules
        )

    @property
    def places(self) -> dict[int, tuple[Place, ShardGroup]]:
        """The place and group of each parameter, by the id of its hole."""
        # One place suffices for a shared parameter: FSDP puts the same one into all modules.
        return {
            id(self._hole(each)): ((each.places[0][0]._parameters, each.places[0][1]), group)
            for group in self.groups
            for each in group.parameters
        }

    @contextmanager
    def marked(self) -> Iterator[None]:
        self._mark()
        try:
            yield
        finally:
            self._put_back()

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Inside `marked`, restore the model's own parameters and hooks, so that a graph can run."""
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
                    hooks = marking_hooks(f"{number} {position}", group.input_dtype, group.output_dtype)
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

    # The effects of marks when the graph runs

    def enter(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Gather the entered module's parameters, as FSDP's pre-forward hook does."""
        return self._through(place, tensors, ShardGroup.gather, ShardGroup.enter)

    def leave(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Free the left module's parameters, as FSDP's post-forward hook does."""
        return self._through(place, tensors, ShardGroup.let_go, ShardGroup.leave)

    def _through(self, place: str, tensors: Tensors, in_backward: Hook, in_forward: Hook) -> Tensors:
        group, module = self.group_at(place)
        if self.measuring:
            return tensors
        # In a backward, a stage is being recomputed: FSDP's hook would take it for a new forward, and wait for another
        # backward. PyTorch has no public way to ask; its own FSDP reads the same number.
        if torch_compat.current_graph_task_id() != -1:
            in_backward(group)
            return tensors
        return in_forward(group, module, tensors)  # type: ignore[no-any-return] # a method of FSDP's group

    def group_at(self, place: str) -> tuple[ShardGroup, int]:
        number, position = map(int, place.split())
        return self.groups[number], position


def is_mark(node: fx.Node) -> bool:
    """Whether a node of a stage calls a hook of FSDP. It returns its inputs after `place`."""
    return isinstance(getattr(node.target, "__self__", None), FSDPMarks)


def passed_through(place: str, *tensors: torch.Tensor) -> Tensors:
    return tensors
