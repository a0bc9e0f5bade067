"""The host's memory beside a device that is not there: what is moved has no bytes, and takes memory when it would."""

from __future__ import annotations

import torch

from rotor_py.offload.tier import Moved, Tier


class PredictedTier(Tier):
    """Takes storages of tensors without memory."""

    name = "host"
    moved_bytes = 0
    held_bytes = 0

    def reserve(self, nbytes: int) -> None:
        """There is always room: nobody knows the host."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """The storage is there until somebody waits for its copy."""
        self.moved_bytes += storage.nbytes()
        return _Moved(storage)

    def close(self) -> None:
        """There is nothing to give back."""


class _Moved(Moved):
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._nbytes = storage.nbytes()
        self._storage: torch.UntypedStorage | None = storage

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def wait_out(self) -> None:
        self._storage = None

    def fetch(self) -> None:
        if self._storage is None:
            self._storage = torch.empty(self._nbytes, dtype=torch.uint8).untyped_storage()

    def storage(self) -> torch.UntypedStorage:
        self.fetch()
        assert self._storage is not None
        return self._storage
