"""A second tier of memory: where activations wait for their backward, so that the device has room for others.

# Note [Moving activations to another tier and back]
#
#  1. What is moved is a storage, not a tensor: views that share one are moved together, once.
#  2. Copies run beside training. Whoever started one waits for it where its memory counts: `wait_out` before that
#     memory is let go of, `storage` before the bytes are read.
#  3. Memory is allocated and let go of by the thread that trains, never by one that copies: there is one order of all
#     allocations, so that a plan can promise a peak, and CUDA's allocator knows of the stream.
#  4. Memory that a copy reads or writes stays until the copy is over, even if nobody wants the bytes any more.
#  5. A copy that fails says so where it is waited for, in the thread that trains (`OffloadError`). It leaves nothing
#     behind: room in the tier is free again as soon as what was moved is forgotten.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Moved(Protocol):
    """One storage that is on its way out, elsewhere, or on its way back. Once it is forgotten, its room is free."""

    @property
    def nbytes(self) -> int:
        """The size of the storage."""

    def wait_out(self) -> None:
        """Wait until the bytes have left, and let go of the storage. OffloadError if the copy failed.

        Does nothing where they have left before, or have been asked for again.
        """

    def fetch(self) -> None:
        """Allocate a storage, and start the copy back. Does nothing where that has been done, or none has left."""

    def storage(self) -> torch.UntypedStorage:
        """The bytes in memory: fetched, where nobody has done so, and waited for. OffloadError if the copy failed."""


class Tier(Protocol):
    """A place for the bytes of storages. One thread at a time uses it."""

    @property
    def name(self) -> str:
        """What a user calls it: `host`, or `file:/path`."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that have been asked to leave so far."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tier that are taken now."""

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes at once. OffloadError if there is less."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """Start to copy a storage out. Nobody may write to it from now on. OffloadError if there is no room."""

    def close(self) -> None:
        """Give all room back, once the copies that run are over. What was moved is lost."""
