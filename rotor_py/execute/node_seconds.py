"""How long it takes to run a stage as a node, beyond its own runs: a tape, a frame, a backward inside a backward.

It is the same for all stages, a fraction of a millisecond, and as long as a small stage itself. So it is measured on a
stage that does next to nothing, once in a process, and counted with the runs that need it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_profiling.instruments import stopwatch
from rotor_profiling.timing import Stopwatch, lower_quartile
from rotor_py.execute.program import program
from rotor_py.execute.tape import replay
from rotor_py.stage.attached_stage import AttachedStage
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.surroundings import Surroundings
from rotor_solver import Sequence

_CPU = torch.device("cpu")
_RUNS = 7
"""A guess. They take some ten milliseconds together."""
_OTHERS = 2**21
"""Numbers that are written between the runs, 8 MB: in a step, stages that run in between leave nothing of a node's code
and objects in the caches of a core, without which a node takes twice as long."""


@cache
def node_seconds() -> float:
    """Seconds of the processor for a stage without a graph at first, beside its runs and its backward."""
    instructions = program(1, Sequence.parse("CF_0, L, Fe_0, B_0"))
    others = torch.zeros(_OTHERS, device=_CPU)
    found = []
    with stopwatch(_CPU) as watch, torch.enable_grad():
        runner = _Timed(watch)
        for _ in range(_RUNS):
            value, gradient = torch.ones(1, device=_CPU, requires_grad=True), torch.ones(1, device=_CPU)
            runner.laps.clear()
            others.add_(1)
            watch.start()
            output = replay([runner], instructions, value)
            runner.lap("node")
            others.add_(1)
            runner.lap("others")
            torch.autograd.backward(output, gradient)
            runner.lap("node")
            laps = zip(runner.laps, watch.stop(), strict=True)
            found.append(sum(seconds for name, seconds in laps if name == "node"))
    return lower_quartile(found)


class _Timed(StageRunner):
    """Notes what each lap was: its runs and its backward, or what the node did before."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(_Trivial(), "trivial")
        self.laps: list[str] = []
        self._watch = watch

    def lap(self, name: str) -> None:
        self._watch.lap()
        self.laps.append(name)

    def first(self, value: Any) -> tuple[Any, Surroundings]:
        self.lap("node")
        found = super().first(value)
        self.lap("stage")
        return found

    def attach(self, value: Any, surroundings: Surroundings, *, skip_output: bool = False) -> tuple[AttachedStage, Any]:
        self.lap("node")
        attached, output = super().attach(value, surroundings, skip_output=skip_output)
        self.lap("stage")
        return _TimedBackward(attached, self), output  # type: ignore[return-value]  # in all that a node asks it for


class _TimedBackward:
    def __init__(self, attached: AttachedStage, runner: _Timed) -> None:
        self._attached = attached
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attached, name)

    def backward(self, gradients: Any, *, retain_graph: bool = False) -> Any:
        self._runner.lap("node")
        found = self._attached.backward(gradients, retain_graph=retain_graph)
        self._runner.lap("stage")
        return found


class _Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=_CPU))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight
