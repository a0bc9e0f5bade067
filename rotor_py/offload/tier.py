"""Protocol of a memory tier that holds offloaded activations until their backward."""

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

from typing import Protocol

import torch


class Moved(Protocol):
    """One storage on its way out, in the tier, or on its way back. Dropping it frees its room."""

    @property
    def nbytes(self) -> int:
        """Size of the storage."""

    def wait_out(self) -> None:
        """Wait until the bytes have left, and release the storage. Raises OffloadError if the copy failed.

        Does nothing if they have left already or were fetched again.
        """

    def fetch(self) -> None:
        """Allocate a storage and start the copy back. Does nothing if done before, or if none has left."""

    def storage(self) -> torch.UntypedStorage:
        """Fetch the bytes if necessary, wait, and return them. Raises OffloadError if the copy failed."""


class Tier(Protocol):
    """A memory tier for storages. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """Name in options: `host`, or `file:/path`."""

    @property
    def moved_bytes(self) -> int:
        """Bytes offloaded so far."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tier in use."""

    def reserve(self, nbytes: int) -> None:
        """Reserve room for `nbytes` at once. Raises OffloadError if there is less."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """Start to offload a storage, which must not be written to from now on. Raises OffloadError without room."""

    def close(self) -> None:
        """Free all room after the running copies. Offloaded bytes are lost."""
