"""Optimizers by name: `adamw`, `adamw-fused`, `sgd-momentum`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_cli.loading.values import optimizer_and_options


def optimizer_called(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """What makes an optimizer of `torch.optim` of parameters, by its name in small letters and a variant of it.

    Failure for a name that torch does not have, or a variant that this optimizer does not take.
    """
    known: dict[str, Any] = {key.lower(): each for key, each in vars(torch.optim).items() if _is_optimizer(each)}
    base, options = optimizer_and_options(name, known, lambda base: inspect.signature(known[base]).parameters)
    return partial(known[base], **options)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
