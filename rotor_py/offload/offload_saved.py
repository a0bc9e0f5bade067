"""Offload the saved tensors of a stage to a memory tier until its backward; the interface of tiers."""

# Note [Offloading activations and fetching them]
#
#  1. Whole storages are offloaded, so tensors that are views of one storage are copied together, once.
#  2. Copies run concurrently with training. Whoever starts a copy waits for it: in `wait_out` before the memory is
#     released, in `storage` before the bytes are read.
#  3. Only the training thread allocates and frees memory, never a copying thread. So allocations have one order, a plan
#     can promise a peak, and CUDA's allocator knows the stream.
#  4. Memory that a copy reads or writes exists until the copy is over, even if its bytes are no longer needed.
#  5. If a copy fails, the training thread raises OffloadError when it waits for the copy. Even then, the bytes in
#     the tier are free again as soon as the `Moved` object is dropped.

from __future__ import annotations

from weakref import ReferenceType, ref

import torch

from rotor_profiling import torch_compat
from rotor_py.errors import InvalidStateError


class Moved:
    """An offloaded storage, on the way to a tier, in the tier or on the way back. Dropping it frees bytes of the tier.

    This base class is for fake tensors, in predictions: it copies nothing, and frees the storage in `wait_out`.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._storage: torch.UntypedStorage | None = storage

    def wait_out(self) -> None:
        """Wait until the bytes are in the tier, and release the storage. Raises OffloadError if the copy failed.

        Does nothing if the storage was released before or the bytes were fetched again.
        """
        self._storage = None

    def fetch(self) -> None:
        """Allocate a storage and start the copy back. Allocates none if the storage was not released, or is back."""
        if self._storage is None:
            self._storage = torch.empty(self.nbytes, dtype=torch.uint8).untyped_storage()

    def storage(self) -> torch.UntypedStorage:
        """Fetch the bytes if needed, wait for them, and return the storage. Raises OffloadError if the copy failed."""
        self.fetch()
        assert self._storage is not None
        return self._storage


class Tier:
    """Memory to offload storages to, used by one thread at a time. This base class simulates one, for fake tensors."""

    name = "host"  # the tier's name in options: `host`, or `file:/path`
    moved_bytes = 0  # bytes offloaded so far

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes`, the most that are offloaded at once. Raises OffloadError if the tier has fewer."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """Begin to offload a storage, which must not be written to from now on. OffloadError if the tier is full."""
        self.moved_bytes += storage.nbytes()
        return Moved(storage)

    def close(self) -> None:
        """Let running copies end or fail, and free all bytes of the tier. What was offloaded is lost."""


# Offloading starts after a stage has run, since storages that autograd saved are offloaded only if nothing else refers
# to them: to offload the stage's output, which is the next stage's input, would free nothing.


# Bytes of the smallest storage to offload: to start a copy takes as long as to copy 64 KiB (rough measurement).
LEAST_BYTES = 64 * 2**10


class OffloadableStorages:
    """Storages that autograd saves in a run of a stage. `offload` copies to a tier those that nothing else uses."""

    def __init__(self) -> None:
        # Refer weakly, so that a storage is freed when autograd drops the tensor that it saved.
        self._saved: list[ReferenceType[SavedStorage]] = []

    def keep(self, memory: torch.Tensor) -> SavedStorage:
        saved = SavedStorage(memory)
        self._saved.append(ref(saved))
        return saved

    def offloadable(self) -> list[SavedStorage]:
        """Return the unmodified storages that only autograd refers to. Call this after the stage has run."""
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
        self._dtype, self._device = memory.dtype, memory.device  # the storage of a fake tensor reports another device
        self.nbytes = memory.untyped_storage().nbytes()

    @property
    def only_owner(self) -> bool:
        """Whether nothing else refers to the storage, and it was not modified since it was saved."""
        memory = self._memory
        if memory is None or memory._version != self._writes:
            return False
        # Count this object's references: the tensor, its base if it is a view, and the storage object made just here.
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
        """Return the memory as a flat tensor. Raises RuntimeError if it was modified, OffloadError if a copy failed."""
        self._note_writes()
        if self._overwritten:
            message = (
                "change tensors in place only after the backward: an in-place operation has modified "
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
