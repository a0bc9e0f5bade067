"""A stage alone as a node of the caller's graph, to be timed with all that this takes beside its operators.

A node takes a frame, entries in a tape, a run that is recorded, and a backward inside a backward: as long
as a small stage itself. It is the code that replays a sequence, and so takes what it takes in training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import Tape
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence


def single_stage_node(runner: StageRunner) -> Callable[[Any], Any]:
    """Make ready what runs a stage as a node, without a graph at first, and again in the backward.

    In a step, another node has run right before it, forward or backward, and its code is in the caches of a core. So
    one that does nothing runs here.
    """
    value = torch.ones(1, device="cpu", requires_grad=True)
    with torch.enable_grad():
        Tape(_trivial(), _instructions()).forward(value).backward()
    return _LoneTape([runner], _instructions()).forward


class _LoneTape(Tape):
    """A stage that overwrites its input is not run again in any plan, and has to be measured all the same."""

    def _refuse_overwritten(self, stage: int, value: Any, before: list[int]) -> None: ...


@cache
def _instructions() -> Program:
    return program(1, Sequence.parse("CF_0, L, Fe_0, B_0"))


@cache
def _trivial() -> list[StageRunner]:
    return [StageRunner(nn.Identity(), "trivial")]
