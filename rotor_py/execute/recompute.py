"""Recompute stages in the backward through the engine's own nodes: saved tensors are computed on demand.

# Note [Running stages again inside of autograd's own graph]
#
# Non-reentrant `torch.utils.checkpoint` does the same, but cannot store a stage in part: of several saved-tensor hooks,
# autograd calls only the innermost. So the rules are implemented here.
#
# 1. The first run makes the graph that the backward goes through. The graph saves a `_Place` for every tensor: it holds
#    the run's input and no tensor of its own.
# 2. The first place that is asked for its tensor recomputes the stages. The recompute builds a second graph, unused;
#    the tensors that this graph saves fill the places, in order. It stops at the last tensor needed, unless that tensor
#    may be unfinished then: RReLU saves its noise, and draws it afterwards.
# 3. A place is emptied when it is read: a node's saved tensors are freed when it has run. If the graph is retained, the
#    next backward recomputes the stages once more.
# 4. A place may hold another place, of stages recomputed a third time, or a tensor to be computed from others, where a
#    stage is stored in part. It is resolved when the place is read.
# 5. No cycles: the graph holds places, and these the input. The run knows places by weak references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import Node

from rotor_profiling.stage.gradients import enter_graph
from rotor_profiling.storage import tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.errors import InvalidStateError
from rotor_py.stage.saved_tensors import (
    HandingOver,
    NobodyWaits,
    Saved,
    SavedAsItIs,
    handing_over_now,
    last_node,
    node_behind,
    tensor_of,
)

Run = Callable[[Any], Any]


def saved_again(first: Run, again: Run, value: Any) -> Any:
    """Return `first(value)`, in the surrounding graph; `again(value)` recomputes its saved tensors in the backward.

    Both must save the same tensors in the same order.
    """
    return _Stages(again, value).run(first, value)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of the input."""

    saved: SavedAsItIs
    requires_grad: bool


class _Stages:
    def __init__(self, again: Run, value: Any) -> None:
        self._again = again
        self._input = tree_map_only(torch.Tensor, lambda each: _Held(SavedAsItIs(each), each.requires_grad), value)
        self._places: list[tuple[ref[_Place], torch.Size, torch.dtype]] = []
        self._last = 0
        """number of the node that saved the last tensor, in the order in which autograd makes nodes"""
        self._to_the_end = False

    def run(self, first: Run, value: Any) -> Any:
        outside = handing_over_now()

        def leave_out(tensor: torch.Tensor) -> _Place:
            place = _Place(self)
            self._places.append((ref(place), tensor.shape, tensor.dtype))
            self._last = last_node()
            if outside is not None:
                outside.hand_over(place, tensor)
                outside.end_if_complete()
            return place

        with torch.autograd.graph.saved_tensors_hooks(leave_out, tensor_of), NobodyWaits():
            output = first(value)
        self._to_the_end = _saves_too_early(node_behind(tensors_in(output), self._last))
        return output

    def run_again(self) -> None:
        """Recompute, and fill the places."""
        origin = torch.empty(0, requires_grad=True)
        value = tree_map_only(_Held, _tensor, self._input)
        with torch.enable_grad(), HandingOver(self):
            self._again(enter_graph(origin, value))

    @property
    def ends_after(self) -> int | None:
        return None if self._to_the_end else len(self._places)

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Fill a place, if the graph still has it. Raises RuntimeError if the tensor is not the expected one."""
        if number >= len(self._places):
            raise InvalidStateError(
                f"a stage saved {len(self._places)} tensors for its backward in the forward, and more when it was run "
                "again; a stage has to do the same thing every time",
                kind="rerun_differs",
                saved=len(self._places),
            )
        place, shape, dtype = self._places[number]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise InvalidStateError(
                f"a stage saved a tensor of shape {tuple(shape)} ({dtype}) in the forward, and one of shape "
                f"{tuple(tensor.shape)} ({tensor.dtype}) when it was run again; a stage has to do the same thing "
                "every time",
                kind="rerun_differs",
            )
        if (found := place()) is not None:
            found.saved = saved


class _Place:
    """Stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "_stages", "saved")

    def __init__(self, stages: _Stages) -> None:
        self._stages = stages
        self.saved: Saved | None = None

    def tensor(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError if the recompute does not save it."""
        if self.saved is None:
            self._stages.run_again()
        saved, self.saved = self.saved, None
        if saved is None:
            raise InvalidStateError(
                "a stage saved fewer tensors for its backward when it was run again than in the forward; a stage has "
                "to do the same thing every time",
                kind="rerun_differs",
            )
        return saved.tensor()


def _saves_too_early(node: Node | None) -> bool:
    return node is not None and node.name().startswith("RreluWithNoise")


def _tensor(held: _Held) -> torch.Tensor:
    # A detached tensor loses `requires_grad`, so it is set again. It shares no graph with its source.
    return held.saved.tensor().detach().requires_grad_(held.requires_grad)
