"""What `step_in_backward` does not go together with."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rotor_profiling.optimizer import steps_per_parameter
from rotor_solver import InvalidValueError


class Asked(Protocol):
    """The settings that are looked at."""

    step_in_backward: torch.optim.Optimizer | None
    optimizer: torch.optim.Optimizer | None
    forwards_in_flight: int
    on_oom: str
    process_group: Any


def refuse_beside_step_in_backward(asked: Asked) -> None:
    """ValueError where `step_in_backward` excludes what else is asked for, or is an optimizer that cannot do it."""
    optimizer = asked.step_in_backward
    if optimizer is None:
        return
    if asked.optimizer is not None and asked.optimizer is not optimizer:
        raise InvalidValueError(
            "optimizer and step_in_backward are different optimizers; leave optimizer out",
            kind="excluded_together",
            name="optimizer",
        )
    if asked.forwards_in_flight > 1:
        raise InvalidValueError(
            f"step_in_backward steps parameters in the first backward, and with "
            f"forwards_in_flight={asked.forwards_in_flight} others still need them as they were; leave one of them out",
            kind="excluded_together",
            name="forwards_in_flight",
        )
    if asked.on_oom == "replan":
        raise InvalidValueError(
            "on_oom='replan' runs a backward again, and step_in_backward has stepped parameters in it by then; leave "
            "one of them out",
            kind="excluded_together",
            name="on_oom",
        )
    refuse_optimizer(optimizer)


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """ValueError for an optimizer that is not known to step each parameter by itself."""
    if not steps_per_parameter(optimizer):
        raise InvalidValueError(
            f"{type(optimizer).__name__} is not known to step each parameter by itself, as step_in_backward has to; "
            "use SGD, Adam, AdamW or another such optimizer of torch.optim, or leave step_in_backward out",
            kind="unsupported_optimizer",
            name=type(optimizer).__name__,
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InvalidValueError(
            "step_in_backward takes no gradients of steps; leave differentiable=True out",
            kind="excluded_together",
            name="differentiable",
        )
