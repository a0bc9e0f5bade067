"""Checkpointing by level: a level says how large the parts of a model are that are run again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEVELS = {
    0: "none",
    1: "single layers: linear plus activation, convolution plus dropout",
    2: "small blocks: residual, attention, MLP",
    3: "layers of a transformer, blocks of a decoder",
    4: "groups or stages of layers",
    5: "whole encoders or decoders",
}
"""The parts of a model that a level is about."""


class ActivationCheckpointing(nn.Module):
    """Calls functions, and checkpoints those of a low enough level: for models that are written with levels in them.

    `ActivationCheckpointing(3, level)(block, x)` is `block(x)`. In training mode, if `level` is 3 or more, what `block`
    makes is not kept for the backward but computed again there, from `x`. A function of level 0 is never checkpointed.
    Levels are nested: at a training level of 3, a function of level 1 inside `block` is checkpointed, too.

    `Checkpointable(model, level=3)` does the same for models without levels in them. Raises ValueError for a level that
    is no whole number from 0 to 5.
    """

    def __init__(self, fn_checkpoint_level: int, training_checkpoint_level: int) -> None:
        super().__init__()
        self.fn_checkpoint_level = checked_level(fn_checkpoint_level, "fn_checkpoint_level")
        self.training_checkpoint_level = checked_level(training_checkpoint_level, "training_checkpoint_level")

    @property
    def checkpoints(self) -> bool:
        """Whether functions are checkpointed: in training mode, by the two levels."""
        return self.training and 0 < self.fn_checkpoint_level <= self.training_checkpoint_level

    def forward(self, fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`, checkpointed if its level is low enough.

        `use_reentrant` is that of `torch.utils.checkpoint`, which raises ValueError for keyword arguments with it.
        """
        if not self.checkpoints or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=use_reentrant, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.fn_checkpoint_level}, training_checkpoint_level={self.training_checkpoint_level}"


def checked_level(value: object, what: str = "level") -> int:
    """`value`, if it is a level; raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        raise ValueError(f"{what} is {value!r}; it has to be a whole number from 0 (nothing) to 5 (whole encoders)")
    return value
