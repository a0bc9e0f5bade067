"""Whether tensors have values, and whether they are equal."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be read: not if it stands for one that would take memory."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit. Of tensors without values, whether they look alike."""
    if has_values(found) and has_values(expected):
        return torch.equal(found, expected)
    return found.shape == expected.shape and found.dtype == expected.dtype
