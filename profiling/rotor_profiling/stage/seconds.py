"""The seconds of one stage, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from rotor_profiling.timing import error_of, error_of_middle, middle, spread

MANY = 8
"""So many runs have a middle that is known better than their least: a guess."""


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
    the forward, and runs the stage again in the backward. None where that was not timed. If caches were `cold` between
    forward and backward, as in a step, other ways than the first are known better.
    """

    ways: tuple[tuple[float, float], ...]
    node: tuple[float, float] | None = None
    cold: bool = False

    @property
    def total(self) -> float:
        """Forward and backward in the first way: what a plain step takes."""
        return sum(self.ways[0])

    @property
    def all_seconds(self) -> float:
        """What measuring took."""
        return sum(map(sum, self.ways)) + sum(self.node or ())


def estimate(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """The seconds of a stage in each way, from some of its runs, or of stages like it: the least of few runs, and the
    middle of many.

    Other ways than the first are estimated by how much longer they take, in the runs that have them; so is running the
    stage again. One run has all ways, and one that of a node.
    """
    return estimate_at(runs, 0)


def cautious(runs: Sequence[StageRun]) -> list[StageSeconds]:
    """The seconds of a stage in each way, where what plans differ in takes as long as it may.

    A solver takes what seems cheap. Of several ways that are known equally well, the one that seems cheapest is dearer
    than it seems, on average: plans would promise less than they take.
    """
    return estimate_at(runs, 1)


def estimate_at(runs: Sequence[StageRun], end: int) -> list[StageSeconds]:
    """The same at the `end` of what is possible, the least (-1) or the most (1), or in between (0).

    Forward and backward of the first way are in each plan once, and stay as they are.
    """
    forward, backward = (_seconds([run.ways[0][phase] for run in runs]) for phase in (0, 1))
    without, longer, wrong = _run_again(runs)
    longer += end * wrong
    # A backward that runs the stage again may skip its output, and makes that graph anew. If that takes longer than it
    # saves, it is counted with the run without a graph: such a stage has at least one.
    nograd = without + max(0.0, longer)
    # Noise can make it larger than a forward, which `Chain` refuses.
    skipped = max(0.0, min(-longer, nograd, forward))
    found = []
    for number in range(_ways_of(runs)):
        # Stored in part, a stage does all that it does when stored whole, and more: a difference below zero is noise.
        longer_by = (_longer(runs, number, phase) for phase in (0, 1))
        more, later = (max(0.0, max(0.0, least) + end * error) for least, error in longer_by)
        found.append(StageSeconds(nograd, forward + more, backward + later, skipped))
    return found


def error_of_ways(runs: Sequence[StageRun]) -> float:
    """By how many seconds it may be wrong how much longer a way of a stage takes than the first: the worst of all."""
    return max(sum(_longer(runs, number, phase)[1] for phase in (0, 1)) for number in range(_ways_of(runs)))


def error_of_node(runs: Sequence[StageRun]) -> float:
    """By how many seconds it may be wrong how much longer a stage takes as a node of the graph."""
    return _run_again(runs)[2]


def error_of_whole(runs: Sequence[StageRun]) -> float:
    """How well the time of a stage that is stored whole is known, as a part of it."""
    totals = [run.total for run in runs]
    return _error(totals) / seconds if (seconds := _seconds(totals)) else 0.0


def spread_of(runs: Sequence[StageRun]) -> float:
    """How far apart the runs of a stage are: the middle half of them, as a part of their median."""
    return spread([run.total for run in runs])


def _run_again(runs: Sequence[StageRun]) -> tuple[float, float, float]:
    """The forward of a node; how much longer its backward takes than forward and backward in training's graph; and how
    wrong both together may be.
    """
    nodes = [(run.node, run.total) for run in runs if run.node is not None]
    forwards = [node[0] for node, _ in nodes]
    longer, wrong = _difference([run.total for run in runs], [(node[1], whole) for node, whole in nodes])
    return _seconds(forwards), longer, hypot(wrong, _error(forwards))


def _longer(runs: Sequence[StageRun], number: int, phase: int) -> tuple[float, float]:
    """How much longer a way takes than the first, forward (0) or backward (1), and how wrong that may be."""
    if number == 0:
        return 0.0, 0.0
    whole = [run.ways[0][phase] for run in runs]
    turns = [run for run in runs if number < len(run.ways)]
    cold = [run for run in turns if run.cold]
    both = [(run.ways[number][phase], run.ways[0][phase]) for run in cold or turns]
    longer, wrong = _difference(whole, both)
    if len(both) == 1 and not cold:
        # Often that is the first run of all, which is slow at its beginning, where the stage is stored whole. To say
        # that a way takes too long is the lesser evil: its plan is not chosen, but what is promised is kept.
        longer = both[0][0] - _seconds(whole)
    return longer, wrong


def _difference(whole: list[float], turns: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How much longer the first of some `turns` take than the second, and how wrong that may be.

    `whole` are all runs of the stage, stored whole.
    """
    differences = [one - other for one, other in turns]
    if len(turns) >= MANY:
        return middle(differences), _error(differences)
    more, less = map(list, zip(*turns, strict=True))
    # A turn that was slow altogether has a difference, too, where runs alone say little.
    error = min(hypot(error_of(more), error_of(less)), error_of_middle(differences))
    # Timed less often than the stage itself, it is known no better than that.
    return min(more) - min(less), max(error, error_of(whole)) if len(more) < len(whole) else error


def _seconds(samples: list[float]) -> float:
    """What they take: the least of few, since other programs make a run longer, and never shorter.

    Of many, what their middle is: where others run all the time, none may be undisturbed, and the least is an accident.
    """
    return middle(samples) if len(samples) >= MANY else min(samples)


def _error(samples: list[float]) -> float:
    """How wrong that may be. Of few samples, nobody knows well how far the middle half is apart, so it counts whole."""
    return error_of_middle(samples) / 2 if len(samples) >= MANY else error_of(samples)


def _ways_of(runs: Sequence[StageRun]) -> int:
    return max(len(run.ways) for run in runs)
