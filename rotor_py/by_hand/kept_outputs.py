"""Kept layer outputs that notice when a tensor was overwritten after it was kept."""

from __future__ import annotations

from typing import Any

import torch

from rotor_py.execute.store import ActivationStore

INPUT = -1
"""The index of the network's input: the output of the layer before the first."""


class KeptOutputs(ActivationStore):
    """Outputs by the index of their layer.

    They are not copied: where they are kept in full precision, the next layer works on the same memory. One that works
    in place would change what the backward starts from. Autograd would not notice: to it, no tensor is saved here.
    """

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        super().__init__(storage_dtype)
        self._versions: dict[int, list[int]] = {}

    def keep(self, index: int, value: Any) -> None:
        """Keep the output of a layer, in the place of an earlier one."""
        super().keep(index, value)
        self._versions[index] = self._versions_now(index)

    def adopt(self, index: int, other: ActivationStore, there: int) -> None:
        """Share what `other` keeps at the index `there`: it is in memory once."""
        super().adopt(index, other, there)
        self._versions[index] = self._versions_now(index)

    def refuse_overwritten(self, index: int) -> None:
        """Raises RuntimeError if the output of a layer is no longer what it was when it was kept."""
        if self._versions_now(index) != self._versions[index]:
            what = "the network's input" if index == INPUT else f"the kept output of layer {index}"
            raise RuntimeError(
                f"{what} was overwritten after it was kept; use layer {index + 1} without inplace=True, or give a clone"
            )

    def _versions_now(self, index: int) -> list[int]:
        """How often each tensor's memory was written to; autograd counts that for every tensor."""
        return [tensor._version for tensor in self.held_tensors(index)]
