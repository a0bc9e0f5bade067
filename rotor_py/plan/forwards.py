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

from rotor_profiling import tensors_in
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

    def watch(self, output: Any, plan: StepPlan) -> None:
        """A forward by `plan` has returned `output`. It is in flight until its backward begins or its graph is gone."""
        forward = _Forward(self._held_by(plan))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                # The hook belongs to the graph: where the output is dropped, it goes, and the forward with it.
                tensor.register_hook(partial(_begin_backward, forward))
        self._known.append(ref(forward))

    def warn_if_too_many(self, plan: StepPlan, model: TrainedModel) -> None:
        """Log a warning if a forward by `plan`, which is about to begin, does not fit beside those in flight."""
        flying = self._flying()
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

    @property
    def in_flight(self) -> bool:
        """Whether a forward still waits for its backward."""
        return bool(self._flying())

    def _flying(self) -> list[_Forward]:
        found = [forward for each in self._known if (forward := each()) is not None and not forward.used]
        self._known = [ref(each) for each in found]
        return found

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


def _begin_backward(forward: _Forward, gradient: torch.Tensor) -> None:
    forward.used = True
