"""Activations in a file: written and read by threads, straight from the memory of tensors and into it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from functools import partial
from pathlib import Path

import torch

from rotor_py.errors import OffloadError
from rotor_py.offload.copying_thread import Copy, CopyingThread
from rotor_py.offload.file_space import Extent, FileSpace
from rotor_py.offload.nameless_file import NamelessFile


class FileTier:
    """A file without a name in `folder`, and two threads: one that writes, and one that reads. For storages on the CPU.

    One file for all: making a file for each storage costs more than a small copy, and a file of its own could not be
    preallocated. OffloadError if no file can be made there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.moved_bytes = 0
        self._process = os.getpid()
        self._file = NamelessFile(self.folder)
        self._space = FileSpace()
        self._lock = threading.Lock()
        self._given_up: deque[tuple[Extent, Copy | None]] = deque()
        """Ranges that nobody needs, each as soon as its last copy is over. Whoever adds one needs no lock."""
        self.leaving, self.returning = CopyingThread("rotor writes"), CopyingThread("rotor reads")
        self._closing = weakref.finalize(self, _close, self._file, self.leaving, self.returning)

    @property
    def name(self) -> str:
        return f"file:{self.folder}"

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._sweep()
            return self._space.taken

    def reserve(self, nbytes: int) -> None:
        self._file.grow(nbytes)

    def move_out(self, storage: torch.UntypedStorage) -> MovedToFile:
        if storage.device.type != "cpu":
            raise OffloadError(
                f"only memory of the CPU goes to a file, and this is on {storage.device}; use offload='host' there"
            )
        self._file.refuse_stopped()
        if os.getpid() != self._process:  # two processes would write to the same ranges
            raise OffloadError(
                "this process was forked from the one that opened the file of moved activations; wrap the model in "
                "Checkpointable in the process that trains it"
            )
        extent = self._take(storage.nbytes())
        self.moved_bytes += storage.nbytes()
        return MovedToFile(self, self._file, extent, storage)

    def give_up(self, extent: Extent, copy: Copy | None) -> None:
        """Have a range free again once `copy` is over. May be called by the garbage collector, in any thread."""
        self._given_up.append((extent, copy))

    def close(self) -> None:
        self._closing()

    def _take(self, nbytes: int) -> Extent:
        with self._lock:
            self._sweep()
            extent = self._space.take(nbytes)
            try:
                self._file.grow(self._space.end)
            except OffloadError:
                self._space.give_back(extent)
                raise
            return extent

    def _sweep(self) -> None:
        for _ in range(len(self._given_up)):
            extent, copy = self._given_up.popleft()
            if copy is None or copy.over:
                self._space.give_back(extent)
            else:
                self._given_up.append((extent, copy))


class MovedToFile:
    """A storage in a file; see `Moved`.

    It has a range of the file until the bytes are back, or nobody wants them. Where neither copy runs, it has either a
    storage or bytes in the file alone.
    """

    def __init__(self, tier: FileTier, file: NamelessFile, extent: Extent, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._tier, self._file = tier, file
        self._storage: torch.UntypedStorage | None = storage
        self._returning: Copy | None = None
        self._extent: Extent | None = extent
        self._leaving: Copy | None = Copy(partial(file.write, _bytes_of(storage), extent.start), keeps=storage)
        tier.leaving.start(self._leaving)

    def wait_out(self) -> None:
        if self._leaving is None:
            return
        self._leaving.wait()  # an error leaves the storage, and all else, as it is
        self._leaving = self._storage = None

    def fetch(self) -> None:
        if self._storage is not None:  # it has not left: what is in the file is not needed
            if self._returning is None:
                self._give_up_extent()
            return
        assert self._extent is not None
        self._file.refuse_stopped()
        self._storage = torch.empty(self.nbytes, dtype=torch.uint8).untyped_storage()
        run = partial(self._file.read, _bytes_of(self._storage), self._extent.start)
        self._returning = Copy(run, keeps=self._storage)
        self._tier.returning.start(self._returning)

    def storage(self) -> torch.UntypedStorage:
        self.fetch()
        if self._returning is not None:
            try:
                self._returning.wait()
            except OffloadError:
                self._returning = self._storage = None  # whoever asks again is not to have half of the bytes
                raise
            self._returning = None
            self._give_up_extent()
        assert self._storage is not None
        return self._storage

    def _give_up_extent(self) -> None:
        extent, self._extent = self._extent, None
        copy = self._leaving or self._returning
        self._leaving = self._returning = None
        if copy is not None:
            copy.abandon()  # it keeps the memory until it is over (Note, 4)
        if extent is not None:
            self._tier.give_up(extent, copy)

    def __del__(self) -> None:
        if hasattr(self, "_leaving"):
            self._give_up_extent()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a storage, which it does not keep alive: a thread that copies is not to let go of any."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _close(file: NamelessFile, *threads: CopyingThread) -> None:
    file.stopped = True
    for thread in threads:
        thread.end()
