"""Optimizers by name: `adamw`, `adamw-fused`, `sgd-momentum`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_cli.errors import usage

_VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
    "momentum": {"momentum": 0.9},
}


def optimizer_called(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """What makes an optimizer of `torch.optim` of parameters, by its name in small letters and a variant of it.

    Failure for a name that torch does not have, or a variant that this optimizer does not take.
    """
    known: dict[str, Any] = {key.lower(): each for key, each in vars(torch.optim).items() if _is_optimizer(each)}
    base, _, variant = name.lower().partition("-")
    if base not in known:
        near = get_close_matches(base, known, n=3) or ["adamw", "sgd", "adafactor"]
        raise usage(f"--optimizer {name!r} is none of torch.optim; did you mean {' or '.join(near)}?")
    made: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = known[base]
    if not variant:
        return made
    options = _VARIANTS.get(variant)
    takes = inspect.signature(known[base]).parameters
    if options is None or not options.keys() <= takes.keys():
        there = [f"{base}-{key}" for key, each in _VARIANTS.items() if each.keys() <= takes.keys()]
        raise usage(f"--optimizer {name!r}: there is no such variant; there is {', '.join((base, *there))}")
    return partial(made, **options)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
