"""Simulate the devices that a step is planned for: predicted memory and times, sharding, and the process group.

Collectives of PyTorch's "fake" backend return at once, with arbitrary values. Predictions use only shapes, so this one
process stands for each of the processes that train together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotor_profiling import torch_compat
from rotor_profiling.backends import Prediction, Storages, using
from rotor_profiling.followed_storages import LiveBytes, OperatorBytes
from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.timing import Stopwatch
from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.errors import InvalidValueError, UnsupportedModelError
from rotor_py.estimation.caching_allocator import MIN_BLOCK
from rotor_py.estimation.cuda_autocast import cuda_autocast
from rotor_py.estimation.cuda_operators import cuda_operators
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies, construct_on_meta
from rotor_py.estimation.roofline import scratch_bytes, work_of
from rotor_py.estimation.simulated_step import SimulatedStep, find_reservation, find_room, promise

# Share of the data sheet's bandwidth reached by copies in both directions at once: 51 of 64 GB/s were measured on PCI
# Express 5 (https://github.com/NVIDIA/nvbandwidth/issues/53).
_BOTH_WAYS = 0.8


# Predicts the seconds of a call, given (operator, arguments, keywords, result).
OperatorSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]


class PredictedStopwatch(torch_compat.TorchDispatchMode):
    """Dispatch mode that adds up the predicted `seconds` of the operators called inside it."""

    exact = True

    def __init__(self, seconds: OperatorSeconds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._seconds = seconds
        self._lap = 0.0
        self._laps: list[float] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow TorchDynamo to capture inside this mode, which also gets the operators of captured graphs."""
        return True

    def start(self) -> None:
        self._lap, self._laps = 0.0, []

    def lap(self) -> None:
        self._laps.append(self._lap)
        self._lap = 0.0

    def stop(self) -> list[float]:
        return self._laps

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._lap += self._seconds(func, args, kwargs, result)
        return result


class PredictedMeter:
    """Counts the bytes of storages made inside the context, and of kernels' scratch, by phases that `mark` begins."""

    def __init__(self, live: LiveBytes) -> None:
        self.phases: dict[str, Phase] = {}
        self._live = live
        self._name, self._start = "", 0

    def __enter__(self) -> PredictedMeter:
        self._live.__enter__()
        return self

    def mark(self, name: str) -> None:
        live = self._live
        live.settle()
        self.phases[self._name] = Phase(self._start, live.peak, live.now)
        self._name, self._start = name, live.now
        live.begin_peak()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if error is None:
            self.mark("")  # ends the last phase


@dataclass(frozen=True, slots=True)
class PredictedDevice(Prediction):
    """A simulated device. `seconds` and `scratch` predict seconds and scratch bytes of an operator.

    All tensors are fake, on the CPU.
    """

    seconds: OperatorSeconds
    scratch: OperatorBytes = lambda *_: 0

    def memory_meter(self, device: torch.device) -> MemoryMeter:
        return PredictedMeter(LiveBytes({device.type}, self.kind, self.scratch))

    def stopwatch(self, device: torch.device) -> AbstractContextManager[Stopwatch]:
        return PredictedStopwatch(self.seconds)


def prediction_for(device: Device, count: int = 1) -> PredictedDevice:
    """Return a simulation of `device`, one of `count` equal ones, with seconds by `work_of`."""
    return PredictedDevice(
        kind="cuda",
        name=device.name,
        count=count,
        host_bandwidth=_BOTH_WAYS * device.pcie_bandwidth,
        memory_bytes=device.usable_bytes,
        seconds=lambda *call: work_of(*call).seconds(device),
        scratch=scratch_bytes,
        workspace_bytes=workspace_bytes(device),
        storages=Storages(MIN_BLOCK, fake=True),
        operators=nullcontext if device.vendor == "cpu" else partial(cuda_operators, device.compute_capability),
    )


Sharding = Literal["blocks", "whole"]


