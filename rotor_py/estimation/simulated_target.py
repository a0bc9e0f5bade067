"""Where a step is planned for devices that are not there: what is made there, and what is measured there.

The instruments that predict for a device of the table.

`fully_shard` applied to each block of a model and to what is around them, as most people do, or to it as a whole.

A group of processes that are not there: this one is the first of them, and collectives send nothing.

PyTorch's own backend "fake" returns from every collective at once, with whatever is in memory. Shapes are all that
counts here, so one process is enough to see what each of any number of them holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotor_profiling.backends import using
from rotor_profiling.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.errors import InvalidValueError, UnsupportedModelError
from rotor_py.estimation.communication import Communication
from rotor_py.estimation.cuda_autocast import cuda_autocast
from rotor_py.estimation.cuda_operators import cuda_operators
from rotor_py.estimation.fake_tensors import TensorsWithoutMemory, WithoutMemory, made_without_memory
from rotor_py.estimation.predicted_device import Numbered, PredictedDevice
from rotor_py.estimation.reservation import find_reservation
from rotor_py.estimation.roofline import Roofline
from rotor_py.estimation.scratch import scratch_bytes
from rotor_py.estimation.training_step import TrainingStep

_BLOCK = 512
"""Bytes that the caching allocator rounds up to a multiple of (`kMinBlockSize` in torch), on ROCm as well."""

_BOTH_WAYS = 0.8
"""The part of the data sheet's bandwidth that copies reach both ways at once: 51 of 64 GB/s were measured on PCI
Express 5 (https://github.com/NVIDIA/nvbandwidth/issues/53)."""


def prediction_for(device: Device, count: int = 1) -> PredictedDevice:
    """What predicts for `device`, one of `count`: its allocator's rounding, a roofline for a clock, the operators that
    run there.
    """
    return PredictedDevice(
        kind="cuda",
        name=device.name,
        count=count,
        host_bandwidth=_BOTH_WAYS * device.pcie_bandwidth,
        memory_bytes=device.usable_bytes,
        seconds=Roofline(device),
        scratch=scratch_bytes,
        workspace_bytes=workspace_bytes(device),
        storages=Numbered(_BLOCK),
        chosen=nullcontext if device.vendor == "cpu" else partial(cuda_operators, device.compute_capability),
    )


_LISTS = (nn.ModuleList, nn.Sequential)
Sharding = Literal["blocks", "whole"]


def shard_whole(model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | None = None) -> None:
    """Have the parameters of `model` divided among the processes of `mesh`, and gathered all together.

    With `precision`, parameters are gathered, and modules run, in this dtype; gradients are added up in 32 bits.
    """
    _shard([model], mesh, precision)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | None = None) -> None:
    """The same, gathered block by block."""
    _shard([*blocks_of(model), model], mesh, precision)


SHARDINGS: dict[Sharding, Callable[..., None]] = {"blocks": shard_blocks, "whole": shard_whole}


