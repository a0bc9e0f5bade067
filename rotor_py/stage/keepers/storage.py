"""What is kept of a storage that autograd has saved, who reads it, and the views that autograd holds of it.

Rules are those of the Note in `keeper`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_py.stage.keepers.readers import Need, need_of
from rotor_py.stage.keepers.saved import Kept, SavedAsItIs, memory_of


class KeptStorage:
    """What is kept of one storage. All that autograd saves of it shares this object; with the last of them it goes."""

    __slots__ = ("__weakref__", "_given", "_writes", "dtype", "kept", "need", "undecided")

    def __init__(self, tensor: torch.Tensor, need: Need = Need.NUMBERS) -> None:
        self.kept: Kept = SavedAsItIs(tensor)
        self.need = need
        """what those need of it who are known to read it"""
        self.undecided: set[int] = set()
        """the nodes that have saved it as well, by their numbers, and may need its numbers"""
        self.dtype = tensor.dtype
        self._writes = tensor.detach()
        """without memory: it is there for the count of writes, which it shares with the tensor"""
        self._writes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._given: StorageWeakRef | None = None

    @property
    def is_as_it_is(self) -> bool:
        """Whether it is kept in no form."""
        return isinstance(self.kept, SavedAsItIs)

    def keep_as_it_is(self, tensor: torch.Tensor) -> None:
        """Keep it in no form, whatever it was kept in: `tensor` is the storage, or a view of it."""
        self.kept, self._given = SavedAsItIs(tensor), None

    def read_by(self, node: int | None) -> None:
        """A node has saved it, and may need its numbers; None if they are needed for sure."""
        if node is not None and self.need is not Need.NUMBERS:
            self.undecided.add(node)
        elif node is None:
            self._needs(Need.NUMBERS)

    def settle(self, found: Mapping[int, Node]) -> None:
        """Decide of the nodes that were found, by their numbers, what they need of it."""
        for number in self.undecided & found.keys():
            self.undecided.discard(number)
            self._needs(need_of(found[number], self._writes.device))

    def _needs(self, need: Need) -> None:
        self.need = self.need.together_with(need)
        if self.need is Need.NUMBERS:
            self.undecided = set()

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
