"""Run a sequence as nested regions, each of which is recomputed when a node of autograd reads its saved tensors.

A memory-persistent sequence is such a nesting: `CF_i, Fn_{i+1}, …, Fn_{j-1}` opens the region of stages i … j-1, which
is recomputed right before its backward. That recompute may open inner regions. The graph has only torch's own nodes,
so hooks keep working: `fully_shard` gathers parameters before a stage runs, and again before its backward.

# Note [Recomputing inside autograd's own graph]
#
# Non-reentrant `torch.utils.checkpoint` does the same, but with its hooks no stage can be stored in part: autograd
# calls only the innermost saved-tensor hooks. So this module implements the rules of that function itself.
#
# 1. The first run makes the graph that the backward goes through. In place of every saved tensor, the graph holds a
#    handle (`_Later`), which refers to the region's input and has no tensor yet.
# 2. The first handle that the backward reads recomputes the stages. The saved tensors of this recompute, whose graph
#    is not used, fill the handles, in order. The recompute stops at the last saved tensor, unless an operator may write
#    to that tensor after saving it, as RReLU does with its noise.
# 3. A handle is emptied when it is read. If the graph is retained, the next backward recomputes the stages once more.
# 4. A filled handle may hold the handle of an inner region, or, where a stage is stored in part, a tensor to be
#    computed from others. Reading the handle resolves either.
# 5. No reference cycles: the graph holds handles, handles hold the input, the region refers to handles weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Operations
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import nn

from rotor_profiling.stage.gradients import enter_graph
from rotor_profiling.storage import tensors_in, wait_for
from rotor_profiling.value_tree import tree_map_only
from rotor_py.distributed.sharding import gathered_to_read, groups_of
from rotor_py.errors import InvalidStateError, InvalidValueError
from rotor_py.execute.instructions import Runners
from rotor_py.stage.forward_state import Surroundings
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.saved_tensors import (
    HandingOver,
    Saved,
    SavedAsItIs,
    hook_gradients,
    innermost_run,
    last_node,
    nodes_behind,
    tensor_of,
)
from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence
from rotor_solver.watching import holding

# Consecutive stages that the backward recomputes from the input of the first: stages, by index, and inner regions.
Region = tuple["int | Region", ...]


def regions(sequence: Sequence) -> Region:
    """Return stored stages, by index, and regions, in order. ValueError if the sequence is not memory-persistent."""
    items, rest = _items(list(sequence))
    if rest:
        raise _not_nested(f"{rest[0]} comes after the backwards of all stages")
    return items


def _items(operations: list[Operation]) -> tuple[Region, list[Operation]]:
    """Parse the forwards at the start of `operations`, to their last backward; return items and later operations."""
    found: list[tuple[int, int, bool]] = []  # of each item: first stage, stage after the last, whether it is stored
    at = 0
    while at < len(operations) and not isinstance(operations[at], Backward | Loss):
        match operations[at]:
            case ForwardEnable(stage):
                found.append((stage, stage + 1, True))
            case ForwardCheck(stage):
                found.append((stage, stage + 1, False))
            case ForwardNograd(stage) if found and not found[-1][2] and found[-1][1] == stage:
                found[-1] = (found[-1][0], stage + 1, False)
            case other:
                raise _not_nested(f"{other} follows no ForwardCheck")
        at += 1
    rest = operations[at + 1 :] if operations[at : at + 1] == [Loss()] else operations[at:]
    items: list[int | Region] = []
    # Go from the last item to the first, the order of their backwards. A region's recompute precedes its backward.
    for first, stop, attached in reversed(found):
        if attached:
            if not rest or rest[0] != Backward(first):
                raise _not_nested(f"{Backward(first)} must follow the backwards of later stages", stage=first)
            items.append(first)
            rest = rest[1:]
        else:
            inside, rest = _items(rest)
            if _stages(inside) != list(range(first, stop)):
                raise _not_nested(f"stages {first} to {stop - 1} are not recomputed together", stage=first)
            items.append(inside)
    return tuple(reversed(items)), rest


def _not_nested(reason: str, stage: int | None = None) -> InvalidValueError:
    text = f"with fully_shard, recompute nested groups of stages, as sequences of Persistent() do: {reason}"
    return InvalidValueError(text, kind="not_nested", stage=stage)


def _stages(items: Region) -> list[int]:
    return [stage for item in items for stage in (_stages(item) if isinstance(item, tuple) else [item])]


def run(
    runners: Operations[StageRunner],
    items: Region,
    value: Any,
    options: Mapping[int, int] = MappingProxyType({}),
    context: tuple[Any, ...] = (),
) -> Any:
    """Run a chain forward on `value`, in the caller's graph, whose backward recomputes the chain's regions.

    `items` come from `regions`. `options` maps stages to storage options other than 0. All stages get `context`.
    """
    return _Chain(runners, Runners(runners).by(options), context).store(items, value)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The stages of one forward. `known` maps stages in regions to the state of their first run, once they have run."""

    runners: Operations[StageRunner]
    stored: list[StageRunner]  # with their storage options
    context: tuple[Any, ...]
    known: dict[int, Surroundings] = field(default_factory=dict)

    def store(self, items: Region, value: Any) -> Any:
        for item in items:
            if isinstance(item, tuple):
                first = partial(self._run_first, _stages(item))
                value = _Recomputed(partial(self.store, item), value).run(first, value)
                # Have the backward wait for gradients with a pending collective before it recomputes the region.
                hook_gradients(value, wait_for)
            elif item in self.known:
                value = self._recompute(self.stored[item], self.known[item], value)
            else:
                value = self.stored[item].forward(value, self.context)
        return value

    def _run_first(self, stages: list[int], value: Any) -> Any:
        for stage in stages:
            # Use no storage mode, since its hooks would hold tensors, unless modes run code that may round otherwise.
            runner = (self.stored if offers_of(self.runners[stage].function).ways_are_code else self.runners)[stage]
            if stage in self.known:
                value = self._recompute(runner, self.known[stage], value)
            else:
                value, self.known[stage] = runner.first(value, self.context)
        return value

    def _recompute(self, runner: StageRunner, surroundings: Surroundings, value: Any) -> Any:
        function = runner.function
        restored = surroundings.restored(function, graph=torch.is_grad_enabled(), alike=True)
        with restored, gathered_to_read() as need:
            need(groups_of(function) if isinstance(function, nn.Module) else ())  # FSDP does not gather these for it
            # Gather parameters of FSDP modules that begin in earlier stages, which may not be recomputed before this.
            offers_of(function).gather_begun()
            return surroundings.run(runner.forward, value, self.context)


