"""Watch steps: measure memory from a step's first forward to the end of its last backward.

A step begins with our forward, and ends when the backward through its output does. In between, the caller's loss runs.
We regain control when the gradient of the output arrives, and when autograd has released its pass. A forward that
begins while others are in flight joins their step, which ends with the last backward of them all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from rotor_profiling import Phase, StepWatch, optimizer_cost, storage_bytes, tensors_in, torch_compat, watch_step
from rotor_profiling.storage import local
from rotor_py.plan.observers.limit_overrun import account_for, compare_with_prediction, tell_of_several_plans
from rotor_py.plan.observers.observer import PlannedForward
from rotor_py.plan.step_plan import StepPlan
from rotor_py.plan.trained_model import TrainedModel

_MOST_FORWARDS = 256
"""Forwards of one step. A guess, far above a pipeline's microbatches: a step with more may never end, and is not
watched."""


class _Token:
    """Lives as long as a step may go on: the graphs of its outputs hold it, and then the backward passes."""

    __slots__ = ("__weakref__",)


class WatchedStep:
    """One watched step. Phases, in order: each forward and its loss, then each backward and the time after it."""

    def __init__(
        self,
        watch: StepWatch,
        model: TrainedModel,
        plan: StepPlan,
        limit_bytes: int,
        gradients: list[weakref.ref[torch.UntypedStorage]],
    ) -> None:
        self.watch = watch
        self.forwards = 0
        """forwards that have returned"""
        self._model, self._plan, self._sequence, self._limit_bytes = model, plan, plan.sequence, limit_bytes
        self._gradients = gradients
        """gradients that existed when it began"""
        self._token: weakref.ref[_Token] | None = None
        self._most, self._one_plan = 1, True
        self._losses: list[str] = []
        """the phases that follow a forward, until a gradient arrives"""
        self._backwards, self._done = 0, 0
        """gradients that have arrived, and those whose pass is over"""
        self._in_first_pass = 0

    def joined(self, plan: StepPlan, in_flight: int) -> bool:
        """Let a forward by `plan`, with `in_flight` others, join the step; False if it is over, or has no end."""
        if self._token is None or self._token() is None:
            return False
        if self.forwards == _MOST_FORWARDS:
            self._plan.watched = self._sequence  # the next one would not end, either
            return False
        self._most = max(self._most, in_flight)
        self._one_plan = self._one_plan and plan is self._plan
        self.watch.mark(f"forward {self.forwards + 1}")
        return True

    def forward_returned(self, outputs: list[torch.Tensor]) -> None:
        """Register the outputs that need gradients of a forward that has returned."""
        token = None if self._token is None else self._token()
        if token is None:
            if self.forwards:
                return  # its other forwards were dropped while this one ran, so it is over
            token = _Token()
            self._token = weakref.ref(token)
            # The step is over when the last owner releases the token: with its last backward pass, or without one if
            # the outputs were dropped.
            weakref.finalize(token, self._over).atexit = False
        self.forwards += 1
        loss = f"loss {self.forwards}"
        self.watch.mark(loss)
        if not self._backwards:
            self._losses.append(loss)
        owned = [token]
        for tensor in outputs:
            # The hook belongs to the graph: if the output is dropped, the hook goes, and the token with it.
            tensor.register_hook(partial(_gradient_arrived, self, owned))

    def begin_backward(self) -> None:
        """Record that the gradient of an output has arrived."""
        self._backwards += 1
        self.watch.mark(f"backward {self._backwards}")

    def end_backward(self) -> None:
        """Record that the pass of an output's gradient is over."""
        self._done += 1
        self._in_first_pass = self._in_first_pass or self._backwards
        self.watch.mark(f"after {self._done}")

    def _over(self) -> None:
        phases = self.watch.stop()
        # Gradients freed during the step would count on top of the new ones (Rule 4 of the Note in
        # `rotor_profiling/step.py`).
        if phases is None or self._done < self.forwards or any(each() is None for each in self._gradients):
            return
        plan, peak_bytes = self._plan, max(phase.peak for phase in phases.values())
        plan.watched = self._sequence
        if plan.sequence is not self._sequence or self._most > max(1, plan.budget.forwards):
            return  # another sequence was found meanwhile, or will be: extra forwards are detected separately
        if self._one_plan:
            compare_with_prediction(peak_bytes, plan, self._model)
            if plan.prediction_holds is False:
                return  # measured, so there is no prediction to correct
            account_for(self._loss(phases), peak_bytes, self._limit_bytes, plan, self._model)
        elif peak_bytes > self._limit_bytes:
            tell_of_several_plans(peak_bytes, self._limit_bytes, plan, self._model)

    def _loss(self, phases: dict[str, Phase]) -> Phase:
        """Return the phase of one loss. Losses of forwards that go backward together share the last forward's phase."""
        *before, last = (phases[name] for name in self._losses)
        rise = sum(phase.kept for phase in before) + last.rise
        kept = sum(phase.kept for phase in (*before, last))
        alone = max((phase.rise for phase in before), default=0)
        return Phase(0, max(alone, -(-rise // self._in_first_pass)), -(-kept // self._in_first_pass))


def _gradient_arrived(step: WatchedStep, owned: list[_Token], gradient: torch.Tensor) -> None:
    if not owned:  # another output's gradient came first, or this is a second backward
        return
    step.begin_backward()
    # A callback belongs to the pass. It is called while the engine works, where no watch can be stopped (Rule 3 of the
    # Note in `rotor_profiling/step.py`). It is freed with the pass, when the engine returns to its caller.
    torch_compat.queue_callback(partial(_pass_done, step, owned.pop()))


def _pass_done(step: WatchedStep, token: _Token) -> None:
    step.end_backward()


_MOST_OVERRUNS = 1
"""Overruns that are planned for; one more is logged, and later ones add nothing new."""


class WatchedSteps:
    """Watches steps of one model, and accounts for what they show."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._step: weakref.ref[WatchedStep] | None = None
        """the last step; its outputs' graphs keep it and its plan alive"""
        self._watch: StepWatch | None = None
        self._running: WatchedStep | None = None
        self._device: tuple[StepPlan, torch.device] | None = None
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        """outputs of the last watched step"""

    def forward_begins(self, forward: PlannedForward) -> None:
        """Watch the step that a forward begins, unless there is nothing to watch for.

        The forward joins the last step if others are in flight.
        """
        plan, in_flight = forward.plan, forward.in_flight
        step = None if self._step is None or not in_flight else self._step()
        if step is None or not step.joined(plan, in_flight + 1):
            if self._watch is not None:
                self._watch.stop()  # it ended long ago, or its end is unknown
            step = None if in_flight else self._begin(plan, forward.value)
            self._step, self._watch = (None, None) if step is None else (weakref.ref(step), step.watch)
        self._running = step

    def forward_failed(self, forward: PlannedForward) -> None:
        """Stop watching the step."""
        self._running = None
        if self._watch is not None:
            self._watch.stop()

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
        # Every step on CUDA asks for it, and inspecting all parameters would take longer than watching does.
        if self._device is None or self._device[0] is not plan:
            self._device = plan, self._model.device_of(plan.input_spec)
        return self._device[1]

    def _present_bytes(self, plan: StepPlan, value: Any, gradients: list[torch.Tensor], device: torch.device) -> int:
        """Return the bytes that a step on the CPU finds at its begin: no counter has them."""
        core = self._model.core
        present = [*core.parameters(), *core.buffers(), *gradients, *tensors_in(value)]
        # A caller holds the last output until the new one exists. And the first step has no optimizer state yet, but is
        # compared as later steps are.
        outputs = sum(storage.nbytes() for each in self._outputs if (storage := each()) is not None)
        here = storage_bytes(tensor for tensor in present if tensor.device == device)
        if self._model.settings.step_in_backward is not None:
            return here + outputs + optimizer_cost(self._model.settings.step_in_backward).present_bytes
        return here + outputs + plan.budget.fixed.optimizer

    def forward_returned(self, forward: PlannedForward, output: Any) -> None:
        step, self._running = self._running, None
        if step is None:
            return
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._outputs = [*(self._outputs if step.forwards else ()), *_weakly(tensors)]
        step.forward_returned(tensors)


def _weakly(tensors: Iterable[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(local(tensor).untyped_storage()) for tensor in tensors]
