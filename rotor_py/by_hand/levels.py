"""Checkpointing by level: what is run again in the backward is said by how large a part of the model it is."""

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
"""What a level is about."""


class ActivationCheckpointing(nn.Module):
    """Runs functions, and checkpoints those of a low enough level, in models that are written with levels in them.

    `ActivationCheckpointing(3, level)(block, x)` is `block(x)`; in training mode, if `level` is 3 or more, what `block`
    makes is not kept for the backward but computed again there, from `x`. A `fn_checkpoint_level` of 0 is never
    checkpointed. Levels are nested: at a training level of 3, what is of level 1 inside `block` is checkpointed too.

    `Checkpointable(model, level=3)` does the same for models without levels in them. ValueError for a level that is no
    whole number from 0 to 5.
    """

    def __init__(self, fn_checkpoint_level: int, training_checkpoint_level: int) -> None:
        super().__init__()
        self.fn_checkpoint_level = checked_level(fn_checkpoint_level, "fn_checkpoint_level")
        self.training_checkpoint_level = checked_level(training_checkpoint_level, "training_checkpoint_level")

    @property
    def checkpoints(self) -> bool:
        """Whether functions are checkpointed, as things stand."""
        return self.training and 0 < self.fn_checkpoint_level <= self.training_checkpoint_level

    def forward(self, fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`; `use_reentrant` is torch's, and excludes keyword arguments there."""
        if not self.checkpoints or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=use_reentrant, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.fn_checkpoint_level}, training_checkpoint_level={self.training_checkpoint_level}"


def checked_level(value: object, what: str = "level") -> int:
    """`value`, if it is a level; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        raise ValueError(f"{what} is {value!r}; it has to be a whole number from 0 (nothing) to 5 (whole encoders)")
    return value
