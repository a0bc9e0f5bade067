"""A step on tensors without memory, followed: its seconds by a roofline, and its requests to the allocator.

What a step reserves is known once its requests have been replayed (caching_allocator.py). They are the storages that
operators make and that end when nobody holds them, and what kernels allocate inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.predicted.resized_storages import resizes_told
from rotor_profiling.storage import tensors_in
from rotor_py.devices.device import Device
from rotor_py.devices.requests import Allocate, Event, Free
from rotor_py.devices.roofline import Roofline
from rotor_py.devices.scratch import scratch_bytes


class FollowedStep(TorchDispatchMode):
    """Follows what runs inside it, on `device`, which need not be there.

    Tensors are fake ones (`FakeTensorMode`) or real ones; either way only their sizes count. What was there before has
    to be told by `hold`.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.stream = 0
        """On which requests are made: each stream has pools of its own."""
        self.paused = False
        """What is made meanwhile is described, not held: DTensor has results of global size made for their shapes."""
        self.seconds = 0.0
        self.events: list[Event] = []
        self._roofline = Roofline(device)
        self._followed: dict[int, int] = {}
        """Handles of storages, which are used again, and the numbers of those that have them now."""
        self._count = 0

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is there already: parameters, the optimizer's state, the batch."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # its parts come here by themselves
        if self.paused:
            return func(*args, **kwargs)
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            # An operator that returns what it was given, or a view of it, makes nothing.
            if tensor.untyped_storage()._cdata not in given:
                self._follow(tensor.untyped_storage())
        inside = scratch_bytes(func, args, kwargs, out)
        if inside:
            self._count += 1
            self.events += [Allocate(self._count, inside, self.stream), Free(self._count)]
        self.seconds += self._roofline(func, args, kwargs, out)
        return out

    def resizing(self) -> AbstractContextManager[None]:
        """Also follow `resize_` of storages, by which FSDP2 frees what it has gathered, and takes it again."""
        return resizes_told(self._resized)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._end(storage._cdata)
        self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        handle = storage._cdata
        if handle in self._followed or not storage.nbytes():
            return
        self._count += 1
        self._followed[handle] = self._count
        self.events.append(Allocate(self._count, storage.nbytes(), self.stream))
        weakref.finalize(storage, self._end, handle).atexit = False

    def _end(self, handle: int) -> None:
        number = self._followed.pop(handle, None)
        if number is not None:
            self.events.append(Free(number))


def followed(step: Callable[[], object], device: Device, present: Iterable[torch.Tensor] = ()) -> FollowedStep:
    """Follow `step` twice, since the first one makes the optimizer's state; seconds are those of the second."""
    found = FollowedStep(device)
    found.hold(present)
    with found:
        step()
        found.seconds = 0.0
        step()
    return found
