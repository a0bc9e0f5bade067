"""A file without a name in a folder of the user's: nobody can remove it, and nothing is left of it after a crash."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rotor_py.errors import OffloadError
from rotor_py.units import format_bytes

_CHUNK = 8 * 2**20
"""Bytes of one call of the system, between which a copy can be stopped. A guess: a few milliseconds of an NVMe disk."""


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
                f"no file can be made in {folder}: {error.strerror}; name a folder that takes files"
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
                    "programs from the files of this process"
                )
            done += found

    def refuse_stopped(self) -> None:
        """OffloadError if nobody is to copy any more."""
        if self.stopped:
            raise OffloadError(
                f"the file of moved activations in {self.folder} was closed, and what was in it is lost; run the "
                "forward again"
            )

    def _failed(self, what: str, error: OSError) -> OffloadError:
        # Of the file, not of its folder, which may be gone: the file is there all the same.
        space = os.fstatvfs(self.descriptor)
        free = space.f_bavail * space.f_frsize
        return OffloadError(
            f"{what} in {self.folder}, where {format_bytes(free)} ({free} bytes) are free: {error.strerror}; free room "
            "there, name another folder in offload=, or leave offload= out"
        )
