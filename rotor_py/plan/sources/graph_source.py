"""Cut and run models that are no chain of layers, by the graphs that TorchDynamo captures."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.distributed.sharding import as_entered
from rotor_py.errors import record_fields
from rotor_py.execute.instructions import Runners
from rotor_py.measure.cut import Cut, Layer
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.sources.running import SequenceExecutor, measuring_options
from rotor_py.plan.sources.source import Following, Measured, Measuring, Source
from rotor_py.plan.step_spec import describe, reaches, spec_of

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

    def measure(self, value: Any, how: Measuring) -> Measured:
        arguments, keywords = value
        rooms = how.rooms
        ways, shared = self._session.measure(
            arguments,
            keywords,
            how.device,
            measuring_options(self._model, how),
            compiler=self._compiler,
            room=rooms and (lambda measurement, shared: rooms(measurement, (arguments, keywords, shared))),
        )
        return Measured(ways, (arguments, keywords, shared))

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
            return runners_of(cut.stages, how.preserve_rng_state, how.ways, how.keepers)

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
