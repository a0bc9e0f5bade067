"""Which steps are watched, and from where to where.

A step begins with our forward, and ends when the backward does that goes through its output. In between, the caller's
loss runs. Control comes to us when the gradient of the output arrives, and when autograd has let go of its pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rotor_profiling import StepWatch, storage_bytes, tensors_in, watch_step
from rotor_profiling.storage import local
from rotor_py.plan.noticed.overrun import account_for
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel
from rotor_solver import Sequence

_MOST_OVERRUNS = 1
"""Steps over the limit that are planned for; one more is told of, and then there is nothing new to say."""


@dataclass(slots=True)
class _Step:
    """A step that is watched."""

    watch: StepWatch
    model: TrainedModel
    plan: StepPlan
    sequence: Sequence | None
    limit_bytes: int
    gradients: list[weakref.ref[torch.UntypedStorage]]
    """those that were there when it began"""
    complete: bool = False
    """whether its backward has come to its end"""


class _Token:
    """Lives as long as a step may go on: the graph of its output holds it, and then the backward pass."""

    __slots__ = ("__weakref__",)


class WatchedSteps:
    """Watches steps of one model, and has what they show accounted for."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._watch: StepWatch | None = None
        self._limit_bytes = 0
        self._device: tuple[StepPlan, torch.device] | None = None
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        """of the last step that was watched"""
        self._gradients: list[weakref.ref[torch.UntypedStorage]] = []
        """those that were there when this step began"""

    @contextmanager
    def watched(self, plan: StepPlan, value: Any, *, in_flight: bool) -> Iterator[Callable[[Any], None]]:
        """Watch the step that begins with the forward on `value`, which runs in the context.

        Gives a function to be called with its output. What several forwards `in_flight` take is not one plan's: then,
        nothing is watched.
        """
        if self._watch is not None:
            self._watch.stop()  # it has come to its end long ago, or a second forward has joined the step
        self._watch = None if in_flight else self._begin(plan, value)
        try:
            yield partial(self._forward_returned, plan)
        except BaseException:
            if self._watch is not None:
                self._watch.stop()
            raise

    def _begin(self, plan: StepPlan, value: Any) -> StepWatch | None:
        asked = self._model.settings.watch
        if asked is False or plan.unlimited(self._model.settings) or plan.overruns > _MOST_OVERRUNS:
            return None
        if plan.budget.forwards > 1 or plan.most_in_flight > 1:
            return None  # the next forward would join the step, and what runs between them is no loss
        device, present_bytes = self._device_of(plan), 0
        if device.type == "cpu":
            if plan.watched is plan.sequence and not asked:
                return None
            present_bytes = self._present_bytes(plan, value, device)
        self._limit_bytes = self._model.limit_bytes(device)
        return watch_step(device, present_bytes, self._limit_bytes)

    def _device_of(self, plan: StepPlan) -> torch.device:
        # Every step on CUDA asks for it, and looking at all parameters would take longer than watching does.
        if self._device is None or self._device[0] is not plan:
            self._device = plan, self._model.device_of(plan.input_spec)
        return self._device[1]

    def _present_bytes(self, plan: StepPlan, value: Any, device: torch.device) -> int:
        """What a step on the CPU finds when it begins: nobody counts that."""
        core = self._model.core
        gradients = [parameter.grad for parameter in core.parameters() if parameter.grad is not None]
        self._gradients = _weakly(gradients)
        present = [*core.parameters(), *core.buffers(), *gradients, *tensors_in(value)]
        # A caller holds the last output until the new one is there. And the first step has no optimizer state yet, but
        # is to be seen as those that follow.
        outputs = sum(storage.nbytes() for each in self._outputs if (storage := each()) is not None)
        here = storage_bytes(tensor for tensor in present if tensor.device == device)
        return here + outputs + plan.budget.fixed.optimizer

    def _forward_returned(self, plan: StepPlan, output: Any) -> None:
        watch, tensors = self._watch, [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if watch is None:
            return
        watch.mark("loss")
        self._outputs = _weakly(tensors)
        step = _Step(watch, self._model, plan, plan.sequence, self._limit_bytes, self._gradients)
        token = _Token()
        # When the last owner of the token lets go of it, the step is over: with its backward pass, or without one where
        # the output was dropped.
        weakref.finalize(token, _step_over, step).atexit = False
        owned = [token]
        for tensor in tensors:
            # The hook belongs to the graph: where the output is dropped, it goes, and the token with it.
            tensor.register_hook(partial(_gradient_arrived, step, owned))


def _weakly(tensors: Iterable[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(local(tensor).untyped_storage()) for tensor in tensors]


def _gradient_arrived(step: _Step, owned: list[_Token], gradient: torch.Tensor) -> None:
    if not owned:  # another output's gradient came first, or this is a second backward
        return
    step.watch.mark("backward")
    # A callback belongs to the pass. It is called while the engine works, where no watch can be stopped (Rule 3 of the
    # Note in `rotor_profiling/step_watch.py`). It is freed with the pass, when the engine returns to its caller.
    torch.autograd.Variable._execution_engine.queue_callback(partial(_pass_done, step, owned.pop()))


def _pass_done(step: _Step, token: _Token) -> None:
    step.complete = True
    step.watch.mark("after")


def _step_over(step: _Step) -> None:
    phases = step.watch.stop()
    # Gradients that were freed on the way would count beside the new ones (Rule 4 of the same Note).
    if phases is None or not step.complete or any(each() is None for each in step.gradients):
        return
    step.plan.watched = step.sequence
    if step.plan.sequence is step.sequence:  # else another one was found meanwhile
        peak_bytes = max(phase.peak for phase in phases.values())
        account_for(phases["loss"], peak_bytes, step.limit_bytes, step.plan, step.model)
