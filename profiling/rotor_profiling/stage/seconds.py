"""Time one stage in every storage mode, and inside an autograd node that recomputes it, as the executor does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rotor_profiling.attributes import Attributes, drop_made, made_by
from rotor_profiling.isolate import isolated
from rotor_profiling.stage.gradients import Runner, StageContext, added_up, enter_graph, leaves_of, scalar_after
from rotor_profiling.timing import Stopwatch, lower_quartile


@dataclass(frozen=True, slots=True)
class StageSeconds:
    nograd_seconds: float
    forward_seconds: float
    backward_seconds: float
    skipped_output_seconds: float


@dataclass(frozen=True, slots=True)
class StageRun:
    """Seconds of a stage that ran in its storage modes, one directly after the other.

    `ways`: seconds of (forward, backward) in each mode, or only in the first. `node`: the same for an autograd node,
    which runs the stage without a graph in its forward, and recomputes it in its backward; None if not timed.
    """

    ways: tuple[tuple[float, float], ...]
    node: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        """Seconds of forward and backward in the first mode, which stores all saved tensors, as plain training does."""
        return sum(self.ways[0])

    @property
    def all_seconds(self) -> float:
        return sum(map(sum, self.ways)) + sum(self.node or ())


def estimate(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """Estimate the seconds of a stage in each mode from timed `runs` of it, or of stages with an equal signature.

    At least one of the `runs` must have timed all modes, and at least one a `node`.
    """
    forward, backward = (lower_quartile([run.ways[0][phase] for run in runs]) for phase in (0, 1))
    nodes = [run.node for run in runs if run.node is not None]
    longer = lower_quartile([node[1] for node in nodes]) - forward - backward
    # A node's backward recomputes the stage with a graph, maybe without computing its output. If this takes longer than
    # a forward with a graph, add the difference to `nograd`: a recomputed stage runs at least once without a graph.
    nograd = lower_quartile([node[0] for node in nodes]) + max(0.0, longer)
    # `Chain` refuses a skipped time longer than a forward, as noise could make it.
    skipped = max(0.0, min(-longer, nograd, forward))
    found = []
    for number in range(max(len(run.ways) for run in runs)):
        seconds = [run.ways[number] for run in runs if number < len(run.ways)]
        # A mode that stores less does all the work of storing the whole stage, and more: a shorter time is noise.
        more, later = (
            max(0.0, lower_quartile([each[phase] for each in seconds]) - whole)
            for phase, whole in enumerate((forward, backward))
        )
        found.append(StageSeconds(nograd, forward + more, backward + later, skipped))
    return found


# Function of the executor that maps a `Runner` to a function that runs its stage as an autograd node: the forward has
# no graph, and the backward recomputes the stage. So times include the executor's overhead.
AsNode = Callable[[Any], Callable[[Any], Any]]


def time_ways(
    runners: Sequence[Runner],
    value: Any,
    context: StageContext,
    watch: Stopwatch,
    *,
    as_node: AsNode | None = None,
    again: bool = True,
    hand_on: bool = True,
) -> tuple[StageRun, Any]:
    """Time a stage on `value` in all modes; return the seconds and, with `hand_on`, the output without a graph.

    Runs modes one directly after the other, since the speed of a busy machine varies by more than modes differ. With
    `again`, also times an autograd node, made by `as_node`. If `as_node` is None, times the node's two runs, a forward
    without a graph and a recomputation, and adds the first mode's backward seconds to those of the recomputation.
    """
    # Laps alternate: one to prepare a run, and one of the run.
    origin, output, lap = torch.empty(0, requires_grad=True), None, watch.lap

    def enter() -> Any:
        for parameter in parameters:
            parameter.grad = None
        # A run must not find tensors that the run before left in attributes: these are part of that run's graph.
        attributes.put_back(caches=False)
        drop_made(registered)
        return enter_graph(origin, value)

    def forward(run: Callable[[Any], Any]) -> list[Any]:
        entered = enter()
        lap()
        output = run(entered)
        lap()
        return [output]

    def backward(outputs: list[Any]) -> None:
        # Only the engine refers to the output's gradients, as in training, so it may add to them in place.
        source = scalar_after(outputs.pop(), context.silent, context.arriving, made=lambda _: lap())
        if source is None:
            lap()
        else:
            source.backward(torch.ones_like(source))
        lap()

    with (
        isolated(runners[0].function, context.device) as parameters,
        added_up(parameters, fresh=context.fresh_gradients),
        torch.enable_grad(),
    ):
        attributes, registered = Attributes(runners[0].function), made_by(runners[0].function)
        for runner in runners:
            runner.make_ready()
        watch.start()
        for runner in runners:
            made = forward(runner.forward)
            if hand_on and runner is runners[0]:
                output = leaves_of(made[0])
            backward(made)
            if again and runner is runners[0]:
                if as_node is not None:
                    backward(forward(as_node(runner)))
                else:
                    _run_apart(runner, value, enter, lap)
        seconds = watch.stop()[1::2]
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))
    if not again:
        return StageRun(tuple(pairs)), output
    first, second = pairs.pop(1)
    return StageRun(tuple(pairs), (first, second if as_node is not None else second + pairs[0][1])), output


def _run_apart(runner: Runner, value: Any, enter: Callable[[], Any], lap: Callable[[], None]) -> None:
    """Run the forward and the recomputation that an autograd node of the stage runs, but no backward."""
    enter()
    lap()
    with torch.no_grad():
        output, surroundings = runner.first(value)
    lap()
    del output
    lap()
    # Free the output in this lap, since the time that this takes depends on whether the output was computed.
    attached, output = runner.attach(value, surroundings, skip_output=runner.can_skip_output)
    del output
    lap()
    del attached
