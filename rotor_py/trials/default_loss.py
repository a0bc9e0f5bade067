"""The loss of a model for which none is given."""

from __future__ import annotations

from typing import Any

import torch

from rotor_profiling import tensors_in
from rotor_py.errors import UnsupportedModelError


def default_loss(output: Any) -> torch.Tensor:
    """The model's own loss (`output.loss`, `output["loss"]`) if it returns one, else the mean of squares of its output.

    If the output has several tensors, it is the sum of their means. UnsupportedModelError if no tensor of the output
    needs a gradient.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own
    parts = [tensor.square().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        raise UnsupportedModelError(
            "the model's output does not depend on anything that needs a gradient, so there is nothing to train",
            kind="no_gradient",
        )
    return sum(parts[1:], parts[0])
