"""Devices that run out of memory when told to: at a number of bytes, or at one operator of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import tensors_in
from rotor_py.stage.error_context import watched


def out_of_memory(asked: int = 1024) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked / 2**20:.2f} MiB. GPU 0 has")


def out_of_cpu_memory(asked: int = 1024) -> RuntimeError:
    text = f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {asked} bytes. Error code 12"
    return RuntimeError(f"[enforce fail at alloc_cpu.cpp:117] err == 0. {text} (Cannot allocate memory)")


class Capacity(TorchDispatchMode):
    """A device of `size` bytes for what operators make inside the mode, as far as operators return it.

    `peak` is the most that was there at once, `errors` counts what was refused.
    """

    def __init__(self, size: float = float("inf")) -> None:
        super().__init__()
        self.size = size
        self.peak = self.errors = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def held(self) -> int:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors_in([args, kwargs or {}])}
        made = function(*args, **(kwargs or {}))
        storages = [each.untyped_storage() for each in tensors_in(made)]
        new = {each._cdata: (StorageWeakRef(each), each.nbytes()) for each in storages if each._cdata not in given}
        del storages
        held = self.held
        asked = sum(size for key, (_, size) in new.items() if key not in self._live)
        if held + asked > self.size:
            self.errors += 1
            raise out_of_memory(asked)
        self._live.update(new)
        self.peak = max(self.peak, held + asked)
        return made


class AtOperators(TorchDispatchMode):
    """Runs out of memory, or is interrupted, right after the operators with these numbers."""

    def __init__(self, *at: int, error: Callable[[], BaseException] = out_of_memory) -> None:
        super().__init__()
        self.at, self.calls, self.errors, self._error = at, 0, 0, error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls in self.at:
            self.errors += 1
            raise self._error()
        return made

    @contextmanager
    def inside_stages(self) -> Iterator[AtOperators]:
        """The mode, on from where a stage begins to where it ends: TorchDynamo captures nothing inside of a mode."""
        with watched(lambda doing, name, begins: self.turn(begins)):
            yield self

    def turn(self, on: bool) -> None:
        """Enter the mode, or leave it."""
        if on:
            self.__enter__()
        else:
            self.__exit__(None, None, None)
