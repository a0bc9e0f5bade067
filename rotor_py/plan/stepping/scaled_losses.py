"""Losses that a `GradScaler` has scaled: their gradients are no gradients to step with until it has unscaled them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_py.execute.graph_task import current_task

_last: list[int] = []
"""The last backward pass that began at a scaled loss; nothing before the first."""


def begins_at_scaled_loss() -> bool:
    """Whether the backward pass that runs now began at a loss that a `GradScaler` has scaled."""
    return _last == [current_task()]


@functools.cache
def notice_scalers() -> None:
    """Have scaled losses noticed from now on."""
    # A scaler shows nowhere else before the backward, and after it the parameters have been stepped.
    scaler: Any = torch.amp.GradScaler
    scale = scaler.scale

    @functools.wraps(scale)
    def noticed(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        for tensor in tensors_in(found):
            if self.is_enabled() and tensor.requires_grad:
                tensor.register_hook(_note)
        return found

    scaler.scale = noticed


def _note(gradient: torch.Tensor) -> None:
    _last[:] = [current_task()]
