"""Optimizers that nobody named, because a trainer makes them: they are noticed when they step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotor_profiling import OptimizerCost, UnknownOptimizerError, optimizer_cost, together
from rotor_py.errors import fields_of

_log = logging.getLogger("rotor_py")


class Noticing(Protocol):
    """A model that wants to know what the optimizers cost that train its parameters."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...

    def optimizer_noticed(self) -> None: ...


# Weak on both sides: neither a model nor an optimizer is to live longer because it was noticed.
_seen: WeakKeyDictionary[Noticing, WeakKeyDictionary[torch.optim.Optimizer, OptimizerCost | None]] = WeakKeyDictionary()
"""The models that wait, and the optimizers that have stepped since; None for those that cost them nothing."""
_hooks: list[Any] = []
"""The one hook on all optimizers. It is registered once a model waits: importing this library changes no optimizer."""


def wait_for_optimizers(model: Noticing) -> None:
    """Have `model.optimizer_noticed()` called before the first step of every optimizer that trains it.

    Before it, because the first step makes the optimizer's state, which takes memory.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_about_to_step))
    _seen[model] = WeakKeyDictionary()


def noticed_cost(model: Noticing) -> OptimizerCost | None:
    """What all optimizers cost that have been noticed, and are still there."""
    costs = [cost for cost in _seen.get(model, {}).values() if cost is not None]
    return together(costs) if costs else None


def _about_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    waiting = [(model, seen) for model, seen in _seen.items() if optimizer not in seen]
    if not waiting:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, seen in waiting:
        seen[optimizer] = None  # before anything is found out: each is looked at in its first step only
        if not any(id(parameter) in trained for parameter in model.parameters()):
            continue
        try:
            seen[optimizer] = optimizer_cost(optimizer)
        except UnknownOptimizerError as error:
            _log.warning("%s", error, extra=fields_of(error))
        else:
            model.optimizer_noticed()
