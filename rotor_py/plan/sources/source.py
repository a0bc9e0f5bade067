"""Define the interface of stage sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rotor_py.execute.oom_retry_tape import SmallerPlans
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stages import MeasuredCut
from rotor_py.offload.tier import Tier
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.stage.storage_modes import Keeper
from rotor_solver import Sequence
from rotor_solver.watching import Progress

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import CompileBudget


class Measured(NamedTuple):
    """Result of measuring a step; `sample` is everything that the caller passes in and holds during the step.

    `ways` are the variants of running the stages. The last is plain, and in use until another one is chosen.
    """

    ways: list[MeasuredCut]
    sample: Any

    @property
    def plain(self) -> MeasuredCut:
        """The variant without compiled stages."""
        return self.ways[-1]


Rooms = Callable[[Measurement, Any], "CompileBudget"]
"""Budget that a step leaves for a graph compiled whole, given the plain step's costs and its sample."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How stages are measured; `rooms` are for graphs compiled whole.

    Times have to be close (`closely`) for a limit that is read off the curve of all plans.
    """

    device: torch.device
    settings: Settings
    progress: Progress | None = None
    rooms: Rooms | None = None
    closely: bool = False


@dataclass(frozen=True, slots=True)
class Following:
    """How stages are run: by `sequence`, whose options are the storage modes `ways`, including those of `keepers`.

    With `smaller` plans, stages that run out of memory are recomputed by one of these. Offloads go to `tier`.
    """

    sequence: Sequence
    preserve_rng_state: bool
    ways: tuple[tuple[str, ...], ...]
    keepers: tuple[Keeper, ...] = ()
    smaller: SmallerPlans | None = None
    tier: Tier | None = None


class Source(Protocol):
    """Stages of a model, for one kind of step. The model is in training mode, and gradients are on."""

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the stages. Graphs are captured anew for a larger input.

        Layers are independent of the input, and refuse a larger one, so that no step takes more memory than the user
        was told.
        """

    @property
    def answers(self) -> tuple[bool, ...] | None:
        """The measured batch's answers to the model's questions about its data; None if unknown."""

    def renewed(self) -> Source:
        """Return a source for another kind of step, or for a copy of the model."""

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the arguments as one value. Raises TypeError if the model does not take them."""

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` needs no more memory than the input whose spec is `planned`."""

    def measure(self, value: Any, how: Measuring) -> Measured:
        """Cut the model into stages and measure them on `value`. Raises UnsupportedModelError if it cannot be cut."""

    def follow(self, cut: Cut) -> None:
        """Run the stages as in `cut`, one of the measured variants."""

    def same_graph(self, other: Source) -> bool:
        """Whether the stages of both are equal except for sizes."""

    def adopt(self, plan: Plan) -> Cut | None:
        """Cut as in a plan from a file; None if the cut shows only when the model runs.

        Raises PlanMismatchError if the plan was made for another model.
        """

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        """Run the model forward on `value`, so that its backward follows the sequence.

        Raises PlanMismatchError if the graph differs from the measured one, OtherDataError if the batch's data are the
        reason.
        """