def shard_parameters(
    model: nn.Module, mesh: DeviceMesh, sharding: Sharding = "blocks", precision: torch.dtype | None = None
) -> None:
    """Apply `fully_shard` over `mesh`. With `precision`, modules run in this dtype and reduce gradients in 32 bits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(precision, None if precision is None else torch.float32)
    for module in (*(blocks_of(model) if sharding == "blocks" else ()), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with siblings of the same class in a list, such as a transformer's layers."""
    classes = Counter(map(type, module.children() if isinstance(module, nn.ModuleList | nn.Sequential) else ()))
    for child in module.children():
        if classes[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks_of(child)


@contextmanager
def world_of(size: int) -> Iterator[DeviceMesh]:
    """Within the context, this process is rank 0 of `size` simulated processes. Yields the device mesh of all."""
    if dist.is_initialized():
        message = "predict a step of several devices before init_process_group, or in a separate process"
        raise UnsupportedModelError(message, kind="has_process_group")
    # The import of `FakeStore` registers the "fake" backend.
    dist.init_process_group("fake", rank=0, world_size=size, store=torch_compat.FakeStore())
    try:
        with torch_compat.unset_fake_temporarily():  # a mesh reads the ranks from a tensor, which must not be fake
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()


Shard = Callable[[nn.Module, DeviceMesh], object] | Sharding


class SimulatedDevices:
    """Converts, measures and plans models for simulated `devices`.

    With several devices, `shard` says how parameters are sharded: "blocks" (the default) or "whole", which gather in
    the dtype `precision`, or a function of the model and the mesh that calls `fully_shard`.
    """

    def __init__(self, devices: Devices, *, shard: Shard | None = None, precision: torch.dtype | None = None) -> None:
        self.devices = devices
        for name, value in (("shard", shard), ("precision", precision)):
            if devices.count == 1 and value is not None:
                message = f"{name} needs several devices that share the parameters; write device='h100:8'"
                raise InvalidValueError(message, kind="one_device", name=name)
        if precision is not None and callable(shard):
            message = "leave out precision: a function given as shard passes its own mp_policy to fully_shard"
            raise InvalidValueError(message, kind="excluded_together", name="precision")
        if not callable(shard) and shard not in (None, "blocks", "whole"):
            message = f"shard is {shard!r}; give 'blocks' or 'whole', or a function of model and mesh"
            raise InvalidValueError(message, kind="unknown_value", name="shard")
        self._shard = (
            shard if callable(shard) else partial(shard_parameters, sharding=shard or "blocks", precision=precision)
        )
        self._mesh: DeviceMesh | None = None
        self._mode = DeviceFakeMode()
        self.fakes = FakeCopies(self._mode)  # makes fake copies of models, samples and optimizers

    making = staticmethod(construct_on_meta)  # context in which models are built on the meta device

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for calls of the other methods; with several devices, this process is rank 0 of as many processes."""
        if self.devices.count == 1:
            yield
            return
        with world_of(self.devices.count) as self._mesh:
            yield

    def model(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` on fake tensors; with several devices, sharded over them."""
        found = self.fakes.model(model)
        if self._mesh is not None:
            with self.measuring():
                self._shard(found, self._mesh)
        return found

    def follow(self, step: SimulatedStep) -> None:
        """With several devices, plan the measured model of `step` with the communication bytes that its step takes."""
        if self._mesh is not None:
            find_room(step, self.devices.each)

    def reserve(self, step: SimulatedStep, *, keep_limit: bool) -> Reservation:
        found = find_reservation(step, self.devices.each, keep_limit=keep_limit)
        if self._mesh is not None:
            promise(step, self.devices.each)
        return found

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within the context, new tensors are fake, and measuring predicts bytes and seconds on the device."""
        device = self.devices.each
        casting = nullcontext() if device.vendor == "cpu" else cuda_autocast()
        try:
            with using(prediction_for(device, self.devices.count)), casting, self._mode:
                yield
        except (torch_compat.DataDependentOutputException, torch_compat.DynamicOutputShapeException) as error:
            where = "; ".join(getattr(error, "__notes__", ()))
            message = (
                f"{error.func} depends on values{f' ({where})' if where else ''}, which a simulated device does not "
                "compute; plan the model on a real device, or give it sizes that do not depend on its data"
            )
            raise UnsupportedModelError(message, kind="depends_on_values", name=str(error.func)) from error
