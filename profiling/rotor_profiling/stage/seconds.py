"""The seconds of one stage, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import torch

from rotor_profiling.stage.entry import enter_graph
from rotor_profiling.stage.gradients import Layouts, gradients_for
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import local, tensors_in, wait_for
from rotor_profiling.timing import PRIVATE, Stopwatch, error_of, error_of_middle, spread


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage, as in `StageCost`."""

    nograd_seconds: float
    forward_seconds: float
    backward_seconds: float
    skipped_output_seconds: float


@dataclass(frozen=True, slots=True)
class OwnSeconds:
    """What an executor takes for a stage beside its operators, in seconds.

    `node` is that of a stage which is a node of the graph, beside its runs and its backward. The others are what a
    stage takes because it is timed by itself: `call` in its forward, `engine` in its backward, which somebody has to
    begin.
    """

    node: float = 0.0
    call: float = 0.0
    engine: float = 0.0

    def in_a_step(self, alone: StageSeconds, *, joins: bool) -> StageSeconds:
        """The seconds that a stage takes in a step, by those that it took `alone`.

        In a step, the engine comes to its backward on its way; and if it `joins` the stages around it, its forward is a
        part of theirs. A node runs alone in a step, too: it gets both back with its run without a graph, of which it
        has at least one.
        """
        skipped = alone.skipped_output_seconds
        forward = max(skipped, alone.forward_seconds - self.call) if joins else alone.forward_seconds
        return StageSeconds(
            nograd_seconds=alone.nograd_seconds + self.node + self.engine + (alone.forward_seconds - forward),
            forward_seconds=forward,
            backward_seconds=max(0.0, alone.backward_seconds - self.engine),
            skipped_output_seconds=skipped,
        )


@dataclass(frozen=True, slots=True)
class StageRun:
    """The seconds of one run of a stage in all ways, one right after the other.

    Without a graph; forward and backward in each way with one, or in the first of them alone; and, for that one, the
    forward run `again`, with a graph of its own, and the backward that follows `at_once`: what the stage has made is
    still in caches. None where that was not timed.
    """

    nograd: float
    ways: tuple[tuple[float, float], ...]
    again: float | None
    at_once: float | None = None

    @property
    def total(self) -> float:
        """Forward and backward in the first way: what a plain step takes."""
        forward, backward = self.ways[0]
        return forward + backward

    @property
    def all_seconds(self) -> float:
        """What measuring took."""
        return self.nograd + sum(map(sum, self.ways)) + (self.again or 0.0) + (self.at_once or 0.0)


def time_stage(
    runners: Sequence[Runner],
    value: Any,
    parameters: Sequence[torch.Tensor],
    watch: Stopwatch,
    *,
    fresh_gradients: bool = False,
    silent: Sequence[int] = (),
    arriving: Layouts = (),
    between_bytes: int = PRIVATE,
    again: bool = True,
) -> tuple[StageRun, Any]:
    """Time one run of a stage on `value` in all ways; return it, and the stage's output without a graph.

    `runners` has one runner for each way to run it with a graph, and `parameters` are those that the stage trains; the
    rest is explained at `Place`. Without `again`, the run with a graph of its own is left out. Ways are timed one right
    after the other, because from moment to moment a busy machine differs by more than they do.
    """
    laps: list[str] = []  # what the laps are; those without a name are not counted

    def lap(name: str = "") -> None:
        watch.lap()
        laps.append(name)

    origin = torch.empty(0, requires_grad=True)
    for runner in runners:
        runner.make_ready()
    watch.warm(map(local, tensors_in(value)))
    watch.start()
    with torch.no_grad():
        output, surroundings = runners[0].first(value)
    lap("nograd")
    for runner in runners:
        _prepare(parameters, fresh_gradients)
        entered = enter_graph(origin, value)
        lap()
        made = runner.forward(entered)
        lap("forward")
        tensors = tensors_in(made)
        arrived = gradients_for(made, silent, arriving)
        given = [(tensor, gradient) for tensor, gradient in zip(tensors, arrived, strict=True) if gradient is not None]
        del made, tensors
        watch.cool(between_bytes)
        # In a step, the stage after it has just made these, and let go of as much: of memory that is in caches.
        watch.warm(local(gradient).clone() for _, gradient in given)
        lap()
        if given:
            torch.autograd.backward([tensor for tensor, _ in given], [gradient for _, gradient in given])
        lap("backward")
        del given, entered  # else they would be freed inside the next lap
        if again and runner is runners[0]:
            _prepare(parameters, fresh_gradients)
            watch.cool(between_bytes)
            lap()
            # The output is let go of with the run: its size is another one if it is skipped.
            attached, made = runner.attach(value, surroundings, skip_output=runner.can_skip_output)
            del made
            lap("again")
            # An exact clock knows no caches: it would only see how autograd is asked for these gradients.
            if not watch.exact and any(gradient is not None for gradient in arrived):
                made_at_once = attached.backward(arrived)
                wait_for([each for each in made_at_once if each is not None])
                _add_up(parameters, made_at_once[len(tensors_in(value)) :])
                del made_at_once
                lap("at once")
            del attached
        del arrived
    seconds: dict[str, list[Any]] = {}
    for name, each in zip(laps, watch.stop(), strict=True):
        seconds.setdefault(name, []).append(each)
    ways = tuple(zip(seconds["forward"], seconds["backward"], strict=True))
    (again_seconds,), (at_once,) = (seconds.get(name, [None]) for name in ("again", "at once"))
    return StageRun(seconds["nograd"][0], ways, again_seconds, at_once), output


