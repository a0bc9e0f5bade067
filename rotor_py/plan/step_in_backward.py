"""Step parameters in the backward, each as soon as its gradient is complete.

# Note [Stepping in the backward]
#
#  1. The user's own optimizer steps each parameter. Meanwhile, its only group has the settings of the parameter's group
#     and this one parameter: so state, schedulers and state dict are those of plain training. Only the user's own
#     `optimizer.step()` calls the optimizer's hooks, once in each step.
#  2. Parameters are stepped only in a backward through the output of a planned forward. A hook on the output notes the
#     number of the backward's graph task, and hooks on parameters do nothing in backwards with another number. So
#     backwards of other losses leave gradients in `grad`, as usual. Parameters outside the optimizer keep theirs, too.
#  3. A parameter's hook is called once in a backward, after the backward of all its uses. So no stage that reads the
#     parameter can be recomputed later, unless the stage detaches the parameter. Then the recompute finds a changed
#     parameter and raises an error (`StageChangedError`).
#  4. The user's `optimizer.step()` finds no gradients of these parameters, and only ends the step. A second backward
#     before that call would accumulate gradients, so it raises an error before any parameter is stepped again.
#  5. Between its step and `optimizer.step()`, a parameter's `grad` is a `ConsumedGradient`, which raises when it is
#     read. `zero_grad()` and the next forward remove it, too.

Between backward and optimizer step, a loop may clip, unscale, accumulate or log gradients. If `grad` were None, this
code would silently do nothing. So `grad` is a tensor without storage that raises an error when it is read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from rotor_profiling import torch_compat
from rotor_profiling.optimizer import plain_step
from rotor_py.errors import DescribedError, InvalidStateError
from rotor_py.execute.backward_passes import current_task
from rotor_py.plan.settings import refuse_optimizer
from rotor_py.plan.trained_model import TrainedModel
from rotor_py.stage.saved_tensors import hook_gradients

# Number of the last backward pass that began at a loss scaled by a `GradScaler`; empty before the first such pass.
_last: list[int] = []


@functools.cache
def detect_scaled_losses() -> None:
    """Detect losses scaled by a `GradScaler` from now on."""
    # Patch `scale`: before the backward, which steps the parameters, nothing else shows that there is a scaler.
    scaler: Any = torch.amp.GradScaler
    scale = scaler.scale

    @functools.wraps(scale)
    def scale_and_note(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        if self.is_enabled():
            hook_gradients(found, _note)
        return found

    scaler.scale = scale_and_note


def _note(gradient: torch.Tensor) -> None:
    _last[:] = [current_task()]


class SpentGradientError(DescribedError, RuntimeError):
    """A gradient was read after `step_in_backward` had used and freed it."""


class ConsumedGradient(torch.Tensor):
    """Replaces a gradient with which its parameter was stepped. Takes no memory; raises SpentGradientError if read."""

    __torch_function__ = torch_compat.disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way, untyped

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> ConsumedGradient:
        made: ConsumedGradient = torch_compat.make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]  # torch passes what is never given here
        return f"ConsumedGradient(shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ConsumedGradient:
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has another signature here than in its documentation
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise SpentGradientError(
            f"leave out the code that calls {operator} (clip_grad_norm_, max_grad_norm, a GradScaler, accumulation, "
            "a log), or step_in_backward, which has used this gradient for a step and freed it",
            kind="gradient_spent",
            name=str(operator),
        )


_NO_TASK = -1
_one_at_a_time = threading.Lock()  # a backward on several devices has a thread for each device


class Stepper:
    """Steps the parameters of `model` that are in `optimizer`, in backwards through outputs of planned forwards."""

    def __init__(self, model: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._groups: dict[int, dict[str, Any]] = {}  # the group of each stepped parameter, by the parameter's id
        self._hooked: dict[int, nn.Parameter] = {}
        self._task = _NO_TASK  # number of the last backward pass through the output of a planned forward
        self._stepped_in = _NO_TASK  # number of the pass that stepped parameters since the last `optimizer.step()`
        self._has = self._ids_of_both()  # ids of the model's parameters that were in the optimizer at the last forward
        detect_scaled_losses()
        # Register weak references: the optimizer, which holds the hooks, may outlive this object.
        optimizer.register_step_pre_hook(_weakly(self._about_to_step))
        optimizer.register_step_post_hook(_weakly(self._has_stepped))

    def before_forward(self, *, in_flight: bool) -> bool:
        """Register hooks for a backward that steps. Return whether the optimizer has lost or gained parameters.

        Raises InvalidStateError if other forwards are `in_flight`, or if parameters to step have gradients already.
        """
        refuse_optimizer(self._optimizer)
        if in_flight:
            text = "call backward() and optimizer.step() before the next forward, or leave step_in_backward out"
            raise InvalidStateError(text, kind="forwards_in_flight")
        before, self._has = self._has, self._ids_of_both()
        mine = [each for each in self._model.core.parameters() if id(each) in self._groups and each.requires_grad]
        if any(each.grad is not None for each in mine):
            text = "call optimizer.zero_grad() before the forward; to accumulate gradients, leave step_in_backward out"
            raise InvalidStateError(text, kind="gradients_left")
        for parameter in mine:
            if self._hooked.get(id(parameter)) is not parameter:
                self._hooked[id(parameter)] = parameter
                # Register a weak reference: the parameter, which holds the hook, may outlive this object.
                parameter.register_post_accumulate_grad_hook(_weakly(self._gradient_whole))
        return before != self._has

    def forward_returned(self, output: Any) -> None:
        hook_gradients(output, self._begin)

    def _about_to_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remove consumed gradients before `optimizer.step()`, and after each call of its closure, if it has one."""
        self.remove_consumed()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def called() -> Any:
            found = closure()
            self.remove_consumed()
            return found

        return args[:1], {**kwargs, "closure": called}

    def _has_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepped_in = _NO_TASK

    def _gradient_whole(self, parameter: nn.Parameter) -> None:
        """Step `parameter`, whose gradient is complete, if the backward goes through a planned output."""
        group = self._groups.get(id(parameter))
        if group is None or current_task() != self._task:
            return
        with _one_at_a_time:
            if self._stepped_in not in (_NO_TASK, self._task):
                parameter.grad = None
                text = "call optimizer.step() after each backward; to accumulate gradients, leave step_in_backward out"
                raise InvalidStateError(text, kind="second_backward")
            self._stepped_in = self._task
            optimizer, groups = self._optimizer, self._optimizer.param_groups
            optimizer.param_groups = [{**group, "params": [parameter]}]  # Rule 1: the user's own optimizer
            try:
                plain_step(type(optimizer))(optimizer)
            finally:
                optimizer.param_groups = groups
            parameter.grad = ConsumedGradient(parameter)

    def _begin(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            text = "leave create_graph=True or step_in_backward out: steps change the parameters that the graph reads"
            raise InvalidStateError(text, kind="create_graph")
        if _last == [current_task()]:
            text = "leave out step_in_backward, or the GradScaler (use bfloat16): steps would use scaled gradients"
            raise InvalidStateError(text, kind="scaled_loss")
        self._task = current_task()

    def _ids_of_both(self) -> frozenset[int]:
        # Read again each time: groups may be added, and `load_state_dict` replaces them.
        self._groups = {id(each): group for group in self._optimizer.param_groups for each in group["params"]}
        # Include frozen parameters: `requires_grad` belongs to the kind of step, and may change from step to step.
        return frozenset(key for key in map(id, self._model.core.parameters()) if key in self._groups)

    def remove_consumed(self) -> None:
        for parameter in self._hooked.values():
            if isinstance(parameter.grad, ConsumedGradient):
                parameter.grad = None


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    found = WeakMethod(method)
    return lambda *args: None if (call := found()) is None else call(*args)
