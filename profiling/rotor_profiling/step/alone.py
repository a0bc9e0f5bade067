"""Optimizers that step one parameter as they step all of them, and what that takes.

Such an optimizer reads and writes nothing but the parameter, its gradient, its own state and the settings of its group.
So stepping the parameters one after the other, in any order, gives the numbers of one step for all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from rotor_profiling.optimizer import OptimizerCost, optimizer_cost

# Of torch.optim. LBFGS is not among them: it looks at all parameters together, and needs a closure. Nor is SparseAdam:
# its cost cannot be found, since its twin would need sparse gradients.
_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is known to step each parameter by itself: one of torch, with the `step` that torch wrote."""
    known = [getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)]  # Muon is new in torch 2.9
    mine = plain_step(type(optimizer))
    return any(isinstance(optimizer, kind) and mine is plain_step(kind) for kind in known)


def plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    """The `step` of an optimizer's class without what `torch.optim` puts around it: hooks, and profilers' label."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def scratch_alone(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Bytes that the step of each trained parameter alone needs, once there is a state; by the parameter's id.

    UnknownOptimizerError if that cannot be found.
    """
    found: dict[int, int] = {}
    known: dict[Any, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            kind = number, tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device
            if kind not in known:
                known[kind] = _cost_of([{**group, "params": [parameter]}], optimizer).step_bytes
            found[id(parameter)] = known[kind]
    return found


def step_bytes_without(optimizer: torch.optim.Optimizer, apart: set[int]) -> int:
    """Bytes that a step of the parameters needs whose ids are not in `apart`. UnknownOptimizerError as above."""
    groups = [
        {**group, "params": [each for each in group["params"] if each.requires_grad and id(each) not in apart]}
        for group in optimizer.param_groups
    ]
    left = [group for group in groups if group["params"]]
    return _cost_of(left, optimizer).step_bytes if left else 0


def _cost_of(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> OptimizerCost:
    alone = copy.copy(optimizer)  # torch's optimizers leave hooks out of a copy
    alone.param_groups = groups
    return optimizer_cost(alone)
