"""The backend of `torch.compile(model, backend="rotor", options={"mem_limit": "4GB"})`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup

from rotor_profiling import tensors_in
from rotor_profiling.isolate import main_device
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.variants import CompileBudget, MeasuredGraph, compiled_variants
from rotor_py.compile.compiled_stage import StageCompiler
from rotor_py.distributed.processes import around
from rotor_py.errors import InvalidValueError
from rotor_py.measure.cut import cut_layers
from rotor_py.measure.planning_lock import planning
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions, StageMeasurer, unmeasured_loss
from rotor_py.plan.observers.forwards_in_flight import Forwards, make_room_for_forwards
from rotor_py.plan.settings import Settings
from rotor_py.plan.solving import solve
from rotor_py.plan.source import Following, LayerSource, SequenceExecutor
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.step_spec import reaches, spec_of
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import parse_bytes

_OPTIONS = (
    "mem_limit", "mem_slots", "fresh_grads", "forwards_in_flight", "granularity", "preserve_rng_state", "compile"
)  # fmt: skip


def rotor(
    graph_module: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a function that runs `graph_module` by a plan inside a memory limit: a backend of TorchDynamo.

    The first call of this function makes the plan, for this graph alone. If Dynamo breaks the model into several
    graphs, use `Checkpointable`, which counts the memory of all of them. `options` may hold these arguments of
    `Checkpointable`, with the same defaults: `mem_limit`, `mem_slots`, `fresh_grads`, `forwards_in_flight`,
    `granularity`, `preserve_rng_state` and `compile`.

    Raises ValueError for an unknown option, an invalid `mem_limit` or `compile`, and `forwards_in_flight` < 1. The
    first call raises InfeasibleError (a ValueError) if no plan fits, UnsupportedModelError if the graph cannot be cut.
    """
    chosen = options or {}
    if unknown := sorted(chosen.keys() - set(_OPTIONS)):
        message = f"an option of the backend rotor must be one of {', '.join(_OPTIONS)}, got {unknown[0]!r}"
        raise InvalidValueError(message, kind="unknown_option", name=unknown[0])
    settings = Settings(**chosen)
    if settings.mem_limit is not None:
        # Refuse text that is no limit now. The first call parses the limit again, when the device is known.
        parse_bytes(settings.mem_limit, device_bytes=2**40)
    # Dynamo passes no model, so the ids of its buffers are unknown: the names of placeholders show which are buffers.
    return GraphPlanner(CapturedGraph(graph_module, frozenset(), settings.granularity), settings)


class CompiledModel(nn.ModuleList):
    """The layers of a graph, as a module: the only part of the model that the backend knows."""


class PlannedGraph(TrainedModel):
    """The graph as a `TrainedModel`. With DistributedDataParallel, each process plans for its own batch."""

    @property
    def group(self) -> ProcessGroup | None:
        return None if around(self.whole) is not None else super().group


class GraphPlanner:
    """Runs one graph by a plan, made at the first call with gradients, and anew for an input that it does not cover."""

    def __init__(self, graph: CapturedGraph, settings: Settings) -> None:
        self.graph = graph
        self.settings = settings
        # the last plan, with the spec of the input that it was made for: it serves inputs that are no larger
        self._planned: tuple[StepPlan, PlannedGraph, Any] | None = None
        self._forwards = Forwards()
        self._compiler = None if settings.inductor is None else StageCompiler(settings.inductor)
        self._executor = SequenceExecutor(graph.graph_module)

    def __call__(self, *arguments: Any) -> list[Any]:
        graph = self.graph
        if not torch.is_grad_enabled():
            return graph.run_unplanned(arguments)
        graph.split(arguments)
        if not graph.trains:
            return graph.run_unplanned(arguments)
        value, values = graph.enter(arguments)
        if self._planned is None or not reaches(self._planned[2], value):
            with planning:
                self._planned = self._plan(value, arguments)
        (plan, model, _), flying = self._planned, self._forwards.in_flight()
        if not flying:
            make_room_for_forwards(plan, model)
        assert plan.cut is not None
        sequence = self._forwards.sequence_beside(flying, plan, model)
        settings, costs = self.settings, plan.budget.chain
        how = Following(sequence, settings.preserve_rng_state, plan.measurement, settings.keepers, chain=costs)
        made = self._executor.execute_graph(how, plan.cut, value)
        self._forwards.forward_returned(plan, sequence, model, made)
        return graph.leave(made, values)

    def _plan(self, value: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[StepPlan, PlannedGraph, Any]:
        graph, settings = self.graph, self.settings
        tensors = tensors_in(arguments)
        device = main_device(tensors)
        # The function's caller refers to the graph's inputs during the whole call, so no plan can free them.
        cut = replace(cut_layers(graph.layers, value, device), input_owned=True)
        stages = StageMeasurer(
            cut,
            value,
            device,
            MeasuringOptions(settings.preserve_rng_state, settings.fresh_grads, keepers=settings.keepers),
            silent=graph.silent,
        )
        stages.walk()
        context, loss = graph.context_cost(arguments, device), unmeasured_loss(device, 0)
        plain = MeasuredGraph(graph, cut, stages, context, loss, value, ())
        # The graph has neither the optimizer nor parameters that the model does not use, so the budget omits both.
        whole = CompiledModel(module for _, module in graph.layers)
        model = PlannedGraph(whole, whole, settings)
        sample = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        budget = model.budget(plain.measurement, (sample, value), device)
        room = CompileBudget(budget, model.limit_bytes(device), settings.fresh_grads)
        variants = [] if self._compiler is None else compiled_variants(plain, self._compiler, room=room)
        ways = tuple(MeasuredCut(each.cut, each.measurement) for each in (*variants, plain))
        plan = StepPlan(LayerSource(whole), plain.measurement, budget, spec=None, cut=cut, ways=ways)
        if self._planned is not None:
            before = self._planned[0]
            plan.most_in_flight = before.most_in_flight
            plan.in_reverse, plan.in_other_order = before.in_reverse, before.in_other_order
        solve(plan, model)
        self._executor = SequenceExecutor(graph.graph_module)  # the old one caches runners for the old plan
        return plan, model, spec_of(value)
