"""The instruments for a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from rotor_profiling.backends import Storages
from rotor_profiling.live_bytes import LiveBytes, OperatorBytes, no_scratch
from rotor_profiling.memory import MemoryMeter
from rotor_profiling.predicted.clock import OperatorSeconds, PredictedStopwatch
from rotor_profiling.predicted.meter import PredictedMeter
from rotor_profiling.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class Numbered:
    """Storages without memory have no address, and are called by the object that they are in C."""

    block: int = 1
    """The bytes that the device's allocator rounds up to a multiple of."""

    def key(self, storage: torch.UntypedStorage) -> int:
        return int(storage._cdata)

    def allocated(self, size: int) -> int:
        return -(-size // self.block) * self.block


@dataclass(frozen=True, slots=True)
class PredictedDevice:
    """A device of some `kind` with `memory_bytes` that are free, of which `workspace_bytes` are libraries' own.

    It is one of `count` that are alike and train one model together.

    `host_bandwidth` is that of copies to the host and back, both at once, in bytes a second each.

    `seconds` and `scratch` say what each operator takes. Tensors are fake ones on the CPU, whatever the kind: PyTorch
    runs no backward of tensors on a device that is not there. `chosen` is entered while stages run, so that the
    operators are those that PyTorch chooses for that kind.
    """

    kind: str
    memory_bytes: int
    seconds: OperatorSeconds
    scratch: OperatorBytes = no_scratch
    workspace_bytes: int = 0
    storages: Storages = Numbered()
    name: str = "a device that is not here"
    count: int = 1
    host_bandwidth: float = 1e9
    chosen: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def all_names(self) -> str:
        """What all of them together are called."""
        return self.name if self.count == 1 else f"{self.count} × {self.name}"

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        """A meter for fake tensors on `device`."""
        return PredictedMeter(LiveBytes({device.type}, self.kind, self.scratch))

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        """A stopwatch for what runs on fake tensors; the device does not matter."""
        return PredictedStopwatch(self.seconds)

    def operators(self) -> AbstractContextManager[object]:
        """Inside, the operators run that PyTorch chooses on that device."""
        return self.chosen()
