"""Time a single stage as a node of the caller's graph, with the overhead that it has in training.

A node takes a frame, entries in a tape, a recorded run, and a backward inside a backward: as long as a small stage
itself. The code measured here is the code that replays a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_py.execute.instructions import Instructions, read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence


def single_stage_node(runner: StageRunner) -> Callable[[Any], Any]:
    """Return a function that runs the stage as a node: without a graph at first, recomputed in the backward.

    In a step, another node has run right before it, forward or backward, so its code is in the core's caches. An empty
    stage runs here for the same effect.
    """
    value = torch.ones(1, device="cpu", requires_grad=True)
    with torch.enable_grad():
        Tape(_trivial(), _instructions()).forward(value).backward()
    return _LoneTape([runner], _instructions()).forward


class _LoneTape(Tape):
    """Allows a stage that overwrites its input: no plan recomputes it, but it has to be measured."""

    def _refuse_overwritten(self, stage: int, value: Any, before: list[int]) -> None: ...


@cache
def _instructions() -> Instructions:
    return read_sequence(1, Sequence.parse("CF_0, L, Fe_0, B_0"))


@cache
def _trivial() -> list[StageRunner]:
    return [StageRunner(nn.Identity(), "trivial")]
