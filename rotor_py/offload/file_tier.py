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
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.offload.offload_saved import Moved, Tier
from rotor_py.units import exact_bytes

# Bytes per system call, between two of which a copy can be stopped. A guess: a call takes a few milliseconds on NVMe.
_CHUNK = 8 * 2**20
ALIGNMENT = 4096  # bytes. Ranges of the file begin and end at multiples of it, so that no page belongs to two copies


class FileTier(Tier):
    """Tier for storages on the CPU: a preallocated, unnamed file in `folder`, a thread that writes, one that reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = f"file:{self.folder}"
        self._process = os.getpid()
        self._file = NamelessFile(self.folder)
        self._space = FileSpace()
        self._lock = threading.Lock()
        # Ranges to free, each with its last copy, which has to be over first. Appending to a deque needs no lock.
        self._given_up: deque[tuple[Extent, Copy | None]] = deque()
        self.leaving, self.returning = CopyingThread("rotor writes"), CopyingThread("rotor reads")
        self._closing = weakref.finalize(self, _close, self._file, self.leaving, self.returning)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._sweep()
            return self._space.taken

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

    def give_up(self, extent: Extent, copy: Copy | None) -> None:
        """Free `extent` of the file once `copy` is over. The garbage collector may call this in any thread."""
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


class MovedToFile(Moved):
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
        self._leaving.wait()  # if this raises, this object still holds the storage
        self._leaving = self._storage = None

    def fetch(self) -> None:
        if self._storage is not None:  # not released by `wait_out`, or fetched already: read nothing from the file
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
                self._returning = self._storage = None  # a second call must not return this half-read memory
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
            copy.abandon()  # the copy itself holds the memory until it is over (Rule 4 in `offload_saved.py`)
        if extent is not None:
            self._tier.give_up(extent, copy)

    def __del__(self) -> None:
        if hasattr(self, "_leaving"):
            self._give_up_extent()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a view of a storage's memory that does not hold the storage: a copying thread must free none (Rule 3)."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _close(file: NamelessFile, *threads: CopyingThread) -> None:
    file.stopped = True
    for thread in threads:
        thread.end()


class Copy:
    """One copy, made by `run`, which releases the GIL. Holds `keeps`, the storage, until the copy is over."""

    def __init__(self, run: Callable[[], None], keeps: Any) -> None:
        self._run = run
        self._keeps = keeps
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._abandoned = False

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the copy and drop the reference to its storage. Raises OffloadError if the copy failed."""
        self._over.wait()
        self._keeps = None
        # Raise a new error each time: with a traceback, the stored one would refer to this frame, and so to this copy.
        if isinstance(self._error, OffloadError):
            raise copy.copy(self._error) from self._error.__cause__
        if self._error is not None:
            raise OffloadError(
                f"run the step again: copying an activation failed with {self._error!r}", kind="copy_failed"
            )

    def abandon(self) -> None:
        """Drop the reference to the storage as soon as the copy is over. Call this instead of `wait`."""
        # Here, the flag is set before `over` is read; in `do`, after `_over` is set. So one of them sees both set.
        self._abandoned = True
        if self.over:
            self._keeps = None

    def do(self) -> None:
        try:
            self._run()
        except BaseException as error:  # `wait` raises it in the training thread
            self._error = error.with_traceback(None)
        self._over.set()
        if self._abandoned:
            self._keeps = None


class CopyingThread:
    """Runs copies in the order in which they are started, in a thread of its own, until `end`."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        # Give the thread only the queue, so that a waiting thread does not keep this object alive.
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> None:
        self._queue.put(copy)

    def end(self) -> None:
        self._queue.put(None)
        # The garbage collector may call this in any thread, even in the copying thread, which cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join()


def _work(queue: SimpleQueue[Copy | None]) -> None:
    while True:
        copy = queue.get()
        if copy is None:
            return
        copy.do()
        del copy  # hold no copy, and thus no storage, while waiting for the next one


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class FileSpace:
    """Allocates ranges of a file, first fit, so that steps with equal requests in the same order get equal ranges."""

    end: int = 0  # offset at which the last allocated range ends
    taken: int = 0  # bytes of the allocated ranges
    _free: list[Extent] = field(default_factory=list)  # sorted by start

    def take(self, nbytes: int) -> Extent:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.taken += size
        for position, free in enumerate(self._free):
            if free.size == size:
                return self._free.pop(position)
            if free.size > size:
                self._free[position] = Extent(free.start + size, free.size - size)
                return Extent(free.start, size)
        found = Extent(self.end, size)
        self.end = found.end
        return found

    def give_back(self, extent: Extent) -> None:
        self.taken -= extent.size
        insort(self._free, extent)
        joined: list[Extent] = []
        for each in self._free:
            if joined and joined[-1].end == each.start:
                joined[-1] = Extent(joined[-1].start, joined[-1].size + each.size)
            else:
                joined.append(each)
        if joined[-1].end == self.end:
            self.end = joined.pop().start
        self._free = joined


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
