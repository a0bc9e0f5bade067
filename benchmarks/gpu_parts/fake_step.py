"""A step on tensors without memory: its seconds by a roofline, and its requests to the allocator, replayed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import tensors_in
from rotor_py.devices.device import Device
from rotor_py.devices.requests import Allocate, Event, Free
from rotor_py.devices.roofline import Roofline
from rotor_py.devices.scratch import scratch_bytes


@dataclass(eq=False)
class Followed:
    """A storage that is held, under a number of its own: handles are used again."""

    number: int
    size: int


class FakeStep(TorchDispatchMode):
    """Follows storages from the operator that makes them to their end. Use within a FakeTensorMode."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.stream = 0
        """On which requests are made: each stream has pools of its own."""
        self.paused = False
        """What is made meanwhile is described, not held: DTensor has results of global size made for their shapes."""
        self.seconds = 0.0
        self.events: list[Event] = []
        self._roofline = Roofline(device)
        self._followed: dict[int, Followed] = {}
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
        made = [each.untyped_storage() for each in tensors_in(out)]
        for storage in made:
            if storage._cdata not in given:
                self._follow(storage)
        inside = scratch_bytes(func, args, kwargs, out)
        if inside:
            self._count += 1
            self.events += [Allocate(self._count, inside, self.stream), Free(self._count)]
        self.seconds += self._roofline(func, args, kwargs, out)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        handle = storage._cdata
        if handle in self._followed or not storage.nbytes():
            return
        self._count += 1
        self._followed[handle] = Followed(self._count, storage.nbytes())
        self.events.append(Allocate(self._count, storage.nbytes(), self.stream))
        weakref.finalize(storage, self._end, handle).atexit = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """After `resize_`, by which FSDP2 frees what it has gathered, and takes it again."""
        if not storage.nbytes():
            self._end(storage._cdata)
        else:
            self._follow(storage)

    def _end(self, handle: int) -> None:
        followed = self._followed.pop(handle, None)
        if followed is not None:
            self.events.append(Free(followed.number))
