"""How an `ActivationCheckpointer` keeps activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Keep the outputs of the layers 0, n, 2n, … for n = `checkpoint_every_n_layers`; of none for n = 0.

    At most `max_checkpoints` are kept. With `use_mixed_precision`, floating activations are kept in `storage_dtype`,
    bfloat16 or float16, and come back, rounded, in their own dtype. Raises ValueError for numbers that are no whole
    numbers, zero or more, for a `use_mixed_precision` that is no bool, and for any other `storage_dtype`.
    """

    checkpoint_every_n_layers: int = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False
    storage_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        whole_number(self.checkpoint_every_n_layers, "checkpoint_every_n_layers")
        whole_number(self.max_checkpoints, "max_checkpoints")
        if not isinstance(self.use_mixed_precision, bool):
            raise ValueError(f"use_mixed_precision is {self.use_mixed_precision!r}; it has to be True or False")
        if self.storage_dtype not in _HALVES:
            raise ValueError(f"storage_dtype is {self.storage_dtype!r}; it has to be torch.bfloat16 or torch.float16")

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """The dtype in which wider activations are kept; None if they are kept as they are."""
        return self.storage_dtype if self.use_mixed_precision else None


def whole_number(value: object, what: str) -> int:
    """`value`, if it is a whole number, zero or more; raises ValueError otherwise.

    True and False are whole numbers to Python, and mistakes here.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is {value!r}; it has to be a whole number, zero or more")
    return value
