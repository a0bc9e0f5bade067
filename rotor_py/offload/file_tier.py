"""Offload activations to a file. One thread writes memory of tensors to the file, another reads it back.

The file has no name, so no other process can remove it, and the system frees it when the process ends.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.offload.offload_saved import Moved, Tier
from rotor_py.ranges import Ranges
from rotor_py.units import exact_bytes

# Bytes per system call, between two of which a copy can be stopped. A guess: a call takes a few milliseconds on NVMe.
_CHUNK = 8 * 2**20
ALIGNMENT = 4096  # bytes. Ranges of the file begin and end at multiples of it, so that no page belongs to two copies
Extent = tuple[int, int]  # first byte and number of bytes of a range of the file


class FileTier(Tier):
    """Tier for storages on the CPU: a preallocated, unnamed file in `folder`, a thread that writes, one that reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = f"file:{self.folder}"
        self._process = os.getpid()
        self._file = NamelessFile(self.folder)
        self._space = FileSpace()
        self._lock = threading.Lock()
        # Ranges to free, each with its last copy, which has to be over first. Appending to a deque needs no lock: the
        # garbage collector may do it in any thread.
        self.given_up: deque[tuple[Extent, Future[None] | None]] = deque()
        self.leaving, self.returning = ThreadPoolExecutor(1, "rotor writes"), ThreadPoolExecutor(1, "rotor reads")

    def reserve(self, nbytes: int) -> None:
        self._file.grow(nbytes)

    def move_out(self, storage: torch.UntypedStorage) -> MovedToFile:
        if storage.device.type != "cpu":
            message = f"use offload='host' on {storage.device}: only CPU memory can be offloaded to a file"
            raise OffloadError(message, kind="other_device", name=str(storage.device))
        self._file.refuse_stopped()
        if os.getpid() != self._process:  # forked: two processes would write to the same ranges of the file
            message = (
                "make the Checkpointable in the process that trains: this process was forked after the file was opened"
            )
            raise OffloadError(message, kind="forked")
        extent = self._take(storage.nbytes())
        self.moved_bytes += storage.nbytes()
        return MovedToFile(self, self._file, extent, storage)

    def close(self) -> None:
        self._file.stopped = True
        self.leaving.shutdown()
        self.returning.shutdown()

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
        for _ in range(len(self.given_up)):
            extent, last = self.given_up.popleft()
            if last is None or last.done():
                self._space.give_back(extent)
            else:
                self.given_up.append((extent, last))


