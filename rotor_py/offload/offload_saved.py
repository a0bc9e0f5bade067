"""Offload the saved tensors of a stage run to a tier and fetch them back, as a keeper of saved tensors.

Offloading starts after the stage: only then is it known which storages the next stage reads, and which are referenced
elsewhere, so that moving them would free nothing.
"""

from __future__ import annotations

from weakref import ReferenceType, ref

import torch

from rotor_profiling import torch_compat
from rotor_py.errors import InvalidStateError
from rotor_py.offload.tier import Moved, Tier

LEAST_BYTES = 64 * 2**10
"""Smaller storages stay: passing a copy to a thread takes as long as copying this much. Rough figure of one machine."""


class OffloadableStorages:
    """Storages saved by one stage run, kept in memory until `offload` moves those that can go."""

    def __init__(self) -> None:
        # Weak references, so that storages that autograd drops are freed.
        self._saved: list[ReferenceType[SavedStorage]] = []

    def keep(self, memory: torch.Tensor) -> SavedStorage:
        saved = SavedStorage(memory)
        self._saved.append(ref(saved))
        return saved

    def offloadable(self) -> list[SavedStorage]:
        """Live, unmodified storages held by autograd alone. Call after the run."""
        return [each for each in self._alive() if each.only_owner]

    def _alive(self) -> list[SavedStorage]:
        return [each for saved in self._saved if (each := saved()) is not None]

    def offload(self, tier: Tier) -> None:
        """Start offloading. Raises OffloadError if the tier is full."""
        offloadable = self.offloadable()
        self._saved = [ref(each) for each in offloadable]
        for each in offloadable:
            each.offload(tier)

    def wait_out(self) -> None:
        """Wait until all has left, and release its memory. Raises OffloadError if a copy failed."""
        for each in self._alive():
            each.wait_out()

    def fetch(self) -> None:
        """Allocate the memory again and start all copies back."""
        for each in self._alive():
            each.fetch()


class SavedStorage:
    """One storage saved by autograd, in memory or offloaded."""

    __slots__ = ("__weakref__", "_device", "_dtype", "_memory", "_moved", "_overwritten", "_writes", "nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self._writes = memory._version
        self._overwritten = False
        self._moved: Moved | None = None
        # Fake storages report another device.
        self._dtype, self._device = memory.dtype, memory.device
        self.nbytes = memory.untyped_storage().nbytes()

    @property
    def only_owner(self) -> bool:
        """Whether only this object references the storage, unmodified since it was saved."""
        memory = self._memory
        if memory is None or memory._version != self._writes:
            return False
        # Our own references: the tensor, its base if it is a view, and the Python object of the query.
        own = 3 if memory._is_view() else 2
        return bool(torch_compat.storage_use_count(memory.untyped_storage()._cdata) == own)

    def offload(self, tier: Tier) -> None:
        assert self._memory is not None
        self._moved = tier.move_out(self._memory.untyped_storage())

    def wait_out(self) -> None:
        if self._moved is not None:
            self._note_writes()
            self._memory = None
            self._moved.wait_out()

    def fetch(self) -> None:
        if self._moved is not None:
            self._moved.fetch()

    def tensor(self) -> torch.Tensor:
        """The memory as a flat tensor. RuntimeError if it was modified since, OffloadError if it did not come back."""
        self._note_writes()
        if self._overwritten:
            raise InvalidStateError(
                f"memory of {self.nbytes} bytes that is needed for the backward has been modified by an in-place "
                "operation since the forward; change it after the backward",
                kind="saved_tensor_changed",
                nbytes=self.nbytes,
            )
        if self._memory is None:
            assert self._moved is not None
            storage = self._moved.storage()
            whole = torch.empty(0, dtype=self._dtype, device=self._device)
            self._memory = whole.set_(storage, 0, (self.nbytes // self._dtype.itemsize,))  # type: ignore[call-overload]  # it takes untyped storages
            self._writes, self._moved = self._memory._version, None
        return self._memory

    def _note_writes(self) -> None:
        self._overwritten |= self._memory is not None and self._memory._version != self._writes
