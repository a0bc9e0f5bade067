"""A plan for a model that somebody else holds: the model stays the object that it is, and its forward is replaced.

A trainer keeps its model in several places: its own attribute, the optimizer, DistributedDataParallel, callbacks. A
wrapper would have to be put into each of them. An attribute `forward` of the module is seen by all of them, and names
of parameters, checkpoints and `type(model)` are what they were.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from rotor_profiling.torch_compat import disable_dynamo
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import record_fields

_log = logging.getLogger("rotor_py")
_FORWARD = "forward"


class PlannedForward:
    """The forward of `planned.model` while it is planned: by the plan in training, else the model's own.

    It is an object and no closure: with a copy of the model (averaged weights, for example) comes a copy of this one,
    and so a plan of the copy's own.
    """

    def __init__(self, planned: Checkpointable) -> None:
        self.planned = planned
        self.called = False
        self._planned_now = True
        self._replaced = planned.model.__dict__.get(_FORWARD)
        with suppress(TypeError, ValueError):  # forwards written in C may have no signature
            self.__dict__["__signature__"] = inspect.signature(planned.model.forward)

    # Checkpointable says why it is this one, and not `torch.compiler.disable`.
    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.planned.model
        if args and args[0] is model:  # Accelerate, where it takes its autocast away, makes a method of what was inside
            args = args[1:]
        with self._own_forward(model):
            if not self._planned_now:
                return model.forward(*args, **kwargs)
            self.called = True
            self.planned.training = model.training
            return self.planned.forward(*args, **kwargs)

    def measure(self, sample: Any, *, closely: bool = False) -> None:
        """Measure the model on `sample`, as `Checkpointable.measure` does, while it has this forward."""
        with self._own_forward(self.planned.model):
            self.planned.measure(sample, closely=closely)

    def put(self) -> None:
        """Have the model follow the plan from its next call on."""
        self.planned.model.__dict__[_FORWARD] = self

    def take_away(self) -> None:
        """Have the model's own forward back.

        Accelerate may have put a forward around this one, which it keeps: called from there, it is the model's own.
        """
        self._planned_now = False
        if _forward_in_place(self.planned.model) is self:
            _set_forward(self.planned.model, self._replaced)

    @contextmanager
    def _own_forward(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, the model has the forward that this one replaced: it is what stages are made of."""
        outermost = model.__dict__.get(_FORWARD)
        _set_forward(model, self._replaced)
        try:
            yield
        finally:
            _set_forward(model, outermost)


class InPlace:
    """The plans that a callback or a hook has made, and has to take away in the end.

    `settings` are arguments of `Checkpointable` beside the model and `mem_limit`. ValueError and TypeError as from it.
    """

    def __init__(self, mem_limit: float | str | None, settings: dict[str, Any]) -> None:
        self._mem_limit = mem_limit
        self._settings = settings
        self._put: list[PlannedForward] = []
        # For errors in what was given, before there is a model; a plan and an input are for that model alone.
        anyones = {name: value for name, value in settings.items() if name not in ("plan", "custom_input")}
        Checkpointable(nn.Identity(), mem_limit=mem_limit, **anyones)

    @property
    def called(self) -> bool:
        """Whether everything that is planned has been called."""
        return all(forward.called for forward in self._put)

    def plan(self, model: nn.Module) -> Checkpointable | None:
        """Have `model` follow a plan where it stands, and return what knows the plan.

        None for a model that is planned already, or has a part that is: it keeps its own limit. One that follows a plan
        of this object goes on with it. UnsupportedModelError for a model that cannot be trained from a plan.
        """
        for forward in self._put:
            if forward.planned.model is model:
                return forward.planned
        if any(is_planned(each) for each in model.modules()):
            _log.info(
                "%s, or a part of it, is planned already: it keeps its own limit",
                type(model).__name__,
                extra=record_fields("planned_already", name=type(model).__name__),
            )
            return None
        planned = Checkpointable(model, mem_limit=self._mem_limit, **self._settings)
        self._put.append(PlannedForward(planned))
        self._put[-1].put()
        return planned

    def take_away(self) -> None:
        """Have all models plain again."""
        while self._put:
            self._put.pop().take_away()


def is_planned(module: nn.Module) -> bool:
    """Whether this module follows a plan: it is a `Checkpointable`, or has been planned where it stands."""
    return isinstance(module, Checkpointable) or isinstance(_forward_in_place(module), PlannedForward)


def _forward_in_place(module: nn.Module) -> Any:
    found = module.__dict__.get(_FORWARD)
    return getattr(found, "__func__", found)


def _set_forward(model: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set the attribute as it lies in the module; some classes, such as compiled ones, would send it elsewhere."""
    if forward is None:
        model.__dict__.pop(_FORWARD, None)
    else:
        model.__dict__[_FORWARD] = forward
