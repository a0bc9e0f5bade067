"""What autograd holds in the place of a tensor that a stage saves: the tensor itself, or a view of what is kept of it.

Rules are those of the Note in `keeper`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
        if self.overwritten:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that is needed for the backward has been modified by "
                "an in-place operation since the forward; change it after the backward"
            )
        return self._tensor


class KeptStorage:
    """What is kept of one storage. All that autograd saves of it shares this object; with the last of them it goes."""

    __slots__ = ("__weakref__", "_given", "_writes", "dtype", "kept")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept: Kept = SavedAsItIs(tensor)
        self.dtype = tensor.dtype
        self._writes = tensor.detach()
        """without memory: it is there for the count of writes, which it shares with the tensor"""
        self._writes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._given: StorageWeakRef | None = None

    def counts_writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether a write to `tensor`, a view of the storage, counts as one to what is kept, and the reverse (Rule 5).

        Both have been written to equally often.
        """
        with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]  # not in its list
            torch.autograd.graph.increment_version(tensor)
            return self._writes._version == tensor._version

    def tensor(self) -> torch.Tensor:
        """All elements of the storage, flat."""
        if (shared := self._still_held()) is not None:
            return shared
        made = memory_of(self.kept.tensor())
        self._given = StorageWeakRef(made.untyped_storage())
        return made

    def _still_held(self) -> torch.Tensor | None:
        """What was given to somebody who still holds it (Rule 8)."""
        # By storage: a node holds views of what was given, and the tensor that they were made of is gone.
        if self._given is None or self._given.expired():
            return None
        # Another thread may let go of it in between.
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._given.cdata)
        if storage is None:
            return None
        whole = torch.empty(0, dtype=self.dtype, device=self._writes.device)
        return whole.set_(storage)


class SavedView:
    """A view of a storage that is kept in another form."""

    __slots__ = ("_offset", "_size", "_storage", "_stride")

    def __init__(self, storage: KeptStorage, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._storage = storage
        self._size = size
        self._stride = stride
        self._offset = offset

    def tensor(self) -> torch.Tensor:
        return self._storage.tensor().as_strided(self._size, self._stride, self._offset)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind `tensor`, in its dtype, flat and without history."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
