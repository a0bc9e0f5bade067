"""Choose the memory meter and the stopwatch for measurements.

The CPU and a present CUDA device are measured. For an absent device, `using` installs a `Prediction`, whose meter and
stopwatch the same code uses on fake tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from rotor_profiling.memory import CpuMeter, CudaMeter, MemoryMeter
from rotor_profiling.timing import CudaStopwatch, Stopwatch, cpu_stopwatch
from rotor_profiling.torch_compat import function_mode_stack, pop_function_mode, push_function_mode
from rotor_solver.described_error import InvalidValueError
from rotor_solver.watching import holding


@dataclass(frozen=True, slots=True)
class Storages:
    """Identifies storages of a device type, and rounds bytes up to multiples of `block`, as the allocator does."""

    block: int
    fake: bool = False  # Whether storages are fake, and so identified by their C++ object instead of their data

    def key(self, storage: torch.UntypedStorage) -> int:
        """Return a number that is unique among live storages."""
        return int(storage._cdata) if self.fake else storage.data_ptr()

    def allocated(self, size: int) -> int:
        """Return the bytes that the device's allocator counts for a request of `size` bytes."""
        return -(-size // self.block) * self.block


@dataclass(frozen=True, slots=True)
class Prediction(ABC):
    """Meter, stopwatch and properties of an absent device of type `kind`; `PredictedDevice` of rotor_py implements it.

    Libraries use `workspace_bytes` of its free `memory_bytes`. It is one of `count` equal devices that train one model
    together. `host_bandwidth` is the bytes per second of copies to or from the host, with both directions busy. Inside
    the context `operators`, PyTorch runs the operators of such a device.
    """

    kind: str
    memory_bytes: int
    _: KW_ONLY
    workspace_bytes: int = 0
    storages: Storages = Storages(1, fake=True)
    name: str = "a device that is not here"
    count: int = 1
    host_bandwidth: float = 1e9
    operators: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def all_names(self) -> str:
        return self.name if self.count == 1 else f"{self.count} × {self.name}"

    @abstractmethod
    def memory_meter(self, device: torch.device) -> MemoryMeter: ...

    @abstractmethod
    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]: ...


# CUDA's caching allocator rounds every request up to a multiple of 512 bytes (`kMinBlockSize` in torch).
_STORAGES = {"cpu": Storages(1), "cuda": Storages(512)}


@cache
def _wake_engine(device: torch.device) -> None:
    # Create the CUDA context in autograd's thread for `device`: without it, cuBLAS warns at the first matrix product.
    with torch.enable_grad():
        scalar = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(scalar.exp(), scalar)


_prediction: ContextVar[Prediction | None] = ContextVar("rotor_profiling.prediction", default=None)


def using(prediction: Prediction) -> AbstractContextManager[None]:
    """Inside this context, have all measurements of this thread use the meter and stopwatch of `prediction`."""
    return holding(_prediction, prediction)


def prediction() -> Prediction | None:
    """Return the prediction of the enclosing `using`; None outside of one, where devices are measured."""
    return _prediction.get()


def _is_cpu(device: torch.device) -> bool:
    if device.type not in _STORAGES:
        message = f"move the model to a cpu or cuda device: {device.type!r} cannot be measured"
        raise InvalidValueError(message, kind="unknown_device", name=device.type)
    return device.type == "cpu"


def memory_meter(device: torch.device) -> MemoryMeter:
    """Return a meter of memory on `device`. Raises ValueError for device types other than CPU and CUDA."""
    if (predicted := prediction()) is not None:
        return predicted.memory_meter(device)
    if _is_cpu(device):
        return CpuMeter()
    _wake_engine(device)
    return CudaMeter(device)


def stopwatch(device: torch.device) -> AbstractContextManager[Stopwatch]:
    """Return a stopwatch for this thread's work on `device`. Raises ValueError as `memory_meter` does."""
    if (predicted := prediction()) is not None:
        return predicted.stopwatch(device)
    return cpu_stopwatch() if _is_cpu(device) else nullcontext(CudaStopwatch(device))


def storages_of(kind: str) -> Storages:
    """Return the `Storages` of the predicted device, if any, else of the device type `kind`; the CPU's if unknown."""
    if (predicted := prediction()) is not None:
        return predicted.storages
    return _STORAGES.get(kind, _STORAGES["cpu"])


def operators() -> AbstractContextManager[object]:
    """Return a context in which operators of the predicted device, such as attention kernels, replace the CPU's."""
    predicted = prediction()
    return nullcontext() if predicted is None else predicted.operators()


@contextmanager
def operators_as_called() -> Iterator[None]:
    """Inside this context, suspend all function modes, such as that of `operators`, which TorchDynamo would trace."""
    if prediction() is None:
        yield
        return
    aside = [pop_function_mode() for _ in function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(aside):
            push_function_mode(mode)


# CUDA libraries allocate workspaces at their first use, and keep them. Allocate these before planning, to count them.


def allocate_workspaces(model: nn.Module, device: torch.device) -> None:
    """Allocate the workspaces of matrix products, which stay allocated, if `model` has a parameter that is a matrix.

    PyTorch allocates the workspaces of cuBLAS and cuBLASLt at each thread's first use (`getCurrentCUDABlasHandle` and
    `getCUDABlasLtWorkspace` in aten/src/ATen/cuda), also in the engine's thread. With cached measurements, no backward
    runs before planning, so that plans would miss these bytes: 1 MiB on an H200 with torch 2.11.
    """
    if device.type == "cuda" and prediction() is None and any(each.dim() == 2 for each in model.parameters()):
        _allocate(device, torch.cuda.current_stream(device).cuda_stream)


@cache  # PyTorch has one workspace per stream
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
    """Compute a linear layer with a bias, which uses cuBLASLt, and a matrix product, which uses cuBLAS."""
    with torch.no_grad():
        square = scalar.new_zeros(16, 16)
        return torch.addmm(square[0], square, square).mm(square).sum()
