"""Offload activations of a CUDA device to pinned host memory, copied on separate streams."""

# Note [Streams]
#
#  1. Query the training stream before the copying stream becomes current: afterwards, `current_stream` returns the
#     copying stream, which would then wait for itself instead of for the training stream.
#  2. A copy out waits for all work queued on the training stream, including the kernel that computes the bytes.
#  3. The allocator gives freed memory to the training stream, whose next kernel may write to it. So the training
#     stream, but not the Python thread, waits for the copy before the memory is freed.
#  4. For the same reason, a copy back waits for the training stream: queued kernels may still read the previous content
#     of the new memory. A copy back also waits for the copy out of the same bytes.
#  5. A copy into a reused host buffer waits for the buffer's last copy.

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from rotor_py.errors import OffloadError
from rotor_py.host_memory import available_host_bytes
from rotor_py.offload.offload_saved import Moved, Tier
from rotor_py.units import exact_bytes

_LEAST = 2**20  # bytes of the smallest buffer. A guess: smaller ones waste time on pinning, larger ones waste memory
# Largest ratio of a buffer's bytes to those of its request, and of all buffers' bytes to the peak of all requests.
# Requests are rounded up to powers of two: with a ratio below two, requests of different sizes would share no buffer.
_WASTE = 2


class HostTier(Tier):
    def __init__(self) -> None:
        if not torch.cuda.is_available():
            message = (
                "use offload='file:/path' for a model on the CPU: offload='host' needs a CUDA device, and there is none"
            )
            raise OffloadError(message, kind="no_cuda", name="host")
        self.buffers = PinnedBuffers()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def reserve(self, nbytes: int) -> None:
        # Only compare with the host's memory: buffers are pinned in the first step, which shows their sizes.
        available = available_host_bytes() + self.buffers.pinned_bytes
        if nbytes > available:
            message = (
                f"a step offloads {exact_bytes(nbytes)} to the host, where {exact_bytes(available)} are available; "
                "free host memory, raise the device's limit to offload less, or leave offload= out"
            )
            raise OffloadError(message, kind="host_full", nbytes=nbytes, available=available)

    def move_out(self, storage: torch.UntypedStorage) -> MovedToHost:
        if storage.device.type != "cuda":
            message = f"only memory of CUDA devices can be offloaded to the host, got memory on {storage.device}"
            raise OffloadError(message, kind="other_device", name=str(storage.device))
        self.moved_bytes += storage.nbytes()
        return MovedToHost(self, storage)

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    def close(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.synchronize()
        self.buffers.clear()


class MovedToHost(Moved):
    """A storage that is offloaded to pinned host memory; see `Moved`. Rules are those of Note [Streams]."""

    def __init__(self, tier: HostTier, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self._buffers, self._device = tier.buffers, storage.device
        self._training = torch.cuda.current_stream(self._device)  # Rule 1
        out, self._back = tier.streams(self._device)
        self._buffer: PinnedBuffer | None = tier.buffers.take(self.nbytes)
        out.wait_stream(self._training)  # Rule 2
        if self._buffer.used is not None:
            out.wait_event(self._buffer.used)  # Rule 5
        with torch.cuda.stream(out):
            self._host_bytes().copy_(_bytes_of(storage), non_blocking=True)
            self._left: Any = out.record_event()
        self._arrived: Any = None

    def wait_out(self) -> None:
        if self._buffer is not None and self._storage is not None and self._arrived is None:
            self._training.wait_event(self._left)  # Rule 3
            self._storage = None

    def fetch(self) -> None:
        if self._storage is not None:
            if self._arrived is None:
                self._forget()  # `wait_out` has not released the storage, so nothing is copied back
            return
        training = torch.cuda.current_stream(self._device)  # Rule 1. Autograd runs a backward in its forward's stream
        with torch.cuda.device(self._device):
            self._storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self._training = training
        self._back.wait_stream(training)  # Rule 4
        self._back.wait_event(self._left)  # Rule 4
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
        """Give the buffer back, and have the training stream wait for its last copy (Rule 3)."""
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
    """Pinned host memory, which the device can read and write. `used` is the CUDA event of its last copy."""

    memory: torch.Tensor
    asked: int = 0  # bytes of the current request, rounded up
    used: Any = None


class PinnedBuffers:
    """A pool of pinned buffers, which are reused because pinning takes as long as many copies.

    A request gets the smallest free buffer of once to twice its bytes. All take at most twice the peak of all requests.
    """

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.pinned_bytes = 0  # bytes of all buffers, taken or free
        self._asked = self._most_asked = 0  # bytes of the requests in progress, rounded up, and the peak of these
        self._free: list[PinnedBuffer] = []  # sorted by size
        # Reentrant, since the garbage collector may free a `MovedToHost`, which gives its buffer back, inside `take`.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> PinnedBuffer:
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            most_asked = max(self._most_asked, self._asked + size)
            place = bisect_left(self._free, size, key=attrgetter("memory.nbytes"))
            if place < len(self._free) and self._free[place].memory.nbytes <= _WASTE * size:
                buffer = self._free.pop(place)
            else:
                self._let_go(_WASTE * most_asked - size)
                buffer = PinnedBuffer(self._pinned(size))
                self.pinned_bytes += size
            buffer.asked = size
            self._asked, self._most_asked = self._asked + size, most_asked
            self.taken_bytes += buffer.memory.nbytes
            return buffer

    def give_back(self, buffer: PinnedBuffer, used: Any) -> None:
        with self._lock:
            self._asked -= buffer.asked
            self.taken_bytes -= buffer.memory.nbytes
            buffer.used = used
            insort(self._free, buffer, key=attrgetter("memory.nbytes"))

    def clear(self) -> None:
        with self._lock:
            self._let_go(0)

    def _let_go(self, most: int) -> None:
        """Release free buffers, largest first, until all buffers take at most `most` bytes or none is free."""
        before = len(self._free)
        while self._free and self.pinned_bytes > most:
            self.pinned_bytes -= self._free.pop().memory.nbytes
        # PyTorch caches freed pinned memory. From torch 2.10 on, it can be made to release it.
        empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
        if len(self._free) < before and empty is not None and torch.cuda.is_initialized():
            empty()

    def _pinned(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            message = (
                f"raise the memory limit, or leave offload= out: the host cannot pin {exact_bytes(size)} besides "
                f"{exact_bytes(self.taken_bytes)} of offloaded activations"
            )
            raise OffloadError(message, kind="cannot_pin", nbytes=size) from error
