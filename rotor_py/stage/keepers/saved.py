"""What autograd holds in the place of a tensor that a stage saves: the tensor itself, or what is kept of it.

Rules are those of the Note in `keeper`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rotor_py.errors import InvalidStateError


class Kept(Protocol):
    """A tensor in another form."""

    def tensor(self) -> torch.Tensor:
        """A tensor of the same elements, in their dtype and on their device, from the beginning of a storage on.

        May be called several times, or never.
        """
        ...


class Saved(Protocol):
    """What autograd saves in the place of a tensor."""

    def tensor(self) -> torch.Tensor:
        """The tensor, as it was when it was saved. RuntimeError if it was overwritten since."""
        ...


class SavedAsItIs:
    """A tensor with the number of times that it had been written to."""

    __slots__ = ("_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # Rule 7: without its history
        self._writes = tensor._version

    @property
    def overwritten(self) -> bool:
        """Whether it was written to since it was saved."""
        return self._tensor._version != self._writes

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._writes:  # overwritten
            raise InvalidStateError(
                f"a tensor of shape {tuple(self._tensor.shape)} that is needed for the backward has been modified by "
                "an in-place operation since the forward; change it after the backward",
                kind="saved_tensor_changed",
            )
        return self._tensor


class Saving(Protocol):
    """Says what autograd saves in the place of tensors."""

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """What stands for `tensor`, which autograd saves; or whoever computes with it, `for_numbers`."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether a run has to go on, for it to be known what is saved."""
        ...


class AsItIs:
    """Saves every tensor as it is."""

    undecided = False

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """`tensor` itself."""
        return SavedAsItIs(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind `tensor`, in its dtype, flat and without history."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
