"""Where the stages of a model come from: a chain of layers, or the graph that TorchDynamo captures."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from rotor_py.compiled.stage_code import Config
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.distributed.whole_parameters import as_entered, is_sharded
from rotor_py.execute import regions
from rotor_py.execute.guarded_tape import GuardedTape, SmallerPlans
from rotor_py.execute.node_seconds import node_seconds
from rotor_py.execute.program import Program, program
from rotor_py.execute.tape import replay
from rotor_py.measure.cut import Cut, Layer, cut, is_chain
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stages import MeasuredCut, measure
from rotor_py.measure.stepped_parameters import stepped_parameters
from rotor_py.plan.inputs.input_spec import covers, describe, reaches, spec_of
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.settings import Settings
from rotor_py.stage.runner import StageRunner
from rotor_solver import Sequence
from rotor_solver.progress import Progress

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import Room

_log = logging.getLogger("rotor_py")
_MOST_READ = 8
"""Sequences that are remembered as they were read. A guess: each forward in flight may follow one of its own."""


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

    def measure(
        self,
        value: Any,
        device: torch.device,
        settings: Settings,
        progress: Progress | None,
        rooms: Rooms | None = None,
    ) -> Measured:
        """Cut the model into stages and measure them on `value`; `rooms` are for what is compiled whole.

        UnsupportedModelError if it cannot be cut.
        """

    def follow(self, cut: Cut) -> None:
        """Run the stages as `cut` has them: one of the ways that were measured."""

    def same_graph(self, other: Source) -> bool:
        """Whether the stages of both are the same but for sizes."""

    def adopt(self, plan: Plan) -> Cut | None:
        """Cut as a plan from a file says; None if the cut shows when the model runs.

        PlanMismatchError if it was made for another model.
        """

    def run(
        self,
        cut: Cut | None,
        sequence: Sequence,
        value: Any,
        *,
        preserve_rng_state: bool,
        smaller: SmallerPlans | None = None,
    ) -> Any:
        """Run the model forward on `value`, so that its backward follows `sequence`.

        With `smaller` plans, what runs out of memory is undone, and runs again by one of these. PlanMismatchError if
        the model takes another way than it did when it was measured, OtherDataError if it does so because of the data.
        """


class LayerSource:
    """The layers of a nesting of `nn.Sequential`, as they stand."""

    captured = False
    answers = None

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replay = _Replay(model)

    def renewed(self) -> LayerSource:
        return LayerSource(self._model)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The one value that goes into the first layer."""
        if len(arguments) == 1 and not keywords:
            return arguments[0]
        bound = inspect.signature(self._model.forward).bind(*arguments, **keywords)
        (value,) = bound.arguments.values()
        return value

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` is a batch with no more samples. Of other sizes nothing is known: a layer may do anything."""
        return covers(planned, value)

    def measure(
        self,
        value: Any,
        device: torch.device,
        settings: Settings,
        progress: Progress | None,
        rooms: Rooms | None = None,
    ) -> Measured:
        found = cut(self._model, value, device)
        options = _options(self._model, settings, device)
        measurement = measure(found, value, device, loss=settings.loss, progress=progress, **options)
        return Measured([MeasuredCut(found, measurement)], value)

    def follow(self, cut: Cut) -> None:
        """There is one way, and `run` is given it."""

    def same_graph(self, other: Source) -> bool:
        return True

    def adopt(self, plan: Plan) -> Cut:
        return plan.cut(self._model)

    def run(
        self,
        cut: Cut | None,
        sequence: Sequence,
        value: Any,
        *,
        preserve_rng_state: bool,
        smaller: SmallerPlans | None = None,
    ) -> Any:
        assert cut is not None
        for _, layer in cut.prefix:
            value = layer(value)
        runners = [StageRunner(function, name, preserve_rng_state) for name, function in cut.stages]
        return self._replay(runners, sequence, value, smaller)


class GraphSource:
    """The graphs that TorchDynamo captures of any other model. Values are pairs of arguments and keywords."""

    captured = True

    def __init__(self, model: nn.Module, granularity: int, compiler: StageCompiler | None = None) -> None:
        # Not at the top: it imports TorchDynamo, which takes as long as importing the rest of torch.
        from rotor_py.capture.session import CaptureSession

        self._model = model
        self._granularity = granularity
        self._compiler = compiler
        self._session = CaptureSession(model, self._run_stages, granularity)
        self._replay = _Replay(model)
        self._following: tuple[Sequence, bool, SmallerPlans | None] | None = None

    @property
    def answers(self) -> tuple[bool, ...] | None:
        return self._session.answers

    def renewed(self) -> GraphSource:
        return GraphSource(self._model, self._granularity, self._compiler)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return as_entered(self._model, (arguments, keywords))

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether no tensor of `value` is larger in any dimension. Where other sizes change what the model does, Dynamo
        captures another graph, which is noticed.
        """
        return reaches(planned, value)

    def measure(
        self,
        value: Any,
        device: torch.device,
        settings: Settings,
        progress: Progress | None,
        rooms: Rooms | None = None,
    ) -> Measured:
        arguments, keywords = value
        ways, shared = self._session.measure(
            arguments,
            keywords,
            device,
            loss=settings.loss,
            progress=progress,
            compiler=self._compiler,
            room=rooms and (lambda measurement, shared: rooms(measurement, (arguments, keywords, shared))),
            **_options(self._model, settings, device),
        )
        return Measured(ways, (arguments, keywords, shared))

    def follow(self, cut: Cut) -> None:
        self._session.follow(cut)

    def same_graph(self, other: Source) -> bool:
        return isinstance(other, GraphSource) and self._session.same_graph(other._session)

    def adopt(self, plan: Plan) -> None:
        self._session.cut_layers = partial(_cut_as_saved, plan, self._compiler)
        self._session.answers = tuple(plan.answers)

    def run(
        self,
        cut: Cut | None,
        sequence: Sequence,
        value: Any,
        *,
        preserve_rng_state: bool,
        smaller: SmallerPlans | None = None,
    ) -> Any:
        arguments, keywords = value
        # Dynamo calls `_run_stages` in the course of the forward, and hands over nothing of ours.
        self._following = sequence, preserve_rng_state, smaller
        return self._session.run(arguments, keywords, partial(_tell_of_capture, value))

    def _run_stages(self, cut: Cut, value: Any) -> Any:
        """Run the stages of the main graph, for the shapes that TorchDynamo found this time: `cut` is theirs."""
        from rotor_py.capture.graph.graph_stage import in_context

        assert self._following is not None
        sequence, preserve_rng_state, smaller = self._following
        for _, layer in cut.prefix:
            value = layer(value)
        runners, value = in_context(cut.stages, value, preserve_rng_state)
        return self._replay(runners, sequence, value, smaller)


def source_of(model: nn.Module, granularity: int, compile: Config | None = None) -> Source:
    """Layers where the model is a chain of them: they need no capturing, and have names that a user knows.

    Stages to `compile` with these options of Inductor are captured in any case. A layer is code that may do anything
    beside computing its output, and compiled it would do that once; TorchDynamo sees to it that it is done.
    """
    if compile is not None:
        return GraphSource(model, granularity, StageCompiler(compile))
    return LayerSource(model) if is_chain(model) else GraphSource(model, granularity)


def _cut_as_saved(plan: Plan, compiler: StageCompiler | None, layers: list[Layer]) -> Cut:
    found = plan.cut_layers(layers)
    if plan.compiled is None:
        return found
    assert compiler is not None  # `Planner.adopt` sees to it
    return plan.compiled.compiled_again(found, compiler)


def _tell_of_capture(value: Any, seconds: float) -> None:
    before = f", which took {seconds:.1f} s the last time" if seconds else ""
    _log.warning(
        "TorchDynamo captures another graph of the model%s: the input is %s; TORCH_LOGS=recompiles says why",
        before, describe(spec_of(value)),
    )  # fmt: skip


class _Replay:
    """Runs stages by sequences, each of which it reads once while it is in use."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: list[tuple[Sequence, Program]] = []
        """those that were followed last, the latest at the end"""

    def __call__(self, runners: list[StageRunner], sequence: Sequence, value: Any, smaller: SmallerPlans | None) -> Any:
        # Sequences are compared as objects: comparing thousands of operations would take longer than small stages do.
        read = next((each for each in self._read if each[0] is sequence), None)
        if read is None:
            read = sequence, program(len(runners), sequence)
            self._read = [*self._read[1 - _MOST_READ :], read]
        if is_sharded(self._model):
            # FSDP hooks modules and parameters; only the engine's own nodes call these hooks in their order.
            return regions.run(runners, regions.regions(sequence), value)
        if smaller is not None:
            return GuardedTape(runners, read[1], smaller).forward(value)
        return replay(runners, read[1], value)


def _options(model: nn.Module, settings: Settings, device: torch.device) -> dict[str, Any]:
    return {
        "group": meeting_in_stages(model),
        "preserve_rng_state": settings.preserve_rng_state,
        "fresh_gradients": settings.fresh_grads,
        "loss_temp_bytes": settings.loss_tmp_memory_usage,
        "cache": settings.cache,
        "stepped": stepped_parameters(model, settings.step_in_backward),
        "node_seconds": node_seconds() if device.type == "cpu" else 0.0,  # elsewhere the device works meanwhile
    }
