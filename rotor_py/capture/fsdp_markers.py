"""Capture a model that `fully_shard` shards. FSDP's hooks would break the graph. So while TorchDynamo traces, they are
replaced by hooks that only add a node to the graph, called a mark. When the graph runs, its marks call FSDP's hooks.
Each sharded parameter is replaced at tracing, too: by one without memory, called a hole.
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
    """Mark where the module of `group_at(place)` begins. An int as `place` might become an input of the graph."""
    return _passed(tensors)


def leave(place: str, *tensors: torch.Tensor) -> Tensors:
    return _passed(tensors)


MARKS: dict[Any, str] = {enter: "enter", leave: "leave"}
# Keep each mark as one node: otherwise, TorchDynamo would trace the `view_as` calls inside the functions.
for _mark in MARKS:
    torch_compat.allow_in_graph(_mark)


@cache  # TorchDynamo's guards compare hooks by identity, in every step and in all models that share a graph
def marking_hooks(place: str, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> tuple[Hook, Hook]:
    """Return a pre-hook and a hook of a module's forward: they add marks to the graph, and cast as FSDP's hooks do."""

    def entering(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _marked(enter, place, cast((args, kwargs), input_dtype))

    def leaving(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(_marked(leave, place, output), output_dtype)

    return entering, leaving


def _passed(tensors: Tensors) -> Tensors:
    return tuple(tensor.view_as(tensor) for tensor in tensors) or (torch.empty(0),)


def _marked(mark: Callable[..., Tensors], place: str, value: Any) -> Any:
    """Return `value` with each tensor that requires a gradient replaced by a view, which a mark in the graph makes."""
    # Modules take and return nested dicts, dataclasses and tuples, so flatten them as FSDP does.
    flat, spec = tree_flatten(value)
    at = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    through = mark(place, *[flat[i] for i in at])
    for i, tensor in zip(at, through, strict=False):  # not strict: without inputs, a mark returns one empty tensor
        flat[i] = tensor
    return tree_unflatten(flat, spec)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Oldest torch version with which sharded models can be captured. In older ones, FSDP gathers differently in a backward.
_OLDEST = (2, 11)

Table = dict[str, nn.Parameter | None]
Entries = list[tuple[dict[Any, Any], Any, Any]]  # triples of a dict, a key and a value
Place = tuple[Table, str]  # a module's dict `_parameters`, and the key of a parameter in it


class FSDPMarks:
    """Marks and holes of one model, whose sharded parameters are in `groups`. Raises UnsupportedModelError if torch is
    too old, or if a parameter is a tensor subclass with its own code for gathering.
    """

    def __init__(self, model: nn.Module, groups: list[ShardGroup]) -> None:
        self.groups = groups
        # Whether marks call no hooks of FSDP. Set while stages are measured, as the measurer itself gathers parameters.
        self.measuring = False
        self._model = model
        self.model_name = type(model).__name__
        self._holes: dict[int, nn.Parameter] = {}
        self._replaced: Entries = []
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
        # Identify modules by their position in `modules()`, so that models of the same structure have the same key.
        order = {id(module): position for position, module in enumerate(self._model.modules())}
        return tuple(
            (number, tuple(order[id(module)] for module in group.modules), group.input_dtype, group.output_dtype)
            for number, group in enumerate(self.groups)
            if self._model not in group.modules
        )

    @property
    def places(self) -> dict[int, tuple[Place, ShardGroup]]:
        """Maps the id of each hole to a pair: where a module has the parameter that it replaces, and the FSDP group."""
        # If several modules share a parameter, one place suffices: FSDP puts the same tensor into all of them.
        return {
            id(self._hole(each)): ((each.places[0][0]._parameters, each.places[0][1]), group)
            for group in self.groups
            for each in group.parameters
        }

    @contextmanager
    def marked(self) -> Iterator[None]:
        self._replaced = _put(self._marks())
        try:
            yield
        finally:
            _put(self._replaced)

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Inside the context `marked`, put the model's own parameters and hooks back, so that a graph can run."""
        marks = _put(self._replaced)
        try:
            yield
        finally:
            self._replaced = _put(marks)

    def _marks(self) -> Entries:
        new: Entries = []
        for number, group in enumerate(self.groups):
            for each in group.parameters:
                new += [(module._parameters, name, self._hole(each)) for module, name in each.places]
            for position, module in enumerate(group.modules):
                # Keep the hooks of the model itself: TorchDynamo traces only `model.forward`, which does not call them.
                if module is not self._model:
                    hooks = marking_hooks(f"{number} {position}", group.input_dtype, group.output_dtype)
                    new += [(*at, hook) for at, hook in zip(group.hook_places(position), hooks, strict=True)]
        return new

    def _hole(self, parameter: ShardedParameter) -> nn.Parameter:
        sharded = parameter.sharded
        if id(sharded) not in self._holes:
            # A hole needs the parameter's device (not the meta device): TorchDynamo traces operators for this device.
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
        # If a backward is running, this is a recomputation. FSDP's hook would count it as a new forward, and wait for
        # another backward, so do not call the hook. FSDP itself detects a backward with this private function.
        if torch_compat.current_graph_task_id() != -1:
            in_backward(group)
            return tensors
        return in_forward(group, module, tensors)  # type: ignore[no-any-return] # a method of FSDP's group

    def group_at(self, place: str) -> tuple[ShardGroup, int]:
        number, position = map(int, place.split())
        return self.groups[number], position


def _put(entries: Entries) -> Entries:
    """Set entries of dicts, and return their former values."""
    before = [(table, key, table[key]) for table, key, _ in entries]
    for table, key, value in entries:
        table[key] = value
    return before


def is_mark(node: fx.Node) -> bool:
    """Whether a node of a stage's graph is a mark: it calls FSDP's hook, and returns its arguments without `place`."""
    return isinstance(getattr(node.target, "__self__", None), FSDPMarks)


def passed_through(place: str, *tensors: torch.Tensor) -> Tensors:
    return tensors
