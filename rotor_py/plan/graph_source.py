"""Choose the source of a model's stages: its layers, or the graphs that TorchDynamo captures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.compile.stage_code import Config
from rotor_py.distributed.sharding import as_entered, gathers_in_another_dtype
from rotor_py.errors import record_fields
from rotor_py.execute.instructions import Runners
from rotor_py.measure.cut import Cut, Layer, is_chain
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions
from rotor_py.plan.layer_source import LayerSource
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.source import Following, SequenceExecutor, Source
from rotor_py.plan.step_spec import describe, reaches, spec_of

if TYPE_CHECKING:
    from rotor_py.capture.whole_graph import CompileBudget

_log = logging.getLogger("rotor_py")


class GraphSource:
    """Stages from the graphs that TorchDynamo captures. Values are pairs of arguments and keywords."""

    captured = True

    def __init__(self, model: nn.Module, granularity: int, compiler: StageCompiler | None = None) -> None:
        # Imported late: it imports TorchDynamo, which takes as long as the rest of torch.
        from rotor_py.capture.session import CaptureSession

        self._model = model
        self._granularity = granularity
        self._compiler = compiler
        self._session = CaptureSession(model, granularity)
        self._replay = SequenceExecutor(model)

    @property
    def answers(self) -> tuple[bool, ...] | None:
        return self._session.answers

    def renewed(self) -> GraphSource:
        return GraphSource(self._model, self._granularity, self._compiler)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        given = arguments, keywords
        return as_entered(self._model, given) if dist.is_initialized() else given

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether no tensor of `value` is larger in any dimension. Dynamo captures anew if sizes change the graph."""
        return reaches(planned, value)

    def measure(
        self,
        value: Any,
        device: torch.device,
        options: MeasuringOptions,
        room: Callable[[Measurement, Any], CompileBudget] | None,
    ) -> tuple[list[MeasuredCut], Any]:
        arguments, keywords = value
        within = room and (lambda plain, shared: room(plain, (arguments, keywords, shared)))
        ways, shared = self._session.measure(arguments, keywords, device, options, compiler=self._compiler, room=within)
        return ways, (arguments, keywords, shared)

    def follow(self, cut: Cut) -> None:
        self._session.follow(cut)

    def same_graph(self, other: Source) -> bool:
        return isinstance(other, GraphSource) and self._session.same_graph(other._session)

    def adopt(self, plan: Plan) -> None:
        self._session.cut_layers = partial(_cut_as_saved, plan, self._compiler)
        self._session.answers = tuple(plan.answers)

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        arguments, keywords = value
        # Dynamo calls `_run_stages` during the forward.
        by_plan = partial(self._run_stages, how)
        return self._session.run(arguments, keywords, by_plan, partial(_tell_of_capture, value))

    def _run_stages(self, how: Following, cut: Cut, value: Any) -> Any:
        """Run the stages of the main graph; `cut` is for the shapes that TorchDynamo found this time."""
        from rotor_py.capture.graph.graph_stage import runners_of, shared_apart

        for _, layer in cut.prefix:
            value = layer(value)
        value, context = shared_apart(cut.stages, value)

        def make(how: Following) -> Runners:
            return runners_of(cut.stages, how.preserve_rng_state, how.measurement.way_names, how.keepers)

        return self._replay(cut.stages, make, value, how, context)


def _cut_as_saved(plan: Plan, compiler: StageCompiler | None, layers: list[Layer]) -> Cut:
    found = plan.cut_layers(layers)
    if plan.compiled is None:
        return found
    assert compiler is not None  # `Planner.adopt` sees to it
    return plan.compiled.compiled_again(found, compiler, plan.costs.budget.chain, plan.costs.measurement.way_names)


def _tell_of_capture(value: Any) -> None:
    _log.warning(
        "TorchDynamo captures another graph of the model: the input is %s; TORCH_LOGS=recompiles says why",
        describe(spec_of(value)),
        extra=record_fields("captured_again"),
    )


def source_of(model: nn.Module, granularity: int, compile: Config | None = None) -> Source:
    """Return layers for a chain of layers: they need no capturing, and have names that a user knows.

    Stages to `compile` with these options of Inductor are always captured. A layer may have side effects, which
    compiling would run only once; TorchDynamo handles them. Models that `fully_shard` gathers in another dtype are
    captured too: hooks cast the inputs of their layers, and are absent while a layer is measured.
    """
    if compile is not None:
        return GraphSource(model, granularity, StageCompiler(compile))
    as_it_stands = is_chain(model) and not gathers_in_another_dtype(model)
    return LayerSource(model) if as_it_stands else GraphSource(model, granularity)
