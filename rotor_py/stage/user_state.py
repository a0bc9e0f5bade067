"""Run the user's model, loss and optimizer without lasting changes to what their code refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from rotor_profiling.optimizer import plain_step, with_inner
from rotor_py.stage.named_state import locations_at, locations_beside, locations_in, locations_of, named_state_kept
from rotor_py.stage.replayed_routing import streams_kept


@contextmanager
def user_state_kept(model: nn.Module, value: Any, *others: Callable[..., Any] | None) -> Iterator[None]:
    """On exit, restore random streams, objects in the input `value`, and what the code of the model names.

    Also restores what hooks of parameters and the functions `others` (a loss, say) name, and modules in these, except
    those of the model, which `isolated` and the like restore.
    """
    pairs = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in model.parameters()]
    hooks = [hook for pair in pairs for table in pair for hook in (table or {}).values()]
    codes = [each for each in (*others, *hooks) if each is not None]
    own = set(model.modules())
    locations = [*locations_of(model), *(() if isinstance(value, DataLoader) else locations_in(value))]
    locations += [location for each in codes for location in locations_beside(each, own)]
    with ExitStack() as stack:
        for each in (model, *codes):
            stack.enter_context(streams_kept(each, value))
        stack.enter_context(named_state_kept(locations))
        yield


@contextmanager
def step_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """On exit, restore random streams, and what the code of the optimizer names, such as a counter in its class."""
    step, kind = plain_step(type(optimizer)), type(optimizer)
    with streams_kept(step, vars(optimizer)), named_state_kept([*locations_of(step), *locations_of(kind)]):
        yield


@contextmanager
def optimizer_kept(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """On exit, restore what steps of the optimizer may change, also in its hooks, except parameters and its state."""
    known = [] if optimizer is None else with_inner(optimizer)
    tables = [table for each in known for table in vars(each).values() if isinstance(table, dict)]
    hooks = [hook for table in tables for hook in table.values() if callable(hook)]
    locations = [location for hook in hooks for location in locations_beside(hook, ())]
    with ExitStack() as stack:
        for each in known:
            stack.enter_context(step_kept(each))
        fields = locations_at([vars(each) for each in known])
        stack.enter_context(named_state_kept([*locations, *fields], but=[each.state for each in known]))
        yield
