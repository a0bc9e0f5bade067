"""What memory and time are read from: chosen here, in one place, for all that is measured.

There are three things to read, and for each a small protocol: a `MemoryMeter`, a `Stopwatch`, and `Storages`, which
says what a storage is called and how many bytes its allocator counts. What is on the CPU or on CUDA is measured. For a
device that is not there, `using` puts other instruments in their place, which predict; nothing else differs: the same
code runs, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from rotor_profiling.memory import CpuMeter, CudaMeter, MemoryMeter
from rotor_profiling.timing import Stopwatch, cpu_stopwatch, cuda_stopwatch
from rotor_profiling.torch_compat import function_mode_stack, pop_function_mode, push_function_mode
from rotor_solver.errors import InvalidValueError

_CUDA_BLOCK = 512
"""Bytes: the caching allocator rounds every request up to a multiple of it (`kMinBlockSize` in torch)."""


class Storages(Protocol):
    """What storages are called, and their bytes."""

    def key(self, storage: torch.UntypedStorage) -> int:
        """A number that no other storage has that is alive."""

    def allocated(self, size: int) -> int:
        """The bytes that the device's allocator counts for a request of `size` bytes."""


class Backend(Protocol):
    """What memory and time of one device are read from."""

    @property
    def storages(self) -> Storages: ...

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        """A meter for what runs on `device`."""

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        """A stopwatch for what this thread runs on `device`."""


class Prediction(Backend, Protocol):
    """Backend for a device that is not there, and what else has to be known of it."""

    @property
    def name(self) -> str:
        """What the device is called, for people."""

    @property
    def all_names(self) -> str:
        """What all devices that train together are called, of which it is one."""

    @property
    def kind(self) -> str:
        """The kind of device that is predicted: "cuda", though the tensors are on the CPU."""

    @property
    def memory_bytes(self) -> int:
        """All the memory that the device can give this process."""

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second to the host's memory, and as many back at the same time."""

    @property
    def workspace_bytes(self) -> int:
        """What libraries allocate there once, and keep."""

    def operators(self) -> AbstractContextManager[object]:
        """Inside, the operators run that PyTorch chooses on that device."""


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Storages that have memory are called by their address."""

    block: int = 1

    def key(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()

    def allocated(self, size: int) -> int:
        return -(-size // self.block) * self.block


class _MeasuredOnCpu:
    storages: Storages = _Addresses()

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        return CpuMeter()

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        return cpu_stopwatch()


class _MeasuredOnCuda:
    storages: Storages = _Addresses(_CUDA_BLOCK)

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        _wake_engine(device)
        return CudaMeter(device)

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        return nullcontext(cuda_stopwatch(device))


@cache
def _wake_engine(device: torch.device) -> None:
    """Have the thread in which PyTorch's engine runs backwards on `device` take the device's context.

    cuBLAS warns that it has to set the context where a matrix product comes first, as in the backward of a stage.
    """
    with torch.enable_grad():
        scalar = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(scalar.exp(), scalar)


_MEASURED: dict[str, Backend] = {"cpu": _MeasuredOnCpu(), "cuda": _MeasuredOnCuda()}
_prediction: ContextVar[Prediction | None] = ContextVar("rotor_profiling.prediction", default=None)


@contextmanager
def using(prediction: Prediction) -> Iterator[None]:
    """Inside, all that is measured is predicted for another device, in this thread."""
    before = _prediction.set(prediction)
    try:
        yield
    finally:
        _prediction.reset(before)


def prediction() -> Prediction | None:
    """What predicts at the moment; None where things are measured."""
    return _prediction.get()


def backend_for(kind: str) -> Backend:
    """The instruments for a kind of device. ValueError for one whose allocator cannot be read."""
    found = _prediction.get() or _MEASURED.get(kind)
    if found is None:
        raise InvalidValueError(
            f"memory can be measured on cpu and cuda devices, not on {kind!r}; move the model to one",
            kind="unknown_device",
            name=kind,
        )
    return found


def memory_meter(device: torch.device) -> MemoryMeter:
    """A meter for what runs on `device`. ValueError for a kind of device whose allocator cannot be read."""
    return backend_for(device.type).memory_meter(device)


def stopwatch(device: torch.device) -> AbstractContextManager[Stopwatch]:
    """A stopwatch for what this thread runs on `device`."""
    return backend_for(device.type).stopwatch(device)


def storages_of(kind: str) -> Storages:
    """What storages on a kind of device are called, and their bytes; of an unknown kind, as on the CPU."""
    return (_prediction.get() or _MEASURED.get(kind, _MEASURED["cpu"])).storages


def operators() -> AbstractContextManager[object]:
    """Inside, the operators run that the device chooses: others than those here, where it is not there."""
    found = _prediction.get()
    return nullcontext() if found is None else found.operators()


@contextmanager
def operators_as_called() -> Iterator[None]:
    """Inside, nothing stands for operators that run on another device: TorchDynamo would trace it."""
    if _prediction.get() is None:
        yield
        return
    aside = [pop_function_mode() for _ in function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(aside):
            push_function_mode(mode)


# What libraries allocate on a CUDA device when they are first asked, and keep: there before a step is planned.


def allocate_workspaces(model: nn.Module, device: torch.device) -> None:
    """Have the memory allocated that matrix products take for good, if `model` has any: in forwards and in backwards.

    cuBLAS and cuBLASLt have a workspace in every thread, which PyTorch allocates when the thread first asks for it
    (`getCurrentCUDABlasHandle` and `getCUDABlasLtWorkspace` in aten/src/ATen/cuda). The engine runs backwards in a
    thread of its own, and a linear layer that is run again there needs what so far only forwards needed: on an H200
    with torch 2.11, 1 MiB that was not there when the step was planned. Where measurements are read from a file,
    no backward has run at all.
    """
    if device.type == "cuda" and prediction() is None and any(each.dim() == 2 for each in model.parameters()):
        _allocate(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # once for each stream, as workspaces are
def _allocate(device: torch.device, stream: int) -> None:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        scalar = torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)
        _Both.apply(scalar).backward()  # type: ignore[no-untyped-call]  # torch's


class _Both(torch.autograd.Function):
    """Multiplies in its forward, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor) -> torch.Tensor:
        return _product(scalar)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return _product(gradients[0])


def _product(scalar: torch.Tensor) -> torch.Tensor:
    """Of a linear layer with a bias, which cuBLASLt computes, and of two matrices."""
    with torch.no_grad():
        square = scalar.new_zeros(16, 16)
        return torch.addmm(square[0], square, square).mm(square).sum()
