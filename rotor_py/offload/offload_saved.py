"""A memory tier that holds saved tensors until their backward, and the saved tensors of a stage run that go there."""

# Note [Moving activations to another tier and back]
#
#  1. Offloading moves a storage, not a tensor: views that share one move together, once.
#  2. Copies run concurrently with training. The caller that starts one waits for it: `wait_out` before the memory is
#     released, `storage` before the bytes are read.
#  3. The training thread allocates and frees memory, never a copying thread: this gives one order of all allocations,
#     so that a plan can promise a peak, and CUDA's allocator knows the stream.
#  4. Memory that a copy reads or writes stays until the copy is over, even if the bytes are no longer needed.
#  5. A failed copy raises OffloadError where it is waited for, in the training thread. It leaks nothing: the tier's
#     room is free again as soon as the handle is dropped.

from __future__ import annotations

from weakref import ReferenceType, ref

import torch

from rotor_profiling import torch_compat
from rotor_py.errors import InvalidStateError


class Moved:
    """One storage on its way out, in the tier, or on its way back. Dropping it frees its room.

    This one, of fake tensors, exists until its copy is waited for, and costs no time.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._storage: torch.UntypedStorage | None = storage

    def wait_out(self) -> None:
        """Wait until the bytes have left, and release the storage. Raises OffloadError if the copy failed.

        Does nothing if they have left already or were fetched again.
        """
        self._storage = None

    def fetch(self) -> None:
        """Allocate a storage and start the copy back. Does nothing if done before, or if none has left."""
        if self._storage is None:
            self._storage = torch.empty(self.nbytes, dtype=torch.uint8).untyped_storage()

    def storage(self) -> torch.UntypedStorage:
        """Fetch the bytes if necessary, wait, and return them. Raises OffloadError if the copy failed."""
        self.fetch()
        assert self._storage is not None
        return self._storage


class Tier:
    """A memory tier for storages, used by one thread at a time. This one is for fake tensors: its host is unknown."""

    name = "host"  # name in options: `host`, or `file:/path`
    moved_bytes = 0  # bytes offloaded so far

    @property
    def held_bytes(self) -> int:
        return 0

    def reserve(self, nbytes: int) -> None:
        """Reserve room for `nbytes` at once. Raises OffloadError if there is less."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """Start to offload a storage, which must not be written to from now on. Raises OffloadError without room."""
        self.moved_bytes += storage.nbytes()
        return Moved(storage)

    def close(self) -> None:
        """Free all room after the running copies. Offloaded bytes are lost."""


# Offloading starts after a stage: only then is it known which of its saved storages the next stage reads, and which are
# referenced elsewhere, so that moving them would free nothing.


# Smaller storages stay: passing a copy to a thread takes as long as copying this much. Rough figure of one machine.
LEAST_BYTES = 64 * 2**10


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
        offloadable = self.offloadable()
        self._saved = [ref(each) for each in offloadable]
        for each in offloadable:
            each.offload(tier)

    def wait_out(self) -> None:
        for each in self._alive():
            each.wait_out()

    def fetch(self) -> None:
        for each in self._alive():
            each.fetch()


class SavedStorage:
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
            message = (
                "change tensors in place after the backward: an in-place operation has modified "
                f"{self.nbytes} bytes of memory that the backward needs"
            )
            raise InvalidStateError(message, kind="saved_tensor_changed", nbytes=self.nbytes)
        if self._memory is None:
            assert self._moved is not None
            storage = self._moved.storage()
            whole = torch.empty(0, dtype=self._dtype, device=self._device)
            self._memory = whole.set_(storage, 0, (self.nbytes // self._dtype.itemsize,))  # type: ignore[call-overload]  # it takes untyped storages
            self._writes, self._moved = self._memory._version, None
        return self._memory

    def _note_writes(self) -> None:
        self._overwritten |= self._memory is not None and self._memory._version != self._writes
