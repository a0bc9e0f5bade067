"""Define the interface of stage sources, and run their stages by sequences."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as Operations
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from rotor_profiling.backends import operators
from rotor_py.distributed.sharding import is_sharded
from rotor_py.execute import regions
from rotor_py.execute.instructions import Instructions, NamedStage, Runners, read_sequence
from rotor_py.execute.oom_retry_tape import OOMRetryTape, SmallerPlans
from rotor_py.execute.tape import Tape
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions
from rotor_py.offload.offload_saved import Tier
from rotor_py.plan.saved_plan import Plan
from rotor_py.stage.protocol import Keeper
from rotor_solver import Sequence

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import CompileBudget

_MOST_READ = 8
"""Parsed sequences to cache. A guess: each forward in flight may follow its own. Too few are parsed again in each
step."""


@dataclass(frozen=True, slots=True)
class Following:
    """How stages are run: by `sequence`, whose options are the storage modes that `measurement` names.

    With `smaller` plans, stages that run out of memory are recomputed by one of these. Offloads go to `tier`.
    """

    sequence: Sequence
    preserve_rng_state: bool
    measurement: Measurement
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

    def measure(
        self,
        value: Any,
        device: torch.device,
        options: MeasuringOptions,
        room: Callable[[Measurement, Any], CompileBudget] | None,
    ) -> tuple[list[MeasuredCut], Any]:
        """Cut the model into stages and measure them on `value`. Raises UnsupportedModelError if it cannot be cut.

        Returns the variants of running the stages, and everything that the caller holds during the step. The last
        variant is plain, and in use until another one is chosen. `room` returns the budget for a graph compiled whole,
        from the plain step's costs and what the caller holds.
        """

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


class SequenceExecutor:
    """Runs stages by sequences. Parses each sequence once while it is in use; its runners serve all forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: list[tuple[tuple[object, ...], Instructions, Runners]] = []
        """the most recently parsed, latest at the end"""

    def __call__(
        self,
        stages: Operations[NamedStage],
        make: Callable[[Following], Runners],
        value: Any,
        how: Following,
        context: tuple[Any, ...] = (),
    ) -> Any:
        """Run `stages` on `value`; `make` makes their runners, if this sequence has none yet."""
        # Compared as objects: comparing thousands of operations would take longer than small stages do.
        key = how.sequence, stages, how.measurement, how.preserve_rng_state
        read = next((each for each in self._read if all(map(operator.is_, each[0], key))), None)
        if read is None:
            instructions, whole = read_sequence(len(stages), how.sequence), make(how)
            # A region recomputes stages whole: what a stage stored in part recomputes would be held to its end.
            runners = whole if is_sharded(self._model) else whole.by(instructions.options)
            read = key, instructions, runners
            self._read = [*self._read[1 - _MOST_READ :], read]
        _, instructions, runners = read
        with operators():
            if is_sharded(self._model):
                # FSDP hooks modules and parameters; only the engine's own nodes call these hooks in their order.
                items = regions.regions(how.sequence)
                return regions.run(runners, items, value, instructions.options, context)
            if how.smaller is not None:
                return OOMRetryTape(runners, instructions, how.smaller, context).forward(value)
            return Tape(runners, instructions, tier=how.tier, context=context).forward(value)