def _add_up(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add `gradients` to those that parameters have, as the engine does in a step; new ones it takes as they are."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None and parameter.grad is not None and parameter.grad.shape == gradient.shape:
                parameter.grad += gradient


def estimate(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """The seconds of a stage in each way, from some of its runs, or of stages like it: the least of each.

    Other ways than the first are estimated by how much longer they take, in the runs that have them. One has all ways.
    """
    return _estimated(runs, 0.0)


def cautious(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """The seconds of a stage in each way, where what plans differ in takes as much longer as `errors_of` says.

    A solver takes what seems cheap. Of several ways that are known equally well, the one that seems cheapest is dearer
    than it seems, on average: plans would promise less than they take. Forward and backward of the first way are in
    each plan once, and stay as they are.
    """
    return _estimated(runs, 1.0)


def _estimated(runs: Sequence[StageRun], errors: float) -> list[StageSeconds]:
    """`errors`: how many of them are added to what plans differ in."""
    forward, backward = (min(run.ways[0][phase] for run in runs) for phase in (0, 1))
    without = [run.nograd for run in runs]
    # What is run again with a graph of its own may skip its output, and has to make that graph. If making it takes
    # longer than it saves, that is counted with the run without a graph: such a stage has at least one.
    saved, wrong = _saved(runs)
    saved -= errors * wrong
    nograd = min(without) + errors * error_of(without) + max(0.0, -saved)
    # Noise can make it larger than a forward, which `Chain` refuses.
    skipped = max(0.0, min(saved, nograd, forward))
    found = []
    for number in range(_ways_of(runs)):
        # Stored in part, a stage does all that it does when stored whole, and more: a difference below zero is noise.
        longer_forward, longer_backward = (
            max(0.0, longer) + errors * error for longer, error in (_longer(runs, number, phase) for phase in (0, 1))
        )
        found.append(StageSeconds(nograd, forward + longer_forward, backward + longer_backward, skipped))
    return found


def errors_of(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """How many seconds `estimate` may be wrong by, in each way: see `error_of`.

    Of forward and backward, it is how much longer other ways take than the first: theirs is wrong by as much as its.
    """
    _, skipped = _saved(runs)
    nograd = error_of([run.nograd for run in runs]) + skipped  # of which it has a part, if a graph takes longer
    return [
        StageSeconds(nograd, _longer(runs, number, 0)[1], _longer(runs, number, 1)[1], skipped)
        for number in range(_ways_of(runs))
    ]


def _saved(runs: Sequence[StageRun]) -> tuple[float, float]:
    """How much less than in training's graph a stage takes that is run again, and how wrong that may be: its forward,
    and its backward, which follows at once.
    """
    forwards, backwards = ([run.ways[0][phase] for run in runs] for phase in (0, 1))
    both = [(run.ways[0][0], run.again) for run in runs if run.again is not None]
    saved, wrong = _difference(forwards, both)
    later = [(run.ways[0][1], run.at_once) for run in runs if run.at_once is not None]
    if not later:
        return saved, wrong
    sooner, error = _difference(backwards, later)
    return saved + sooner, hypot(wrong, error)


def _longer(runs: Sequence[StageRun], number: int, phase: int) -> tuple[float, float]:
    """How much longer a way takes than the first, forward (0) or backward (1), and how wrong that may be."""
    if number == 0:
        return 0.0, 0.0
    whole = [run.ways[0][phase] for run in runs]
    both = [(run.ways[number][phase], run.ways[0][phase]) for run in runs if number < len(run.ways)]
    longer, wrong = _difference(whole, both)
    if len(both) == 1:
        # Often that is the first run of all, which is slow at its beginning, where the stage is stored whole. To say
        # that a way takes too long is the lesser evil: its plan is not chosen, but what is promised is kept.
        longer = both[0][0] - min(whole)
    return longer, wrong


def _difference(whole: list[float], turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How much longer the least of the first of some `turns` is than that of the second, and how wrong that may be.

    `whole` are all runs of the stage, stored whole.
    """
    more, less = map(list, zip(*turns, strict=True))
    # A turn that was slow altogether has a difference, too, where runs alone say little.
    error = min(hypot(error_of(more), error_of(less)), error_of_middle([one - other for one, other in turns]))
    # Timed less often than the stage itself, it is known no better than that.
    return min(more) - min(less), max(error, error_of(whole)) if len(more) < len(whole) else error


def _ways_of(runs: Sequence[StageRun]) -> int:
    return max(len(run.ways) for run in runs)


def spread_of(runs: Sequence[StageRun]) -> float:
    """How far apart the runs of a stage are: the middle half of them, as a part of their median."""
    return spread([run.total for run in runs])


def _prepare(parameters: Sequence[torch.Tensor], fresh_gradients: bool) -> None:
    """Have gradients where training has some before a backward, and only there."""
    for parameter in parameters:
        if fresh_gradients:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
