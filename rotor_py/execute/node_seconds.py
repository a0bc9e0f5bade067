"""How long it takes to run a stage as a node, beyond its own runs: a tape, a frame, a backward inside a backward.

It is the same for all stages, a fraction of a millisecond, and as long as a small stage itself. So it is measured on a
stage that does next to nothing, once in a process, and counted with the runs that need it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from rotor_profiling.instruments import stopwatch
from rotor_profiling.timing import lower_quartile
from rotor_py.execute.program import program
from rotor_py.execute.tape import replay
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence

_CPU = torch.device("cpu")
_RUNS = 15
"""A guess. They take some milliseconds together."""


@cache
def node_seconds() -> float:
    """Seconds of the processor for a stage without a graph at first, beside its runs and its backward."""
    runner = StageRunner(_Trivial(), "trivial")
    instructions = program(1, Sequence.parse("CF_0, L, Fe_0, B_0"))
    laps: list[list[float]] = []
    with stopwatch(_CPU) as watch, torch.enable_grad():
        for _ in range(_RUNS):
            value, gradient = torch.ones(1, device=_CPU, requires_grad=True), torch.ones(1, device=_CPU)
            watch.start()
            torch.autograd.backward(replay([runner], instructions, value), gradient)
            watch.lap()
            with torch.no_grad():
                _, surroundings = runner.first(value)
            watch.lap()
            runner.attach(value, surroundings)
            watch.lap()
            output = runner.forward(value)
            watch.lap()
            torch.autograd.backward(output, gradient)
            watch.lap()
            laps.append(watch.stop())
    node, first, again, _, backward = (lower_quartile([run[at] for run in laps]) for at in range(5))
    return max(0.0, node - first - again - backward)


class _Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=_CPU))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight
