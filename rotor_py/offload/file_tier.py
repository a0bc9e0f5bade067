"""Activations in a file: written and read by threads, straight from the memory of tensors and into it.

The file has no name in the user's folder: nobody can remove it, and nothing is left of it after a crash.
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
from rotor_py.units import format_bytes

_CHUNK = 8 * 2**20
"""Bytes of one call of the system, between which a copy can be stopped. A guess: a few milliseconds of an NVMe disk."""
ALIGNMENT = 4096
"""Bytes: a range begins and ends at pages of the file, so that no two copies write to the same one."""


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
                f"only memory of the CPU goes to a file, and this is on {storage.device}; use offload='host' there",
                kind="other_device",
                name=str(storage.device),
            )
        self._file.refuse_stopped()
        if os.getpid() != self._process:  # two processes would write to the same ranges
            raise OffloadError(
                "this process was forked from the one that opened the file of moved activations; wrap the model in "
                "Checkpointable in the process that trains it",
                kind="forked",
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


class Copy:
    """One copy: `run` does it, without the interpreter's lock, to or from memory that `keeps` keeps alive."""

    def __init__(self, run: Callable[[], None], keeps: Any) -> None:
        self._run: Callable[[], None] | None = run
        self._keeps = keeps
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._abandoned = False

    @property
    def over(self) -> bool:
        """Whether it has come to its end, or failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until it is over, and let go of the memory. OffloadError if it failed."""
        self._over.wait()
        self._keeps = None
        # A new error each time: one that is kept would keep the frames that it went through, and those this copy.
        if isinstance(self._error, OffloadError):
            raise copy.copy(self._error) from self._error.__cause__
        if self._error is not None:
            raise OffloadError(
                f"an activation could not be copied: {self._error!r}; run the step again", kind="copy_failed"
            )

    def abandon(self) -> None:
        """Nobody waits any more: the memory is let go of as soon as the copy is over."""
        # In this order, and in the other one in `do`: whichever thread comes second sees what the first has done.
        self._abandoned = True
        if self.over:
            self._keeps = None

    def do(self) -> None:
        """Do it, in the thread that copies."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run()
        except BaseException as error:  # whatever it is, the thread that waits is to have it
            self._error = error.with_traceback(None)
        self._over.set()
        if self._abandoned:
            self._keeps = None


class CopyingThread:
    """Does copies one after the other, as asked for, in a thread that ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self, copy: Copy) -> None:
        """Have a copy done. RuntimeError where the interpreter makes no more threads."""
        with self._starting:
            if self._thread is None:
                # The thread refers to the queue alone: it keeps nobody alive who could end it.
                self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(copy)

    def end(self) -> None:
        """End the thread, once all that was started is over."""
        thread, self._thread = self._thread, None
        self._queue.put(None)
        # The garbage collector may call this in any thread, in this very one as well.
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _work(queue: SimpleQueue[Copy | None]) -> None:
    while True:
        copy = queue.get()
        if copy is None:
            return
        copy.do()
        del copy  # while it waits for the next one, it keeps nothing


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`size` bytes of a file from `start` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class FileSpace:
    """The ranges of a file that are free, by where they start; `end` is where the last one that was taken ends.

    A step takes and gives back the same sizes in the same order as the one before, so that first fit finds for each the
    place that it had: the file does not grow from step to step.
    """

    end: int = 0
    taken: int = 0
    """Bytes that are taken now."""
    _free: list[Extent] = field(default_factory=list)

    def take(self, nbytes: int) -> Extent:
        """A range of `nbytes` or more that nobody has. Where none is free, the file has to grow up to `end`."""
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
        """Have a range free again, joined with its free neighbours."""
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
    """A file of `size` bytes, preallocated. It is gone when nothing refers to it any more, however a process ends."""

    def __init__(self, folder: Path) -> None:
        """OffloadError for a folder in which no file can be made."""
        self.folder = folder
        self.size = 0
        self.stopped = False
        """Whether copies that run are to end at once, with an error."""
        try:
            # On Linux it never has a name (O_TMPFILE); elsewhere it loses it before anything is written.
            with tempfile.TemporaryFile(dir=folder) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise OffloadError(
                f"no file can be made in {folder}: {error.strerror}; name a folder that takes files",
                kind="no_file",
                name=str(folder),
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def grow(self, size: int) -> None:
        """Have `size` bytes of the disk. OffloadError if it has fewer."""
        if size <= self.size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, self.size, size - self.size)
            elif size - self.size > shutil.disk_usage(self.folder).free:  # macOS has no such call
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(f"a file of {format_bytes(size)} ({size} bytes) cannot be made", error) from error
        self.size = size

    def write(self, data: Any, start: int) -> None:
        """Write all of `data`, a buffer, from the byte `start` on. OffloadError if that fails."""
        done = 0
        while done < len(data):
            self.refuse_stopped()
            try:
                done += os.pwrite(self.descriptor, data[done : done + _CHUNK], start + done)
            except OSError as error:
                raise self._failed(f"{format_bytes(len(data))} ({len(data)} bytes) cannot be written", error) from error

    def read(self, data: Any, start: int) -> None:
        """Fill `data`, a buffer, from the byte `start` on. OffloadError if that fails, or if bytes are missing."""
        done = 0
        while done < len(data):
            self.refuse_stopped()
            try:
                found = os.preadv(self.descriptor, [data[done : done + _CHUNK]], start + done)
            except OSError as error:
                raise self._failed(f"{format_bytes(len(data))} ({len(data)} bytes) cannot be read", error) from error
            if not found:
                raise OffloadError(
                    f"the file of moved activations in {self.folder} was cut short: it ends at byte {start + done}, "
                    f"and {len(data)} bytes were written from byte {start} on; run the step again, and keep other "
                    "programs from the files of this process",
                    kind="file_cut_short",
                    name=str(self.folder),
                )
            done += found

    def refuse_stopped(self) -> None:
        """OffloadError if nobody is to copy any more."""
        if self.stopped:
            raise OffloadError(
                f"the file of moved activations in {self.folder} was closed, and what was in it is lost; run the "
                "forward again",
                kind="file_closed",
                name=str(self.folder),
            )

    def _failed(self, what: str, error: OSError) -> OffloadError:
        # Of the file, not of its folder, which may be gone: the file is there all the same.
        space = os.fstatvfs(self.descriptor)
        free = space.f_bavail * space.f_frsize
        return OffloadError(
            f"{what} in {self.folder}, where {format_bytes(free)} ({free} bytes) are free: {error.strerror}; free room "
            "there, name another folder in offload=, or leave offload= out",
            kind="no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "file_failed",
            name=str(self.folder),
            free=free,
        )
