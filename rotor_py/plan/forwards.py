"""Forwards in flight: those whose backward is still to come while another forward of the model begins.

A plan is for one forward and its backward. What earlier forwards of a step hold comes on top of it: where losses are
added up, in siamese networks, for a discriminator on real and fake, for the microbatches of a pipeline.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge

from rotor_profiling import tensors_in
from rotor_py.execute.graph_task import goes_through, retains_graph
from rotor_py.plan.description import memory_of
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.units import format_bytes

_log = logging.getLogger("rotor_py")


class _Forward:
    """One forward, as long as somebody can still go backward through it. Its graph keeps it alive, and nothing else."""

    __slots__ = ("__weakref__", "held_bytes", "used")

    def __init__(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        self.used = False


class Forwards:
    """The forwards of one model that are in flight."""

    def __init__(self) -> None:
        self._known: list[ref[_Forward]] = []
        self._held: tuple[StepPlan, object, int] | None = None
        self._warned = 0
        """the most forwards at once that were warned of"""
        self._knows_split = False
        """whether a backward for inputs alone has come, with another to follow for parameters"""

    def watch(self, output: Any, plan: StepPlan, model: TrainedModel) -> None:
        """A forward by `plan` has returned `output`. It is in flight until its backward begins or its graph is gone."""
        forward = _Forward(self._held_by(plan))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                # The hook belongs to the graph: where the output is dropped, it goes, and the forward with it.
                tensor.register_hook(partial(self._begin_backward, forward, plan, model))
        self._known.append(ref(forward))

    def _begin_backward(self, forward: _Forward, plan: StepPlan, model: TrainedModel, gradient: torch.Tensor) -> None:
        forward.used = not retains_graph()  # with the graph, all that it holds stays
        if not (forward.used or self._knows_split) and _is_for_inputs_alone(model):
            self._knows_split = True
            self._warn_of_split_backwards(forward, plan, model)

    def _warn_of_split_backwards(self, forward: _Forward, plan: StepPlan, model: TrainedModel) -> None:
        """Log a warning if the limit has no room for what is held from a backward for inputs to one for parameters."""
        if plan.unlimited(model.settings):
            return
        assert plan.sequence is not None
        limit, peak = model.limit_bytes(model.device_of(plan.input_spec)), plan.budget.peak_bytes(plan.sequence)
        between = sum(plan.budget.chain.activation[1:])  # a gradient for the output of each stage
        if peak + forward.held_bytes + between <= limit:
            return
        _log.warning(
            "%s has one backward for inputs and a later one for weights (a zero-bubble schedule). Until the later one, "
            "what the forward kept stays, %s (%d bytes), and so does a gradient for every stage, up to %s (%d bytes): "
            "the step may need %s (%d bytes), and the limit is %s (%d bytes). Pass "
            "dw_builder=rotor_py.distributed.pipelining.whole_backward to PipelineStage: then nothing is held.",
            type(model.core).__name__, format_bytes(forward.held_bytes), forward.held_bytes, format_bytes(between),
            between, format_bytes(peak + forward.held_bytes + between), peak + forward.held_bytes + between,
            format_bytes(limit), limit,
        )  # fmt: skip

    def warn_if_too_many(self, plan: StepPlan, model: TrainedModel) -> None:
        """Log a warning if a forward by `plan`, which is about to begin, does not fit beside those in flight."""
        flying = [found for each in self._known if (found := each()) is not None and not found.used]
        self._known = [ref(each) for each in flying]
        if not flying or len(flying) < self._warned or plan.unlimited(model.settings):
            return
        assert plan.sequence is not None
        limit = model.limit_bytes(model.device_of(plan.input_spec))
        held = sum(each.held_bytes for each in flying)
        peak = held + plan.budget.peak_bytes(plan.sequence)
        if peak <= limit:
            return
        self._warned = len(flying) + 1
        _log.warning(
            "%d forwards of %s are in flight at once. Those before this one hold %s (%d bytes) until their backwards, "
            "so the step takes up to %s (%d bytes); the limit is %s (%d bytes). Call backward() after each forward: "
            "the gradients add up to the same. Or set a smaller mem_limit, so that each forward holds less.",
            len(flying) + 1, type(model.core).__name__, format_bytes(held), held, format_bytes(peak), peak,
            format_bytes(limit), limit,
        )  # fmt: skip

    def _held_by(self, plan: StepPlan) -> int:
        """Bytes that a forward by `plan` leaves until its backward, its input and output included.

        And the gradient of its output: the backward of a sum of losses makes those of all outputs before it goes on.
        """
        if self._held is None or self._held[0] is not plan or self._held[1] is not plan.sequence:
            kept = memory_of(plan)
            output_bytes = plan.budget.chain.activation[-1]
            given = kept.input_bytes + plan.budget.fixed.batch  # a captured model's input is no part of its chain
            self._held = plan, plan.sequence, kept.kept_bytes + given + kept.beside_bytes + output_bytes
        return self._held[2]


def _is_for_inputs_alone(model: TrainedModel) -> bool:
    """Whether the backward that is running goes through none of the model's parameters."""
    trained = [parameter for parameter in model.core.parameters() if parameter.requires_grad]
    with torch.enable_grad():  # older releases of torch find the edge of a leaf by making a view of it
        return bool(trained) and not any(goes_through(get_gradient_edge(each).node) for each in trained)
