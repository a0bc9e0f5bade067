"""The measured graphs of a model, and the loss on its output."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rotor_profiling import (
    Layouts,
    LossCost,
    bytes_like,
    loss_layouts,
    measure_loss,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.isolate import trained_parameters
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.fsdp_markers import TORCH
from rotor_py.measure.cut import Cut
from rotor_py.measure.measurement import Measurement, PrefixCost
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_solver import simulate, store_all
from rotor_solver.watching import Progress


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredGraph:
    """A graph with gradients: its cut, the costs of its stages, and the values that all stages share."""

    graph: CapturedGraph
    cut: Cut
    stages: StageMeasurer
    context: PrefixCost
    loss: LossCost
    shared: tuple[Any, ...]
    # Outputs of the last stage. Weak: measuring must not keep tensors alive.
    returned: tuple[weakref.ref[torch.Tensor], ...]
    # Inputs and outputs of the graph. Weak, too.
    around: tuple[weakref.ref[torch.Tensor], ...] = ()

    @property
    def measurement(self) -> Measurement:
        """The graph as a chain, without anything outside it."""
        return replace(self.stages.measurement(self.loss), prefix=self.context)

    def measured_as(self, cut: Cut, progress: Progress | None = None) -> MeasuredGraph:
        """Measure the same graph with the stages of `cut`. Errors of a stage pass through."""
        stages = self.stages.of(cut)
        stages.walk(progress)
        stages.settle_layouts(())
        return replace(self, cut=cut, stages=stages)

    @property
    def saved_bytes(self) -> int:
        return sum(stage.saved_bytes for stage in self.measurement.stages)


@dataclass(slots=True)
class MeasuredGraphs:
    """All graphs with gradients of a model's forward, in the order in which Dynamo called them."""

    graphs: list[MeasuredGraph] = field(default_factory=list)
    # The model's output.
    output: Any = None
    # Bytes that autograd saves for operators outside all graphs.
    outside_bytes: int = 0
    # Bytes of outputs that the main graph has neither made nor read: the caller holds them through the step.
    returned_bytes: int = 0
    loss: LossCost | None = None
    # Layouts of the gradients that the loss gives to the model's output.
    layouts: Layouts | None = None
    # The main graph compiled, the likely fastest first; empty if nothing is or can be compiled.
    variants: list[MeasuredGraph] = field(default_factory=list)

    def measure_loss(self, loss: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        """Measure the loss on the model's output, and the effect of its gradients' layouts on the main graph."""
        trained_bytes = storage_bytes(tensor for tensor in tensors_in(self.output) if tensor.requires_grad)
        self.loss = measure_loss(loss, self.output, device=device, output_bytes=trained_bytes)
        self.layouts = loss_layouts(loss, self.output, device)
        self.settle(self.main)

    def count_returned(self, known: Iterable[torch.Tensor]) -> None:
        """Count the model's output, except `known` tensors such as parameters and the batch."""
        around = [tensor for each in self.main.around if (tensor := each()) is not None]
        self.returned_bytes = storage_bytes(tensors_in(self.output), owned_elsewhere=storages([*known, *around]))

    def settle(self, graph: MeasuredGraph) -> None:
        """Remeasure the graph, which makes the model's output, for gradients in the layouts that the loss gives."""
        if self.layouts is not None:
            # By id: tensors compare element by element.
            pairs = zip(tensors_in(self.output), self.layouts, strict=True)
            found = {id(tensor): strides for tensor, strides in pairs}
            graph.stages.settle_layouts(tuple(found.get(id(each())) for each in graph.returned))

    @property
    def main(self) -> MeasuredGraph:
        """The planned graph: the one that saves most for its backward."""
        if len(self.graphs) == 1:  # saved bytes take long to add up
            return self.graphs[0]
        return max(self.graphs, key=lambda each: each.saved_bytes)

    @property
    def shared_gradient_bytes(self) -> int:
        """Bytes of gradients of parameters that several graphs use, and that are stepped in the backward."""
        used = Counter(
            key
            for graph in self.graphs
            for key in {id(each) for _, stage in graph.cut.stages for each in trained_parameters(stage)}
        )
        stepped = {
            id(each): each
            for graph in self.graphs
            for _, stage in graph.cut.stages
            for each in graph.stages.stepped.among(trained_parameters(stage))
            if used[id(each)] > 1
        }
        return bytes_like(stepped.values())


# A whole step of which only the main graph is planned.
#
# For a plan, everything between the main graph's forward and its backward is the loss, so later graphs count as part of
# it. Memory that earlier graphs save for their backward stays throughout, and counts as kept by the loss.

# Whether a frame that resumes after a graph break holds its inputs: seen in torch 2.5, not in 2.11 and 2.13.
_FRAMES_HOLD = TORCH < (2, 11)


def whole_step(found: MeasuredGraphs, main: Measurement) -> Measurement:
    """Add to the `main` graph's measurement the needs of other graphs, outside operators and the loss."""
    at = found.graphs.index(found.main)
    before, after = found.graphs[:at], found.graphs[at + 1 :]
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + found.outside_bytes
    output_bytes = main.stages[-1].activation_bytes
    if after and _FRAMES_HOLD:
        kept += output_bytes
    # Graphs go backward one after the other: a gradient that several of them add to waits from one to the next.
    kept += found.shared_gradient_bytes
    for other in after:
        # They run unplanned, which stores everything.
        chain = other.measurement.chain(fresh_gradients=True)
        whole = simulate(chain, store_all(chain))
        seconds, temp = seconds + whole.makespan, temp + whole.peak
        # Made before the main graph's backward, and held through it. The peak includes them already, but not the
        # model's output, which for a chain ends with its backward.
        made = sum(other.measurement.gradient_bytes)
        kept, temp = kept + made, max(0, temp - made)
    kept += found.returned_bytes
    if after:
        # Their peaks include the gradient of the main graph's output, which the solver counts with the loss as well.
        temp = max(0, temp - output_bytes)
    kept += sum(other.saved_bytes for other in before)
    if found.loss is not None:
        seconds, temp = seconds + found.loss.seconds, temp + found.loss.temp_bytes
        kept += found.loss.kept_bytes
    return replace(main, loss=LossCost(seconds, temp, kept))
