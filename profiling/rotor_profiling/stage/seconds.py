"""The seconds of one stage, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rotor_profiling.stage.gradients import Layouts, enter_graph, leaves_of, scalar_after
from rotor_profiling.stage.stage_context import Runner
from rotor_profiling.timing import Stopwatch, lower_quartile, spread


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage, as in `StageCost`."""

    nograd_seconds: float
    forward_seconds: float
    backward_seconds: float
    skipped_output_seconds: float


@dataclass(frozen=True, slots=True)
class StageRun:
    """The seconds of one run of a stage in all ways, one right after the other.

    Forward and backward in each way with a graph, or in the first of them alone; and as a `node`, which has no graph in
    the forward, and runs the stage again in the backward. None where that was not timed.
    """

    ways: tuple[tuple[float, float], ...]
    node: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        """Forward and backward in the first way: what a plain step takes."""
        return sum(self.ways[0])

    @property
    def all_seconds(self) -> float:
        """What measuring took."""
        return sum(map(sum, self.ways)) + sum(self.node or ())


def estimate(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """The seconds of a stage in each way, from some of its runs, or of stages like it.

    Other ways than the first are estimated by how much longer they take, and so is running the stage again. One run at
    least has all ways, and one that of a node.
    """
    forward, backward = (lower_quartile([run.ways[0][phase] for run in runs]) for phase in (0, 1))
    nodes = [run.node for run in runs if run.node is not None]
    longer = lower_quartile([node[1] for node in nodes]) - forward - backward
    # A backward that runs the stage again may skip its output, and makes that graph anew. If that takes longer than it
    # saves, it is counted with the run without a graph: such a stage has at least one.
    nograd = lower_quartile([node[0] for node in nodes]) + max(0.0, longer)
    # Noise can make it larger than a forward, which `Chain` refuses.
    skipped = max(0.0, min(-longer, nograd, forward))
    found = []
    for number in range(max(len(run.ways) for run in runs)):
        seconds = [run.ways[number] for run in runs if number < len(run.ways)]
        # Stored in part, a stage does all that it does when stored whole, and more: a difference below zero is noise.
        more, later = (
            max(0.0, lower_quartile([each[phase] for each in seconds]) - whole)
            for phase, whole in enumerate((forward, backward))
        )
        found.append(StageSeconds(nograd, forward + more, backward + later, skipped))
    return found


def spread_of(runs: Sequence[StageRun]) -> float:
    """How far apart the runs of a stage are: the middle half of them, as a part of their median."""
    return spread([run.total for run in runs])


AsNode = Callable[[Any], Callable[[Any], Any]]
"""Makes ready a node of the graph for a runner: what runs its stage on an input, without a graph at first, and again in
the backward. It is an executor's own, with all that this takes beside the operators of the stage."""


def time_stage(
    runners: Sequence[Runner],
    value: Any,
    parameters: Sequence[torch.Tensor],
    watch: Stopwatch,
    *,
    fresh_gradients: bool = False,
    silent: Sequence[int] = (),
    arriving: Layouts = (),
    as_node: AsNode | None = None,
    again: bool = True,
) -> tuple[StageRun, Any]:
    """Time one run of a stage on `value` in all ways; return it, and the stage's output without a graph.

    `runners` has one runner for each way to run it with a graph, and `parameters` are those that the stage trains; the
    rest is explained at `StageContext`. Without `again`, its run as a node is left out. That is timed as a whole by
    `as_node`; else its parts are, and its backward is taken to be as long as that of the first way. Ways are timed one
    right after the other, because from moment to moment a busy machine differs by more than they do.
    """
    laps = _Laps(watch)
    origin = torch.empty(0, requires_grad=True)

    def enter() -> Any:
        _prepare(parameters, fresh_gradients)
        return enter_graph(origin, value)

    def forward(run: Callable[[Any], Any], name: str) -> list[Any]:
        entered = enter()
        laps.end()
        output = run(entered)
        laps.end(name)
        return [output]

    def backward(outputs: list[Any], name: str) -> None:
        """From gradients on that are given away, as in training: the engine may add to them in place."""
        source = scalar_after(outputs.pop(), silent, arriving, made=lambda _: laps.end())
        if source is None:
            laps.end()
        else:
            source.backward(torch.ones_like(source))
        laps.end(name)

    for runner in runners:
        runner.make_ready()
    output = None
    watch.start()
    for runner in runners:
        made = forward(runner.forward, "forward")
        if runner is runners[0]:
            output = leaves_of(made[0])
        backward(made, "backward")
        if not again or runner is not runners[0]:
            continue
        if as_node is not None:
            backward(forward(as_node(runner), "first"), "again")
        else:
            _run_apart(runner, value, enter, laps)
    seconds = laps.stop()
    ways = tuple(zip(seconds["forward"], seconds["backward"], strict=True))
    if not again:
        return StageRun(ways), output
    (first,), (second,) = seconds["first"], seconds["again"]
    return StageRun(ways, (first, second if as_node is not None else second + ways[0][1])), output


def _run_apart(runner: Runner, value: Any, enter: Callable[[], Any], laps: _Laps) -> None:
    """The two runs of a stage that is a node, without its backward."""
    enter()
    laps.end()
    with torch.no_grad():
        output, surroundings = runner.first(value)
    laps.end("first")
    del output
    laps.end()
    # The output is let go of with the run: its size is another one if it is skipped.
    attached, output = runner.attach(value, surroundings, skip_output=runner.can_skip_output)
    del output
    laps.end("again")
    del attached


class _Laps:
    """The laps of a watch, by name; those without a name do not count."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._names: list[str] = []

    def end(self, name: str = "") -> None:
        self._watch.lap()
        self._names.append(name)

    def stop(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, seconds in zip(self._names, self._watch.stop(), strict=True):
            found.setdefault(name, []).append(seconds)
        return found


def _prepare(parameters: Sequence[torch.Tensor], fresh_gradients: bool) -> None:
    """Have gradients where training has some before a backward, and only there."""
    for parameter in parameters:
        if fresh_gradients:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