@dataclass(frozen=True, slots=True)
class _RegionInput:
    saved: SavedAsItIs
    requires_grad: bool

    def tensor(self) -> torch.Tensor:
        # Detach, so that the recompute has a graph of its own; restore `requires_grad`, which detaching clears.
        return self.saved.tensor().detach().requires_grad_(self.requires_grad)


class _Recomputed:
    """A region that runs on `value`. `again` recomputes it, and saves the same tensors in the same order."""

    def __init__(self, again: Callable[[Any], Any], value: Any) -> None:
        self._again = again
        self._input = tree_map_only(
            torch.Tensor, lambda each: _RegionInput(SavedAsItIs(each), each.requires_grad), value
        )
        self._handles: list[tuple[ref[_Later], torch.Size, torch.dtype]] = []
        self._to_the_end = False

    def run(self, first: Callable[[Any], Any], value: Any) -> Any:
        outside = innermost_run.get()
        last = 0  # sequence number of the node that saved the last tensor

        def leave_out(tensor: torch.Tensor) -> _Later:
            nonlocal last
            handle = _Later(self)
            self._handles.append((ref(handle), tensor.shape, tensor.dtype))
            last = last_node()
            if outside is not None:
                outside.hand_over(handle, tensor)
                outside.end_if_complete()
            return handle

        with torch.autograd.graph.saved_tensors_hooks(leave_out, tensor_of), holding(innermost_run, None):
            output = first(value)
        node = nodes_behind(tensors_in(output), {last}, most=None).get(last)
        self._to_the_end = node is not None and node.name().startswith("RreluWithNoise")  # Rule 2
        return output

    def recompute(self) -> None:
        origin = torch.empty(0, requires_grad=True)
        value = tree_map_only(_RegionInput, _RegionInput.tensor, self._input)
        with torch.enable_grad(), HandingOver(self):
            self._again(enter_graph(origin, value))

    @property
    def ends_after(self) -> int | None:
        return None if self._to_the_end else len(self._handles)

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        if number >= len(self._handles):
            raise _rerun_differs(f"{len(self._handles)} tensors", "more", saved=len(self._handles))
        handle, shape, dtype = self._handles[number]
        if tensor.shape != shape or tensor.dtype != dtype:
            now = f"one of shape {tuple(tensor.shape)} ({tensor.dtype})"
            raise _rerun_differs(f"a tensor of shape {tuple(shape)} ({dtype})", now)
        if (found := handle()) is not None:
            found.saved = saved


class _Later:
    __slots__ = ("__weakref__", "_region", "saved")

    def __init__(self, region: _Recomputed) -> None:
        self._region = region
        self.saved: Saved | None = None

    def tensor(self) -> torch.Tensor:
        if self.saved is None:
            self._region.recompute()
        saved, self.saved = self.saved, None
        if saved is None:
            raise _rerun_differs("more tensors", "fewer")
        return saved.tensor()


def _rerun_differs(before: str, now: str, **numbers: Any) -> InvalidStateError:
    text = f"a stage must save the same tensors in every run: it saved {before} in the forward, {now} when recomputed"
    return InvalidStateError(text, kind="rerun_differs", **numbers)
