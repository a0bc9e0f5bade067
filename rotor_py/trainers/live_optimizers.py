"""The optimizers that a program has made, found without its help."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch
from torch import nn

from rotor_profiling import UnknownOptimizerError, optimizer_cost


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether this one trains any parameter of the model."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return any(id(each) in trained for each in model.parameters())


def is_trained(model: nn.Module) -> bool:
    """Whether any optimizer of the program trains it."""
    return any(trains(each, model) for each in _optimizers())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """The one optimizer that trains it; None where there are several, or none yet, or one of an unknown kind.

    These are noticed when they step.
    """
    found = [each for each in _optimizers() if trains(each, model)]
    if len(found) != 1:
        return None
    with suppress(UnknownOptimizerError):
        optimizer_cost(found[0])
        return found[0]
    return None


def _optimizers() -> list[torch.optim.Optimizer]:
    """All that there are, without those of Accelerate, which stand around others."""
    # By its type: `isinstance` asks objects for their class, and some answer by importing a library. At once: among all
    # objects are tuples that are being made meanwhile, and nobody may hold these.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [each for each in found if "param_groups" in each.__dict__]
