"""Plan a model in place: the module object stays, and its forward is replaced.

A trainer refers to its model in several places: its attributes, DistributedDataParallel, callbacks. All of them call
the new `forward`, while a wrapper module would have to be put into each. Parameter names, checkpoint files and
`type(model)` do not change.
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


class InPlaceForward:
    """Forward that `put` gives to `planned.model`, until `take_away`; it calls the `Checkpointable` `planned`.

    An object, not a closure, so that `copy.deepcopy(model)`, as for averaged weights, copies the plan, too.
    """

    def __init__(self, planned: Checkpointable) -> None:
        self.planned = planned
        self.called = False
        self._planned_now = True
        self._replaced = planned.model.__dict__.get(_FORWARD)
        with suppress(TypeError, ValueError):  # forwards in C may have no signature
            self.__dict__["__signature__"] = inspect.signature(planned.model.forward)

    # Not `torch.compiler.disable`, for the reason given in `checkpointable.py`.
    @disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.planned.model
        if args and args[0] is model:  # Accelerate, when it removes its autocast, makes this object the model's method
            args = args[1:]
        with self._own_forward(model):
            if not self._planned_now:
                return model.forward(*args, **kwargs)
            self.called = True
            self.planned.training = model.training
            return self.planned.forward(*args, **kwargs)

    def measure(self, sample: Any, *, closely: bool = False) -> None:
        with self._own_forward(self.planned.model):
            self.planned.measure(sample, closely=closely)

    def put(self) -> None:
        self.planned.model.__dict__[_FORWARD] = self

    def take_away(self) -> None:
        """Restore the model's own forward; if Accelerate has wrapped this object, only stop following the plan."""
        self._planned_now = False
        if _forward_in_place(self.planned.model) is self:
            _set_forward(self.planned.model, self._replaced)

    @contextmanager
    def _own_forward(self, model: nn.Module) -> Iterator[None]:
        """Within the context, the model has its own forward, which measuring and capturing stages have to call."""
        outermost = model.__dict__.get(_FORWARD)
        _set_forward(model, self._replaced)
        try:
            yield
        finally:
            _set_forward(model, outermost)


class InPlace:
    """Models that a callback or hook plans in place; `take_away` restores their own forwards.

    `settings` are other arguments of `Checkpointable`. Raises ValueError or TypeError for invalid ones.
    """

    def __init__(self, mem_limit: float | str | None, settings: dict[str, Any]) -> None:
        self._mem_limit = mem_limit
        self._settings = settings
        self._put: list[InPlaceForward] = []
        # Validate the arguments before there is a model, except `plan` and `custom_input`, which fit one model only.
        general = {name: value for name, value in settings.items() if name not in ("plan", "custom_input")}
        Checkpointable(nn.Identity(), mem_limit=mem_limit, **general)

    @property
    def called(self) -> bool:
        return all(forward.called for forward in self._put)

    def plan(self, model: nn.Module) -> Checkpointable | None:
        """Plan `model` in place and return its `Checkpointable`.

        A model that this object has planned before keeps that plan. Returns None if `model` or a part of it follows
        another plan, which keeps its own limit. Raises UnsupportedModelError for a model that cannot be planned.
        """
        for forward in self._put:
            if forward.planned.model is model:
                return forward.planned
        if any(is_planned(each) for each in model.modules()):
            name, said = type(model).__name__, "%s, or a part of it, is planned already: it keeps its own limit"
            _log.info(said, name, extra=record_fields("planned_already", name=name))
            return None
        planned = Checkpointable(model, mem_limit=self._mem_limit, **self._settings)
        self._put.append(InPlaceForward(planned))
        self._put[-1].put()
        return planned

    def take_away(self) -> None:
        while self._put:
            self._put.pop().take_away()


def is_planned(module: nn.Module) -> bool:
    """Whether a module follows a plan: a `Checkpointable`, or planned in place."""
    return isinstance(module, Checkpointable) or isinstance(_forward_in_place(module), InPlaceForward)


def _forward_in_place(module: nn.Module) -> Any:
    found = module.__dict__.get(_FORWARD)
    return getattr(found, "__func__", found)


def _set_forward(model: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set `forward` in the module's own `__dict__`: `setattr` on a compiled module would set it on the inner module."""
    if forward is None:
        model.__dict__.pop(_FORWARD, None)
    else:
        model.__dict__[_FORWARD] = forward