def _shard(modules: Iterable[nn.Module], mesh: DeviceMesh, precision: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(precision, None if precision is None else torch.float32)
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of a class that comes several times in a list, as the layers of a transformer do.

    Layers without layers of their own are none: each would be gathered by itself.
    """
    classes = Counter(map(type, module.children())) if isinstance(module, _LISTS) else Counter[type]()
    for child in module.children():
        if classes[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks_of(child)


@contextmanager
def world_of(size: int) -> Iterator[DeviceMesh]:
    """Inside, this process is the first of `size` that are not there; gives a mesh of all of them.

    UnsupportedModelError if it is one of several already.
    """
    if not dist.is_available():
        raise UnsupportedModelError(
            "a step of several devices cannot be predicted: this PyTorch was built without torch.distributed",
            kind="no_distributed",
        )
    if dist.is_initialized():
        raise UnsupportedModelError(
            "a step of several devices cannot be predicted in a process that has a process group already; predict it "
            "before init_process_group, or in a process of its own",
            kind="has_process_group",
        )
    from rotor_profiling.torch_compat import FakeStore  # has the backend registered

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with unset_fake_temporarily():  # a mesh reads the ranks that it has
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()


Shard = Callable[[nn.Module, DeviceMesh], object] | Sharding


class Elsewhere:
    """A place for models that are planned for `devices`, which need not be there.

    Where there are several, parameters are divided among them by `shard`: a function of the model and of the mesh of
    devices, or the name of one of ours ("blocks" if it is None), which gathers with this `precision`.

    ValueError for either with one device, where they would say nothing, and for a `precision` beside a function.
    """

    def __init__(self, devices: Devices, *, shard: Shard | None = None, precision: torch.dtype | None = None) -> None:
        self.devices = devices
        _refuse_what_says_nothing(devices, shard, precision)
        shard = "blocks" if shard is None else shard
        self._shard = partial(_sharding(shard), precision=precision) if isinstance(shard, str) else shard
        self._mesh: DeviceMesh | None = None
        self._communication = Communication(devices.each)
        self._mode = TensorsWithoutMemory()
        self.without_memory = WithoutMemory(self._mode)
        """what makes models, samples and optimizers without memory of others"""

    making = staticmethod(made_without_memory)
    """Inside, models are made on the meta device."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """All that follows happens inside: there, this process is the first of those that have a device each.

        UnsupportedModelError if there are several devices, and this process is one of several already.
        """
        if self.devices.count == 1:
            yield
            return
        with world_of(self.devices.count) as self._mesh:
            yield

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of a model without memory, of whose parameters this process has its part."""
        found = self.without_memory.model(model)
        if self._mesh is not None:
            with self.measuring():
                self._shard(found, self._mesh)
        return found

    def follow(self, step: TrainingStep) -> None:
        """Have a model that was measured plan with the room that communication takes in a `step` by its plan."""
        if self._mesh is not None:
            self._communication.find_room(step)

    def reserve(self, step: TrainingStep, *, keep_limit: bool) -> Reservation:
        """What is reserved for a `step` by a plan that was found; see `find_reservation`."""
        if self._mesh is None:
            return find_reservation(step, self.devices, keep_limit=keep_limit)
        found = find_reservation(step, self.devices, keep_limit=keep_limit, requests_of=self._communication.requests)
        self._communication.promise(step)
        return found

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, tensors that are made take no memory, and what is measured is predicted for the device.

        UnsupportedModelError for what reads values.
        """
        device = self.devices.each
        casting = nullcontext() if device.vendor == "cpu" else cuda_autocast()
        try:
            with using(prediction_for(device, self.devices.count)), casting, self._mode:
                yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            where = "; ".join(getattr(error, "__notes__", ()))
            raise UnsupportedModelError(
                f"{error.func} depends on values{f' ({where})' if where else ''}, and where nothing is computed there "
                "are none; plan the model on a device that is here, or give it sizes that do not depend on its data",
                kind="depends_on_values",
                name=str(error.func),
            ) from error


def _refuse_what_says_nothing(devices: Devices, shard: Shard | None, precision: torch.dtype | None) -> None:
    if devices.count == 1 and shard is not None:
        raise InvalidValueError(
            "shard divides parameters among several devices, and device names one; write device='h100:8'",
            kind="one_device",
            name="shard",
        )
    if devices.count == 1 and precision is not None:
        raise InvalidValueError(
            "precision is for parameters that several devices share, and device names one; write device='h100:8', or "
            "convert the model",
            kind="one_device",
            name="precision",
        )
    if precision is not None and callable(shard):
        raise InvalidValueError(
            "precision is for shard 'blocks' and 'whole'; a function gives fully_shard an mp_policy itself",
            kind="excluded_together",
            name="precision",
        )


def _sharding(name: str) -> Callable[..., None]:
    for each, function in SHARDINGS.items():
        if each == name:
            return function
    raise InvalidValueError(
        f"shard is {name!r}; give {' or '.join(map(repr, SHARDINGS))}, or a function of model and mesh",
        kind="unknown_value",
        name="shard",
    )
