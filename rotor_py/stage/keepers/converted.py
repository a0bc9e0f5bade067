"""A tensor that is kept in another dtype: integers in a narrower one, or floating numbers that are rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Converted:
    """The `values` of a tensor whose own dtype is `dtype`."""

    values: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes in which it is kept."""
        return self.values.nbytes

    def tensor(self) -> torch.Tensor:
        """A tensor of these values in its own dtype."""
        return self.values.to(self.dtype)
