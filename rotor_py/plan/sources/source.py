"""What planning asks of the stages of a model, wherever they come from."""

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
from rotor_solver.progress import Progress

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import Room


class Measured(NamedTuple):
    """What measuring a step found out; `sample` is all that the caller passes in, and holds during the step.

    `ways` are those to run the stages, the last of which is plain, and is followed until another one is chosen.
    """

    ways: list[MeasuredCut]
    sample: Any

    @property
    def plain(self) -> MeasuredCut:
        """The way in which nothing is compiled."""
        return self.ways[-1]


Rooms = Callable[[Measurement, Any], "Room"]
"""What a step leaves for a graph that is compiled whole, by what the plain step costs and its sample."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How stages are measured; `rooms` are for what is compiled whole. Times have to be close (`closely`) for a limit
    that is read off the curve of all plans.
    """

    device: torch.device
    settings: Settings
    progress: Progress | None = None
    rooms: Rooms | None = None
    closely: bool = False


@dataclass(frozen=True, slots=True)
class Following:
    """How stages are run: by `sequence`, in which the options of each stage are the `ways` of these names, those of
    `keepers` among them. With `smaller` plans, what runs out of memory runs again by one of these. What the sequence
    moves goes to `tier`.
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
        """Whether TorchDynamo captures the stages. Graphs are made for an input, and made anew for a larger one.

        Layers are there whatever comes. A larger input for them is refused, so that no step takes more memory than the
        user was told.
        """

    @property
    def answers(self) -> tuple[bool, ...] | None:
        """How the batch that was measured answers what the model asks about its data; None if nothing is known."""

    def renewed(self) -> Source:
        """One for another kind of step, or for a copy of the model."""

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What the model is called with, as one value. TypeError if the model does not take these arguments."""

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` needs no more memory than the input whose spec is `planned`."""

    def measure(self, value: Any, how: Measuring) -> Measured:
        """Cut the model into stages and measure them on `value`. UnsupportedModelError if it cannot be cut."""

    def follow(self, cut: Cut) -> None:
        """Run the stages as `cut` has them: one of the ways that were measured."""

    def same_graph(self, other: Source) -> bool:
        """Whether the stages of both are the same but for sizes."""

    def adopt(self, plan: Plan) -> Cut | None:
        """Cut as a plan from a file says; None if the cut shows when the model runs.

        PlanMismatchError if it was made for another model.
        """

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        """Run the model forward on `value`, so that its backward follows the sequence.

        PlanMismatchError if the model takes another way than it did when it was measured, OtherDataError if it does so
        because of the data.
        """
