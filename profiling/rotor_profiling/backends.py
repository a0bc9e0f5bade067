"""Select where memory and time are read from, for all measurements.

Three protocols: a `MemoryMeter`, a `Stopwatch`, and `Storages`, which identifies storages and counts their bytes.
Devices present, CPU or CUDA, are measured. For an absent device, `using` installs instruments that predict; the same
code then runs on fake tensors.
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
from rotor_solver.described_error import InvalidValueError

_CUDA_BLOCK = 512
"""The caching allocator rounds every request up to a multiple of these bytes (`kMinBlockSize` in torch)."""


class Storages(Protocol):
    """Keys of storages, and their bytes."""

    def key(self, storage: torch.UntypedStorage) -> int:
        """Return a number that is unique among live storages."""

    def allocated(self, size: int) -> int:
        """Return the bytes that the device's allocator counts for a request of `size` bytes."""


class Backend(Protocol):
    """Instruments for memory and time of one device."""

    @property
    def storages(self) -> Storages: ...

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        """Return a meter for `device`."""

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        """Return a stopwatch for this thread's work on `device`."""


class Prediction(Backend, Protocol):
    """Backend for an absent device, with its properties."""

    @property
    def name(self) -> str:
        """Display name of the device."""

    @property
    def all_names(self) -> str:
        """Display name of all devices that train together, of which it is one."""

    @property
    def kind(self) -> str:
        """Type of the predicted device: "cuda", though the tensors are on the CPU."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the device available to this process."""

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second to host memory; as many back at the same time."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that libraries allocate once and keep."""

    def operators(self) -> AbstractContextManager[object]:
        """Return a context that runs the operators that PyTorch chooses on that device."""


@dataclass(frozen=True, slots=True)
class _Addresses:
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
    """Initialize the device context in the thread in which the engine runs backwards on `device`.

    Otherwise cuBLAS warns if a matrix product comes first, as in the backward of a stage.
    """
    with torch.enable_grad():
        scalar = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(scalar.exp(), scalar)


_MEASURED: dict[str, Backend] = {"cpu": _MeasuredOnCpu(), "cuda": _MeasuredOnCuda()}
_prediction: ContextVar[Prediction | None] = ContextVar("rotor_profiling.prediction", default=None)


@contextmanager
def using(prediction: Prediction) -> Iterator[None]:
    """Predict all measurements for another device inside this context, in this thread."""
    before = _prediction.set(prediction)
    try:
        yield
    finally:
        _prediction.reset(before)


def prediction() -> Prediction | None:
    """Return the active prediction; None while measuring."""
    return _prediction.get()


def backend_for(kind: str) -> Backend:
    """Return the instruments for a device type. Raises ValueError if its allocator cannot be read."""
    found = _prediction.get() or _MEASURED.get(kind)
    if found is None:
        raise InvalidValueError(
            f"memory can be measured on cpu and cuda devices, not on {kind!r}; move the model to one",
            kind="unknown_device",
            name=kind,
        )
    return found


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return a meter for `device`. Raises ValueError for a device type whose allocator cannot be read."""
    return backend_for(device.type).memory_meter(device)


def stopwatch(device: torch.device) -> AbstractContextManager[Stopwatch]:
    """Return a stopwatch for this thread's work on `device`."""
    return backend_for(device.type).stopwatch(device)


def storages_of(kind: str) -> Storages:
    """Return the storage counter of a device type; for an unknown type, that of the CPU."""
    return (_prediction.get() or _MEASURED.get(kind, _MEASURED["cpu"])).storages


def operators() -> AbstractContextManager[object]:
    """Return a context that runs the operators that the device chooses, even if it is absent."""
    found = _prediction.get()
    return nullcontext() if found is None else found.operators()


@contextmanager
def operators_as_called() -> Iterator[None]:
    """Suspend the substitution of operators for an absent device, which TorchDynamo would trace."""
    if _prediction.get() is None:
        yield
        return
    aside = [pop_function_mode() for _ in function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(aside):
            push_function_mode(mode)


# Workspaces that libraries allocate on a CUDA device at first use and keep: allocated before planning a step.


def allocate_workspaces(model: nn.Module, device: torch.device) -> None:
    """Allocate the persistent workspaces of matrix products, if `model` has any, for forwards and backwards.

    cuBLAS and cuBLASLt have a workspace per thread, which PyTorch allocates at the thread's first use
    (`getCurrentCUDABlasHandle` and `getCUDABlasLtWorkspace` in aten/src/ATen/cuda). The engine runs backwards in its
    own thread, and a linear layer recomputed there needs its workspace too: on an H200 with torch 2.11, 1 MiB missing
    from the plan. With cached measurements, no backward has run before planning.
    """
    if device.type == "cuda" and prediction() is None and any(each.dim() == 2 for each in model.parameters()):
        _allocate(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # once per stream, like workspaces
def _allocate(device: torch.device, stream: int) -> None:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        scalar = torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)
        _Both.apply(scalar).backward()  # type: ignore[no-untyped-call]  # torch's


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor) -> torch.Tensor:
        return _product(scalar)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return _product(gradients[0])


def _product(scalar: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer with a bias, which uses cuBLASLt, and a product of two matrices."""
    with torch.no_grad():
        square = scalar.new_zeros(16, 16)
        return torch.addmm(square[0], square, square).mm(square).sum()
