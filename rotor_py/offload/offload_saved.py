"""What one run of a stage saves, on its way to a tier and back. It is a keeper: see `stage.keepers`.

Nothing leaves while the stage runs. Only when it is over does it show what the next stage reads, and whether somebody
else holds a storage, so that moving it would free nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ReferenceType, ref

import torch

from rotor_profiling import torch_compat
from rotor_py.errors import InvalidStateError
from rotor_py.offload.tier import Moved, Tier

LEAST_BYTES = 64 * 2**10
"""Smaller storages stay: handing a copy to a thread takes as long as copying so much. A rough figure of one machine."""


class LeavingMemory:
    """The storages that one run of a stage saves: kept in memory until `leave` sends those that can leave."""

    name = "moved"
    exact = True

    def __init__(self) -> None:
        # Weakly: what autograd lets go of is gone, wherever it is.
        self._pieces: list[ReferenceType[Piece]] = []

    def keep(self, memory: torch.Tensor) -> Piece:
        piece = Piece(memory)
        self._pieces.append(ref(piece))
        return piece

    def can_leave(self) -> list[Piece]:
        """What is still there, was not written to, and is held by autograd alone. For when the run is over."""
        return [piece for piece in self.pieces() if piece.is_alone]

    def pieces(self) -> list[Piece]:
        """All that autograd still has."""
        return [piece for each in self._pieces if (piece := each()) is not None]

    def leave(self, tier: Tier) -> int:
        """Start to move all that can leave; returns its bytes. OffloadError if there is no room for it."""
        leaving = self.can_leave()
        self._pieces = [ref(piece) for piece in leaving]
        for piece in leaving:
            piece.leave(tier)
        return bytes_of(leaving)

    def wait_out(self) -> None:
        """Wait until all has left, and let go of its memory. OffloadError if a copy failed."""
        for piece in self.pieces():
            piece.wait_out()

    def fetch(self) -> None:
        """Allocate the memory again, and start all copies back."""
        for piece in self.pieces():
            piece.fetch()


class Piece:
    """One storage that autograd saved: in memory, or moved."""

    __slots__ = ("__weakref__", "_device", "_dtype", "_memory", "_moved", "_overwritten", "_writes", "nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self._writes = memory._version
        self._overwritten = False
        self._moved: Moved | None = None
        # Storages of tensors without memory say that they are on another.
        self._dtype, self._device = memory.dtype, memory.device
        self.nbytes = memory.untyped_storage().nbytes()

    @property
    def is_alone(self) -> bool:
        """Whether the storage is in memory for this piece alone, and as it was saved."""
        memory = self._memory
        if memory is None or memory._version != self._writes:
            return False
        # Our own: the tensor, the one that it is a view of, and the object by which Python asks.
        own = 3 if memory._is_view() else 2
        return bool(torch_compat.storage_use_count(memory.untyped_storage()._cdata) == own)

    def leave(self, tier: Tier) -> None:
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
        """The memory as a flat tensor.

        RuntimeError if it was written to since, OffloadError if it did not come back.
        """
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


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Their bytes together."""
    return sum(piece.nbytes for piece in pieces)
