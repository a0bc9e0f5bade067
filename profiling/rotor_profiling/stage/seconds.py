"""The seconds of one stage, in each way in which an executor runs it, by some of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rotor_profiling.timing import lower_quartile, spread


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
