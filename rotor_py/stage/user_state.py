"""Run the user's model, loss and optimizer without lasting changes to what their code refers to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from rotor_profiling.optimizer import plain_step, with_inner
from rotor_py.stage.named_state import locations_at, locations_beside, locations_in, locations_of, named_state_kept
from rotor_py.stage.replayed_routing import streams_kept


@contextmanager
def user_state_kept(model: nn.Module, value: Any, *others: Any) -> Iterator[None]:
    """On exit, restore random streams, objects in the input `value`, and what code of the model and of `others` names.

    `others`: optimizers, and functions such as a loss, whose modules are restored, too, except those of the model.
    """
    pairs = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in model.parameters()]
    hooks = [hook for pair in pairs for table in pair for hook in (table or {}).values()]
    optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
    codes = [each for each in (*others, *hooks) if each is not None and each not in optimizers]
    own = set(model.modules())
    locations = [*locations_of(model), *(() if isinstance(value, DataLoader) else locations_in(value))]
    locations += [location for each in codes for location in locations_beside(each, own)]
    with ExitStack() as stack:
        for each in (model, *codes):
            stack.enter_context(streams_kept(each, value))
        for each in optimizers:
            stack.enter_context(optimizer_kept(each))
        stack.enter_context(named_state_kept(locations))
        yield


@contextmanager
def optimizer_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """On exit, restore what steps of the optimizer may change, also in its hooks, except parameters and its state."""
    known = with_inner(optimizer)
    tables = [table for each in known for table in vars(each).values() if isinstance(table, dict)]
    codes = [hook for table in tables for hook in table.values() if callable(hook)]
    codes += [code for each in known for code in (plain_step(type(each)), type(each))]
    locations = locations_at([vars(each) for each in known])
    locations += [location for code in codes for location in locations_beside(code, ())]
    with ExitStack() as stack:
        for code in codes:
            stack.enter_context(streams_kept(code, [vars(each) for each in known]))
        stack.enter_context(named_state_kept(locations, but=[each.state for each in known]))
        yield
