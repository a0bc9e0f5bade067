"""Pinned memory of the host for copies, used again and again: to pin memory takes as long as many copies.

A batch of another length moves other sizes. So whoever asks gets the smallest free buffer that is large enough, and at
most twice as large: with more, a small activation would hold the place of a large one, which were pinned anew.

What lies free is bounded as well: all buffers together take at most twice the most that was asked for at once. As much
is never needed by any step that has been: at the loss, all that it moves is out at once, in buffers of at most twice
the size. What is beyond is left over from steps of other sizes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.units import format_bytes

_LEAST = 2**20
"""Bytes of the smallest buffer; a guess."""
_WASTE = 2
"""How many times larger than asked for a buffer may be, and all of them together. What is asked for is rounded up to a
power of two, as PyTorch would do anyway, so that with less each size would have buffers of its own."""


@dataclass(slots=True)
class PinnedBuffer:
    """Bytes of the host that the device reads and writes. `used` is the event after which the last copy is over."""

    memory: torch.Tensor
    asked: int = 0
    """Bytes that whoever has it needs, rounded up."""
    used: Any = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class PinnedBuffers:
    """Buffers, taken and given back. What is given back may still be read by a copy: its event says until when."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.pinned_bytes = 0
        """Of all buffers, taken and free."""
        self._asked = self._most_asked = 0
        """Bytes that are asked for now, rounded up, and the most that were at once."""
        self._free: list[PinnedBuffer] = []
        """From the smallest to the largest."""
        # Handles are forgotten wherever the garbage collector runs, in the middle of `take` as well.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> PinnedBuffer:
        """A buffer of `nbytes` or more. OffloadError if the host cannot pin so much."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            most_asked = max(self._most_asked, self._asked + size)
            place = bisect_left(self._free, size, key=_size)
            if place < len(self._free) and _size(self._free[place]) <= _WASTE * size:
                buffer = self._free.pop(place)
            else:
                self._let_go(_WASTE * most_asked - size)
                buffer = PinnedBuffer(self._pinned(size))
                self.pinned_bytes += size
            buffer.asked = size
            self._asked, self._most_asked = self._asked + size, most_asked
            self.taken_bytes += buffer.nbytes
            return buffer

    def give_back(self, buffer: PinnedBuffer, used: Any) -> None:
        """Have a buffer free again, from the event `used` on."""
        with self._lock:
            self._asked -= buffer.asked
            self.taken_bytes -= buffer.nbytes
            buffer.used = used
            insort(self._free, buffer, key=_size)

    def clear(self) -> None:
        """Let go of all free buffers."""
        with self._lock:
            self._let_go(0)

    def _let_go(self, most: int) -> None:
        """Let go of free buffers, the largest first, until all take no more than `most` bytes, or none is free."""
        before = len(self._free)
        while self._free and self.pinned_bytes > most:
            self.pinned_bytes -= self._free.pop().nbytes
        if len(self._free) < before:
            _unpin()

    def _pinned(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OffloadError(
                f"the host cannot pin {format_bytes(size)} ({size} bytes) beside the {format_bytes(self.taken_bytes)} "
                f"({self.taken_bytes} bytes) that moved activations take already; raise the memory limit, or use "
                "offload='file:/path' for a model on the CPU"
            ) from error


def _size(buffer: PinnedBuffer) -> int:
    return buffer.nbytes


def _unpin() -> None:
    # PyTorch keeps pinned memory that nobody has, and has a function for that since version 2.10.
    empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()
