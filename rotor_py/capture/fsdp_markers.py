"""Capture a model of `fully_shard`. FSDP's hooks would break the graph. While TorchDynamo traces, other hooks replace
them, which only add a node to the graph, called a mark. When the graph runs, its marks call FSDP's hooks. While it is
traced, each sharded parameter is replaced by one without memory, called a hole.
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
    """Mark where a module begins. `place` says which one: a string, since an int could become an input of the graph."""
    return _passed(tensors)


def leave(place: str, *tensors: torch.Tensor) -> Tensors:
    return _passed(tensors)


MARKS: dict[Any, str] = {enter: "enter", leave: "leave"}
# Keep each mark as one node: otherwise, TorchDynamo would trace the views inside instead.
for _mark in MARKS:
    torch_compat.allow_in_graph(_mark)


@cache  # TorchDynamo's guards compare hooks by identity, in every step and in all models that share a graph
def marking_hooks(place: str, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> tuple[Hook, Hook]:
    """Return a forward pre-hook and a forward hook that add marks to the graph, and cast as FSDP's hooks do."""

    def entering(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _marked(enter, place, cast((args, kwargs), input_dtype))

    def leaving(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(_marked(leave, place, output), output_dtype)

    return entering, leaving


def _passed(tensors: Tensors) -> Tensors:
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


def _marked(mark: Callable[..., Tensors], place: str, value: Any) -> Any:
    """Pass the tensors of `value` that require a gradient through a mark."""
    # Modules take and return nested dicts, dataclasses and tuples, so flatten them as FSDP does.
    flat, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    through = mark(place, *[flat[i] for i in at])
    for i, tensor in zip(at, through, strict=False):  # not strict: a mark without tensors returns an empty one
        flat[i] = tensor
    return tree_unflatten(flat, spec)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Oldest version of torch that is supported here. In older ones, FSDP gathers differently during a backward.
_OLDEST = (2, 11)

Table = dict[str, nn.Parameter | None]
Place = tuple[Table, str]  # a module's dict of parameters, and a parameter's name in the dict


class FSDPMarks:
    """The groups of a model's sharded parameters, and the holes that replace the parameters during capture. Raises
    UnsupportedModelError if torch is too old, or if a parameter is a tensor subclass that a hole cannot imitate.
    """

    def __init__(self, model: nn.Module, groups: list[ShardGroup]) -> None:
        self.groups = groups
        # Whether marks do nothing, as while stages are measured: then, parameters are gathered around each stage.
        self.measuring = False
        self._model = model
        self.model_name = type(model).__name__
        self._holes: dict[int, nn.Parameter] = {}
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []
        if TORCH < _OLDEST:
            raise UnsupportedModelError(
                f"fully_shard on {self.model_name}, which is not an nn.Sequential, needs torch "
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
        """A key that is equal for models whose graphs have the same marks."""
        # Identify modules by position, so that models of the same structure have the same key.
        order = {id(module): position for position, module in enumerate(self._model.modules())}
        return tuple(
            (number, tuple(order[id(module)] for module in group.modules), group.input_dtype, group.output_dtype)
            for number, group in enumerate(self.groups)
            if self._model not in group.modules
        )

    @property
    def places(self) -> dict[int, tuple[Place, ShardGroup]]:
        """Maps the id of each hole to where its parameter is (a module's dict and the key), and its FSDP group."""
        # Of a parameter that several modules hold, one place suffices: FSDP puts the same tensor into all of them.
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
        """Inside the context `marked`, put the model's own parameters and hooks back, so that a graph can run."""
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
                # Leave out the model itself: its hooks run outside its `forward`, which alone is traced.
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
            # Use no meta tensor, since TorchDynamo traces operators for the device of each parameter.
            memory = torch.empty(parameter.size, dtype=parameter.dtype, device=parameter.device)
            hole = nn.Parameter(parameter.laid_out(memory), sharded.requires_grad)
            memory.untyped_storage().resize_(0)
            self._holes[id(sharded)] = hole
        return self._holes[id(sharded)]

    def enter(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Gather the entered module's parameters, as FSDP's pre-forward hook does."""
        return self._through(place, tensors, ShardGroup.gather, ShardGroup.enter)

    def leave(self, place: str, *tensors: torch.Tensor) -> Tensors:
        """Free the parameters of the module that ends here, as FSDP's post-forward hook does."""
        return self._through(place, tensors, ShardGroup.let_go, ShardGroup.leave)

    def _through(self, place: str, tensors: Tensors, in_backward: Hook, in_forward: Hook) -> Tensors:
        group, module = self.group_at(place)
        if self.measuring:
            return tensors
        # A run inside a backward is a recomputation. FSDP's hook would count it as a new forward and wait for another
        # backward, so do not call it. This private function of PyTorch is what FSDP itself uses to find out.
        if torch_compat.current_graph_task_id() != -1:
            in_backward(group)
            return tensors
        return in_forward(group, module, tensors)  # type: ignore[no-any-return] # a method of FSDP's group

    def group_at(self, place: str) -> tuple[ShardGroup, int]:
        number, position = map(int, place.split())
        return self.groups[number], position


def is_mark(node: fx.Node) -> bool:
    """Whether a node of a stage is a mark: it calls FSDP's hook, and returns its inputs except `place`."""
    return isinstance(getattr(node.target, "__self__", None), FSDPMarks)


def passed_through(place: str, *tensors: torch.Tensor) -> Tensors:
    return tensors
