"""Which steps are watched, and from where to where.

A step begins with our forward, and ends when the backward does that goes through its output. In between, the caller's
loss runs. Control comes to us when the gradient of the output arrives, and when autograd has let go of its pass. A
forward that begins while others are in flight joins their step, which ends with the last backward of them all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from rotor_profiling import StepWatch, optimizer_cost, storage_bytes, tensors_in, watch_step
from rotor_profiling.storage import local
from rotor_py.plan.noticed.watched_step import WatchedStep
from rotor_py.plan.steps.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel

_MOST_OVERRUNS = 1
"""Steps over the limit that are planned for; one more is told of, and then there is nothing new to say."""


class WatchedSteps:
    """Watches steps of one model, and has what they show accounted for."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._step: weakref.ref[WatchedStep] | None = None
        """the last one; its outputs' graphs keep it alive, and the plan that it holds"""
        self._watch: StepWatch | None = None
        """that of the last step"""
        self._device: tuple[StepPlan, torch.device] | None = None
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        """of the last step that was watched"""

    def begin(self, plan: StepPlan, value: Any, *, in_flight: int) -> WatchedStep | None:
        """Watch the step that begins with a forward by `plan` on `value`, or that it joins; None if it is not watched.

        It joins the last step if others are `in_flight`.
        """
        step = None if self._step is None or not in_flight else self._step()
        if step is None or not step.joined(plan, in_flight + 1):
            if self._watch is not None:
                self._watch.stop()  # it has come to its end long ago, or nobody knows where it will
            step = None if in_flight else self._begin(plan, value)
            self._step, self._watch = (None, None) if step is None else (weakref.ref(step), step.watch)
        return step

    def _begin(self, plan: StepPlan, value: Any) -> WatchedStep | None:
        asked = self._model.settings.watch
        if asked is False or plan.unlimited(self._model.settings) or plan.overruns > _MOST_OVERRUNS:
            return None
        device, present_bytes = self._device_of(plan), 0
        gradients: list[weakref.ref[torch.UntypedStorage]] = []
        if device.type == "cpu":
            if plan.watched is plan.sequence and not asked:
                return None
            there = [each.grad for each in self._model.core.parameters() if each.grad is not None]
            present_bytes, gradients = self._present_bytes(plan, value, there, device), _weakly(there)
        limit = self._model.limit_bytes(device)
        watch = watch_step(device, present_bytes, limit)
        return None if watch is None else WatchedStep(watch, self._model, plan, limit, gradients)

    def _device_of(self, plan: StepPlan) -> torch.device:
        # Every step on CUDA asks for it, and looking at all parameters would take longer than watching does.
        if self._device is None or self._device[0] is not plan:
            self._device = plan, self._model.device_of(plan.input_spec)
        return self._device[1]

    def _present_bytes(self, plan: StepPlan, value: Any, gradients: list[torch.Tensor], device: torch.device) -> int:
        """What a step on the CPU finds when it begins: nobody counts that."""
        core = self._model.core
        present = [*core.parameters(), *core.buffers(), *gradients, *tensors_in(value)]
        # A caller holds the last output until the new one is there. And the first step has no optimizer state yet, but
        # is to be seen as those that follow.
        outputs = sum(storage.nbytes() for each in self._outputs if (storage := each()) is not None)
        here = storage_bytes(tensor for tensor in present if tensor.device == device)
        if self._model.settings.step_in_backward is not None:
            return here + outputs + optimizer_cost(self._model.settings.step_in_backward).present_bytes
        return here + outputs + plan.budget.fixed.optimizer

    def forward_returned(self, step: WatchedStep, output: Any) -> None:
        """A forward of this step has returned `output`."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._outputs = [*(self._outputs if step.forwards else ()), *_weakly(tensors)]
        step.forward_returned(tensors)


def _weakly(tensors: Iterable[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(local(tensor).untyped_storage()) for tensor in tensors]
