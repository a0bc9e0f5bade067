"""Pinned memory of the host for copies, used again and again: to pin memory takes as long as many copies."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.units import format_bytes

_BLOCK = 2**20
"""Bytes: buffers are multiples of it, so that activations of nearly the same size use the same ones. A guess."""


@dataclass(slots=True)
class PinnedBuffer:
    """Bytes of the host that the device reads and writes. `used` is the event after which the last copy is over."""

    memory: torch.Tensor
    used: Any = None


class PinnedBuffers:
    """Buffers, taken and given back. What is given back may still be read by a copy: its event says until when."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self._free: dict[int, list[PinnedBuffer]] = {}
        # Handles are forgotten wherever the garbage collector runs, in the middle of `take` as well.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> PinnedBuffer:
        """A buffer of `nbytes` or a little more. OffloadError if the host cannot pin so much."""
        size = -(-nbytes // _BLOCK) * _BLOCK
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else PinnedBuffer(self._pinned(size))
            self.taken_bytes += size
            return buffer

    def give_back(self, buffer: PinnedBuffer, used: Any) -> None:
        """Have a buffer free again, from the event `used` on."""
        size = buffer.memory.numel()
        with self._lock:
            self.taken_bytes -= size
            buffer.used = used
            self._free.setdefault(size, []).append(buffer)

    def clear(self) -> None:
        """Let go of all free buffers."""
        with self._lock:
            self._free.clear()

    def _pinned(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OffloadError(
                f"the host cannot pin {format_bytes(size)} ({size} bytes) beside the {format_bytes(self.taken_bytes)} "
                f"({self.taken_bytes} bytes) that moved activations take already; raise the memory limit, or use "
                "offload='file:/path' for a model on the CPU"
            ) from error
