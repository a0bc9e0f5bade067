"""What the executor takes for a stage beside its operators, in seconds: the same for all stages, on this machine.

A stage that is a node of the graph takes a tape, a frame, and a backward inside a backward: a fraction of a
millisecond, as long as a small stage itself. A stage that is timed by itself takes a call of its runner and one of
autograd's engine, where in a step its operators may be a part of something longer. Each is measured on a stage that
does next to nothing, once in a process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_profiling.instruments import stopwatch
from rotor_profiling.stage.entry import enter_graph
from rotor_profiling.stage.seconds import OwnSeconds
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
_TOGETHER = 16
"""Operators in a row, for the time of one that is not alone. A guess."""


@cache
def own_seconds() -> OwnSeconds:
    """Seconds of the processor: of a node, and of a forward and a backward that are alone, beside their operators."""
    with stopwatch(_CPU) as watch, torch.enable_grad():
        node = _node_seconds(watch)
        runner = StageRunner(_Trivial(), "trivial")
        call, engine = _forward_and_backward(runner.forward, watch)
        together = _forward_and_backward(_in_a_row, watch)
    forward, backward = (each / _TOGETHER for each in together)
    return OwnSeconds(node, max(0.0, call - forward), max(0.0, engine - backward))


def _node_seconds(watch: Stopwatch) -> float:
    """For a stage without a graph at first, beside its runs and its backward.

    In a step, stages that run in between leave nothing of a node's code and objects in the caches, without which it
    takes twice as long.
    """
    instructions = program(1, Sequence.parse("CF_0, L, Fe_0, B_0"))
    found = []
    runner = _Timed(watch)
    for _ in range(_RUNS):
        value, gradient = torch.ones(1, device=_CPU, requires_grad=True), torch.ones(1, device=_CPU)
        runner.laps.clear()
        watch.cool()
        watch.start()
        output = replay([runner], instructions, value)
        runner.lap("node")
        watch.cool()
        runner.lap("others")
        torch.autograd.backward(output, gradient)
        runner.lap("node")
        laps = zip(runner.laps, watch.stop(), strict=True)
        found.append(sum(seconds for name, seconds in laps if name == "node"))
    return lower_quartile(found)


def _forward_and_backward(run: Callable[[torch.Tensor], torch.Tensor], watch: Stopwatch) -> tuple[float, float]:
    forward, backward = [], []
    origin = torch.empty(0, device=_CPU, requires_grad=True)
    for _ in range(_RUNS):
        value, gradient = torch.ones(1, device=_CPU, requires_grad=True), torch.ones(1, device=_CPU)
        entered = enter_graph(origin, value)
        watch.cool()
        watch.start()
        output = run(entered)
        watch.lap()
        watch.cool()
        watch.lap()
        torch.autograd.backward([output], [gradient])
        watch.lap()
        ran, _, came_back = watch.stop()
        forward.append(ran)
        backward.append(came_back)
    return min(forward), min(backward)  # as stages are timed, which they are taken from


def _in_a_row(value: torch.Tensor) -> torch.Tensor:
    factor = torch.ones(1, device=_CPU, requires_grad=True)
    for _ in range(_TOGETHER):
        value = value * factor
    return value


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
