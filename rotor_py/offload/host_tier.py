"""Activations of a CUDA device in pinned memory of the host, copied by streams of their own.

# Note [Streams]
#
#  1. The stream that trains is asked for where a copy is begun, before any other stream is made the current one: inside
#     of such a context, `current_stream` is the copying one, and nothing would wait for anything.
#  2. A copy out waits for all that the training stream has been given, the kernel that makes the bytes included.
#  3. Memory goes back to the allocator as memory of the training stream, whose next kernel may write to it. So that
#     stream waits for the copy first: on the device, and not the thread.
#  4. For the same reason a copy back waits for the training stream: kernels that it was given may still read what the
#     new memory held before. And it waits until its bytes have left.
#  5. A buffer of the host is used again by a copy that waits for the last one from it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.host_memory import available_host_bytes
from rotor_py.units import format_bytes

_LEAST = 2**20
"""Bytes of the smallest buffer; a guess."""
_WASTE = 2
"""How many times larger than asked for a buffer may be, and all of them together. What is asked for is rounded up to a
power of two, as PyTorch would do anyway, so that with less each size would have buffers of its own."""


class HostTier:
    """Pinned memory, and two streams for each device: one for copies out, and one for copies back."""

    name = "host"

    def __init__(self) -> None:
        """OffloadError where there is no CUDA device."""
        if not torch.cuda.is_available():
            raise OffloadError(
                "offload='host' moves activations from a CUDA device to the host, and there is no such device here; "
                "use offload='file:/path' for a model on the CPU",
                kind="no_cuda",
                name="host",
            )
        self.moved_bytes = 0
        self.buffers = PinnedBuffers()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    @property
    def held_bytes(self) -> int:
        return self.buffers.taken_bytes

    def reserve(self, nbytes: int) -> None:
        # It pins nothing: how many buffers of which size there will be shows in the first step.
        available = available_host_bytes() + self.buffers.pinned_bytes
        if nbytes > available:
            raise OffloadError(
                f"a step moves {format_bytes(nbytes)} ({nbytes} bytes) to the host, where {format_bytes(available)} "
                f"({available} bytes) are available; free memory there, raise the limit of the device so that "
                "less moves, or leave offload= out",
                kind="host_full",
                nbytes=nbytes,
                available=available,
            )

    def move_out(self, storage: torch.UntypedStorage) -> MovedToHost:
        if storage.device.type != "cuda":
            raise OffloadError(
                f"only memory of CUDA devices goes to the host, and this is on {storage.device}",
                kind="other_device",
                name=str(storage.device),
            )
        self.moved_bytes += storage.nbytes()
        return MovedToHost(self, storage)

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams of a device for copies out and back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def close(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.synchronize()
        self.buffers.clear()


class MovedToHost:
    """A storage in pinned memory; see `Moved`. Numbers are rules of the Note."""

    def __init__(self, tier: HostTier, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._buffers, self._device = tier.buffers, storage.device
        self._storage: torch.UntypedStorage | None = storage
        self._training = torch.cuda.current_stream(self._device)  # 1
        out, self._back = tier.streams(self._device)
        self._buffer: PinnedBuffer | None = tier.buffers.take(self.nbytes)
        out.wait_stream(self._training)  # 2
        if self._buffer.used is not None:
            out.wait_event(self._buffer.used)  # 5
        with torch.cuda.stream(out):
            self._host_bytes().copy_(_bytes_of(storage), non_blocking=True)
            self._left: Any = out.record_event()
        self._arrived: Any = None

    def wait_out(self) -> None:
        if self._buffer is not None and self._storage is not None and self._arrived is None:
            self._training.wait_event(self._left)  # 3
            self._storage = None

    def fetch(self) -> None:
        if self._storage is not None:
            if self._arrived is None:
                self._forget()  # it has not left, and stays
            return
        training = torch.cuda.current_stream(self._device)  # 1: the engine runs backwards in streams of their forwards
        with torch.cuda.device(self._device):
            self._storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self._training = training
        self._back.wait_stream(training)  # 4
        self._back.wait_event(self._left)  # 4
        with torch.cuda.stream(self._back):
            _bytes_of(self._storage).copy_(self._host_bytes(), non_blocking=True)
            self._arrived = self._back.record_event()

    def storage(self) -> torch.UntypedStorage:
        self.fetch()
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._forget()
        assert self._storage is not None
        return self._storage

    def _host_bytes(self) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer.memory[: self.nbytes]

    def _forget(self) -> None:
        """The buffer is not needed any more. The training stream waits for the copy that may be under way (3)."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        last = self._left if self._arrived is None else self._arrived
        self._training.wait_event(last)
        self._buffers.give_back(buffer, last)

    def __del__(self) -> None:
        if hasattr(self, "_arrived"):
            self._forget()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
    """Pinned buffers, used again and again: to pin memory takes as long as many copies.

    A batch of another length moves other sizes. So `take` gives the smallest free buffer that is large enough, and at
    most twice as large: with more, a small activation would hold the place of a large one, which were pinned anew.

    What lies free is bounded as well: all buffers together take at most twice the most that was asked for at once. As
    much is never needed by any step that has been: at the loss, all that it moves is out at once, in buffers of at most
    twice the size. What is beyond is left over from steps of other sizes.

    What is given back may still be read by a copy: its event says until when.
    """

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
                "offload='file:/path' for a model on the CPU",
                kind="cannot_pin",
                nbytes=size,
            ) from error


def _size(buffer: PinnedBuffer) -> int:
    return buffer.nbytes


def _unpin() -> None:
    # PyTorch keeps pinned memory that nobody has, and has a function for that since version 2.10.
    empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()
