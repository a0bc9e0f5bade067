"""Stages that are run again in the backward, by the engine's own nodes: what they save is made when it is asked for.

# Note [Running stages again inside of autograd's own graph]
#
# `torch.utils.checkpoint` does the same, without its reentrant form, and has no place for stages stored in part: of
# several hooks for saved tensors, autograd calls the innermost alone. So these rules are kept here.
#
# 1. The first run makes the graph that the backward goes through. In the place of every tensor that it saves, the graph
#    gets a `_Place`, which holds the run's input and no tensor of its own.
# 2. The first place that is asked for its tensor has the stages run again. The second run makes a graph as well, which
#    nobody goes through; what that saves fills the places, in order. It ends with the last tensor that is waited for,
#    unless that may not be whole yet: RReLU saves its noise, and then draws it.
# 3. A place that has been asked is empty again: what was saved for a node is freed when the node has run. If the graph
#    is retained, the next backward runs the stages once more.
# 4. What fills a place may itself be a place, of stages that are run a third time; or stand for a tensor that is made
#    again from others, where a stage is stored in part. It is asked when the place is.
# 5. No cycles: the graph holds places, and these the input. They are known to the run by weak references.
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
    """`first(value)`, in the graph around; what it saves is made by `again(value)` when the backward asks for it.

    Both have to save the same tensors in the same order.
    """
    return _Stages(again, value).run(first, value)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of the input."""

    saved: SavedAsItIs
    requires_grad: bool


class _Stages:
    """Stages that are run again."""

    def __init__(self, again: Run, value: Any) -> None:
        self._again = again
        self._input = tree_map_only(torch.Tensor, lambda each: _Held(SavedAsItIs(each), each.requires_grad), value)
        self._places: list[tuple[ref[_Place], torch.Size, torch.dtype]] = []
        self._last = 0
        """the number of the node that saved the last tensor, in the order in which autograd makes nodes"""
        self._to_the_end = False

    def run(self, first: Run, value: Any) -> Any:
        """The first run."""
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
        """Fill the places."""
        origin = torch.empty(0, requires_grad=True)
        value = tree_map_only(_Held, _tensor, self._input)
        with torch.enable_grad(), HandingOver(self):
            self._again(enter_graph(origin, value))

    @property
    def ends_after(self) -> int | None:
        return None if self._to_the_end else len(self._places)

    def receive(self, number: int, saved: Saved, tensor: torch.Tensor) -> None:
        """Fill a place, if the graph still has it. RuntimeError if it is another tensor's."""
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
    """What the graph holds in the place of a tensor."""

    __slots__ = ("__weakref__", "_stages", "saved")

    def __init__(self, stages: _Stages) -> None:
        self._stages = stages
        self.saved: Saved | None = None

    def tensor(self) -> torch.Tensor:
        """The tensor. RuntimeError if the stages, run again, do not save it."""
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
    # Marked again: what is detached has no mark, and shares nothing with the graph before it.
    return held.saved.tensor().detach().requires_grad_(held.requires_grad)
