"""One model's graphs through training: the main graph follows the plan, the others run as they are.

Dynamo calls the graphs in the course of the forward. The main graph is the one that keeps most for its backward. It
alone is planned, since a plan is a sequence over one chain of stages. What the others keep is counted beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling import measure_loss
from rotor_py.capture.captured_forward import CapturedForward
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.graph.data_questions import Answers
from rotor_py.capture.measure_graphs import MeasuredGraph, measure_graphs
from rotor_py.capture.whole_step import trained_bytes, with_loss, with_other_graphs
from rotor_py.errors import OtherDataError, PlanMismatchError, UnsupportedModelError
from rotor_py.measure.cut import Cut, Layer, joined
from rotor_py.measure.measurement import Measurement
from rotor_py.stage.graph_effects import recall_effects, remember_effects
from rotor_solver.progress import Progress


class CaptureSession:
    """The graphs of one model. `run_stages(cut, value)` runs the stages of the main one by the plan."""

    def __init__(self, model: nn.Module, run_stages: Callable[[Cut, Any], Any], granularity: int) -> None:
        self.model = model
        self._run_stages = run_stages
        self._forward = CapturedForward(model, granularity)
        self.cut_like: Callable[[list[Layer]], Cut] | None = None
        """Cuts the layers of a graph as the plan's graph was cut; raises PlanMismatchError if the layers differ."""
        self.answers: Answers | None = None
        """How the data of batches answer that the plan is for; None if no plan is known, or none of a graph."""
        self._planned: dict[CapturedGraph, Cut] = {}
        """The stages of the main graph, and of the same graph for other shapes of the input."""
        self._unplanned: set[CapturedGraph] = set()
        self._followed_plan = False
        """Whether the forward that is running, or else the last one, came to a planned graph."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs: they are bound to this model, and a copy captures its own."""
        # One that was made by measuring holds a graph. Any other belongs to a plan from a file, and is kept.
        measured_here = isinstance(self.cut_like, partial)
        cut_like = None if measured_here else self.cut_like
        return {**self.__dict__, "_planned": {}, "_unplanned": set(), "cut_like": cut_like}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward by the plan.

        Raises UnsupportedModelError if Dynamo did not call the main graph, and PlanMismatchError if it captured another
        graph than the plan is for: OtherDataError if that is because of the batch's data. An error of the model itself
        is raised as the model raises it.
        """
        self._followed_plan = False
        output = self._forward.call(args, kwargs, self._run_graph)
        # An error, not a warning: without the plan, the step may have taken more memory than the limit allows.
        if not self._followed_plan:
            raise UnsupportedModelError(
                "TorchDynamo did not hand over the model's graph this time, so the step would not have followed the "
                "plan; TORCH_LOGS=recompiles,graph_breaks says why"
            )
        return output

    def measure(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        *,
        loss: Callable[[Any], torch.Tensor] | None,
        progress: Progress | None,
        **options: Any,
    ) -> tuple[Cut, Measurement, tuple[Any, ...]]:
        """Capture and measure all graphs; nothing of the model is changed.

        Returns the main graph's stages, the measurement of the whole step, and the values that all stages share.
        Raises UnsupportedModelError if no graph has a gradient, or if too much is kept outside all graphs, and
        UnusableLossError if the loss cannot be trained with.
        """
        found = measure_graphs(self._forward, args, kwargs, device, progress=progress, **options)
        main = found.main
        # Without the shared values: they may be as large as an input, and the session outlives the step.
        self.cut_like = partial(_cut_like, replace(main, shared=()))
        self._planned = {main.graph: main.cut}
        self.answers = main.graph.answers
        self._unplanned = {each.graph for each in found.graphs if each is not main}
        measurement = with_other_graphs(found)
        if loss is not None:
            cost = measure_loss(loss, found.output, device=device, output_bytes=trained_bytes(found.output))
            measurement = with_loss(measurement, cost)
        return main.cut, measurement, main.shared

    def _run_graph(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """Run a graph: by the plan if it is the main one, or the same for other shapes."""
        # The model may run a part of itself under `no_grad`, with a graph of its own.
        if graph in self._unplanned or not torch.is_grad_enabled():
            return graph.run_unplanned(arguments)
        graph.split(arguments)
        if not graph.trains:
            return graph.run_unplanned(arguments)
        value, values = graph.enter(arguments)  # first, since it may show that the batch belongs to another graph
        if not self._follows_plan(graph):
            return graph.run_unplanned(arguments)
        self._followed_plan = True
        return graph.leave(self._run_stages(self._planned[graph], value), values)

    def _follows_plan(self, graph: CapturedGraph) -> bool:
        """Whether the plan is for this graph. Dynamo makes a new graph for new shapes, and it is cut as the first was.

        Raises PlanMismatchError for a different graph, unless one before it followed the plan: that one is then the
        main graph, and this one runs beside it.
        """
        if graph in self._planned:
            return True
        assert self.cut_like is not None
        try:
            # Names and shapes may be equal, and bytes are not: one graph has a mask, and the other has none.
            if self.answers is not None and graph.answers != self.answers:
                raise OtherDataError(self.answers, graph.answers)
            self._planned[graph] = replace(self.cut_like(graph.layers), input_owned=True)
        except PlanMismatchError:
            if not self._followed_plan:
                raise
            self._unplanned.add(graph)
            return False
        return True


def _cut_like(main: MeasuredGraph, layers: list[Layer]) -> Cut:
    """Cut the layers of a graph as those of the main graph were cut; PlanMismatchError if they differ."""
    found = dict(layers)
    # By name alone: shapes are what may differ.
    if list(found) != [name for name, _ in main.graph.layers]:
        raise PlanMismatchError(
            "the captured graph", f"{len(main.graph.layers)} pieces", f"{len(found)} pieces, or others"
        )
    stages = tuple(joined([(name, found[name]) for name in group]) for group in main.cut.groups())
    # What measuring found out about a stage also holds for the same stage with other shapes.
    for (_, stage), (_, measured) in zip(stages, main.cut.stages, strict=True):
        remember_effects(stage, recall_effects(measured))
    return Cut(tuple((name, found[name]) for name, _ in main.cut.prefix), stages)