class MovedToFile(Moved):
    def __init__(self, tier: FileTier, file: NamelessFile, extent: Extent, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self._tier, self._file = tier, file
        self._extent: Extent | None = extent
        self._returning: Future[None] | None = None
        self._leaving: Future[None] | None = tier.leaving.submit(file.write, _bytes_of(storage), extent[0])

    def wait_out(self) -> None:
        if self._leaving is not None:
            _wait(self._leaving)  # if this raises, this object still holds the storage
            self._leaving = self._storage = None

    def fetch(self) -> None:
        if self._storage is not None:  # not released by `wait_out`, or fetched already: read nothing from the file
            if self._returning is None:
                self._give_up_extent()
            return
        assert self._extent is not None
        self._file.refuse_stopped()
        self._storage = torch.empty(self.nbytes, dtype=torch.uint8).untyped_storage()
        self._returning = self._tier.returning.submit(self._file.read, _bytes_of(self._storage), self._extent[0])

    def storage(self) -> torch.UntypedStorage:
        self.fetch()
        if self._returning is not None:
            try:
                _wait(self._returning)
            except Exception:
                self._returning = self._storage = None  # a second call must not return this half-read memory
                raise
            self._returning = None
            self._give_up_extent()
        assert self._storage is not None
        return self._storage

    def _give_up_extent(self) -> None:
        extent, self._extent = self._extent, None
        last = self._leaving or self._returning
        self._leaving = self._returning = None
        if last is not None:
            held = [self._storage]  # until the copy is over (Rule 4 in `offload_saved.py`)
            last.add_done_callback(lambda _: held.clear())
        if extent is not None:
            self._tier.given_up.append((extent, last))

    def __del__(self) -> None:
        if hasattr(self, "_leaving"):
            self._give_up_extent()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a view of a storage's memory that does not hold the storage: a copying thread must free none (Rule 3)."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _wait(last: Future[None]) -> None:
    """Wait for a copy. Raises OffloadError if it failed."""
    if (error := last.exception()) is not None:
        # A new error each time: with a traceback, the stored one would refer to this frame, and so to the copy.
        raise copy.copy(error) from error.__cause__


@dataclass(slots=True)
class FileSpace:
    """Allocates ranges of a file, first fit, so that steps with equal requests in the same order get equal ranges."""

    end: int = 0  # offset at which the last allocated range ends
    _free: Ranges = field(default_factory=Ranges)

    def take(self, nbytes: int) -> Extent:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = min((at for at, free in self._free.sizes.items() if free >= size), default=self.end)
        if start == self.end:
            self.end += size
        elif left := self._free.take(start) - size:
            self._free.add(start + size, left)
        return start, size

    def give_back(self, extent: Extent) -> None:
        self._free.add(*extent)
        if self.end in self._free.starts:
            self.end = self._free.starts[self.end]
            self._free.take(self.end)


class NamelessFile:
    """A preallocated file of `size` bytes, without a name, so that the system removes it however the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size = 0
        self.stopped = False  # whether the tier is closed, so that running copies must stop with an error
        try:
            # On Linux, the file is made without a name (O_TMPFILE). On other systems, its name is removed at once.
            with tempfile.TemporaryFile(dir=folder) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            message = f"name a folder in which files can be created: {folder} does not allow it ({error.strerror})"
            raise OffloadError(message, kind="no_file", name=str(folder)) from None

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def grow(self, size: int) -> None:
        """Preallocate the file up to `size` bytes. Raises OffloadError if the disk has no room for it."""
        if size <= self.size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, self.size, size - self.size)
            elif size - self.size > shutil.disk_usage(self.folder).free:  # macOS has no posix_fallocate
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(f"a file of {exact_bytes(size)} cannot be created", error) from error
        self.size = size

    def write(self, data: Any, start: int) -> None:
        self._copy(data, start, lambda part, at: os.pwrite(self.descriptor, part, at), "written")

    def read(self, data: Any, start: int) -> None:
        self._copy(data, start, lambda part, at: os.preadv(self.descriptor, [part], at), "read")

    def _copy(self, data: Any, start: int, call: Callable[[Any, int], int], done_to: str) -> None:
        done = 0
        while done < len(data):
            self.refuse_stopped()
            try:
                copied = call(data[done : done + _CHUNK], start + done)
            except OSError as error:
                raise self._failed(f"{exact_bytes(len(data))} cannot be {done_to}", error) from error
            if not copied:
                message = (
                    "run the step again: another program has truncated the file of offloaded activations in "
                    f"{self.folder} at byte {start + done}; {len(data)} bytes were written from byte {start} on"
                )
                raise OffloadError(message, kind="file_cut_short", name=str(self.folder))
            done += copied

    def refuse_stopped(self) -> None:
        if self.stopped:
            message = f"run the forward again: the file in {self.folder} is closed, and the activations in it are lost"
            raise OffloadError(message, kind="file_closed", name=str(self.folder))

    def _failed(self, what: str, error: OSError) -> OffloadError:
        # Read the free space by the file's descriptor, since its folder may have been removed.
        space = os.fstatvfs(self.descriptor)
        free = space.f_bavail * space.f_frsize
        return OffloadError(
            f"{what} in {self.folder}, where {exact_bytes(free)} are free: {error.strerror}; free space there, name "
            "another folder in offload=, or leave offload= out",
            kind="no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "file_failed",
            name=str(self.folder),
            free=free,
        )
