"""Turn a user's sample into the arguments of one forward."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from rotor_py.errors import UnsupportedModelError


class ForwardArguments(NamedTuple):
    """Positional and keyword arguments of a forward, as one sample that has both."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(sample: Any, model: nn.Module) -> ForwardArguments:
    """Return the positional and keyword arguments that a sample stands for.

    A sample is a tensor, a tuple of positional arguments, a dict of keyword arguments, both as `ForwardArguments`, or a
    `DataLoader`, whose first batch is taken without drawing a random number. Raises UnsupportedModelError for a text or
    a number, and for more items than the forward of `model` takes.
    """
    if isinstance(sample, ForwardArguments):  # before tuples: it is one
        return sample
    if isinstance(sample, DataLoader):
        sample = _first_batch(sample)
    if isinstance(sample, str | int | float):
        raise UnsupportedModelError(
            f"the sample is {sample!r}, and has to be an input to measure with: a tensor, a tuple or a dict; a limit "
            f"is written mem_limit={sample!r}",
            kind="not_a_sample",
            name="custom_input",
        )
    if isinstance(sample, dict):
        return ForwardArguments((), sample)
    arguments = sample if isinstance(sample, tuple) else (sample,)
    _refuse_too_many(arguments, model)
    return ForwardArguments(arguments, {})


def _first_batch(loader: DataLoader[Any]) -> Any:
    with torch.random.fork_rng(devices=[]):  # the loader draws a seed for its workers
        batch = next(iter(loader), None)
    if batch is None:
        raise UnsupportedModelError(
            "the sample is a DataLoader without a batch; its dataset is empty", kind="empty_loader", name="custom_input"
        )
    return tuple(batch) if isinstance(batch, list) else batch


def _refuse_too_many(arguments: tuple[Any, ...], model: nn.Module) -> None:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (ValueError, TypeError):  # some callables have none
        return
    takes = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    if len(arguments) > takes and not any(each.kind == each.VAR_POSITIONAL for each in parameters):
        raise UnsupportedModelError(
            f"the sample has {len(arguments)} items and the forward of {type(model).__name__} takes {takes}: drop the "
            "targets, and use them in `loss`",
            kind="too_many_arguments",
            name="custom_input",
            got=len(arguments),
        )
