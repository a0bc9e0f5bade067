"""Simulate the devices that a step is planned for: instruments, sharding and the process group.

PyTorch's "fake" backend makes collectives return at once, with arbitrary values. Only shapes count here, so one process
shows the memory of each of any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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
from rotor_py.estimation.caching_allocator import MIN_BLOCK
from rotor_py.estimation.communication import Communication
from rotor_py.estimation.cuda_autocast import cuda_autocast
from rotor_py.estimation.cuda_operators import cuda_operators
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies, construct_on_meta
from rotor_py.estimation.predicted_device import FakeStorages, PredictedDevice
from rotor_py.estimation.reservation import find_reservation
from rotor_py.estimation.roofline import Roofline
from rotor_py.estimation.scratch import scratch_bytes
from rotor_py.estimation.simulated_step import SimulatedStep

_BOTH_WAYS = 0.8
"""Share of the data sheet's bandwidth reached by copies in both directions at once: 51 of 64 GB/s were measured on PCI
Express 5 (https://github.com/NVIDIA/nvbandwidth/issues/53).
"""


def prediction_for(device: Device, count: int = 1) -> PredictedDevice:
    """Simulate `device`, one of `count`: allocator blocks, roofline clock and operators."""
    return PredictedDevice(
        kind="cuda",
        name=device.name,
        count=count,
        host_bandwidth=_BOTH_WAYS * device.pcie_bandwidth,
        memory_bytes=device.usable_bytes,
        seconds=Roofline(device),
        scratch=scratch_bytes,
        workspace_bytes=workspace_bytes(device),
        storages=FakeStorages(MIN_BLOCK),
        chosen=nullcontext if device.vendor == "cpu" else partial(cuda_operators, device.compute_capability),
    )


_LISTS = (nn.ModuleList, nn.Sequential)
Sharding = Literal["blocks", "whole"]


def shard_parameters(
    model: nn.Module, mesh: DeviceMesh, sharding: Sharding = "blocks", precision: torch.dtype | None = None
) -> None:
    """Shard the parameters of `model` over `mesh`, gathered block by block, or all together if "whole".

    With `precision`, parameters are gathered and modules run in this dtype; gradients are reduced in 32 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(precision, None if precision is None else torch.float32)
    for module in (*(blocks_of(model) if sharding == "blocks" else ()), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules whose class repeats in a list, such as the layers of a transformer.

    Excludes layers without children: each would be gathered separately.
    """
    classes = Counter(map(type, module.children())) if isinstance(module, _LISTS) else Counter[type]()
    for child in module.children():
        if classes[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks_of(child)


@contextmanager
def world_of(size: int) -> Iterator[DeviceMesh]:
    """Make this process the first of `size` simulated ones within the context; yields a mesh of all.

    Raises UnsupportedModelError if a process group exists already.
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
    from rotor_profiling.torch_compat import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with unset_fake_temporarily():  # a mesh reads its ranks' values
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()


Shard = Callable[[nn.Module, DeviceMesh], object] | Sharding


class SimulatedDevices:
    """Converts, measures and plans models for simulated `devices`.

    With several devices, `shard` shards the parameters: a function of the model and the mesh, or "blocks" (the default)
    or "whole", which gather in `precision`.

    Raises ValueError for `shard` or `precision` with one device, and for `precision` with a function.
    """

    def __init__(self, devices: Devices, *, shard: Shard | None = None, precision: torch.dtype | None = None) -> None:
        self.devices = devices
        _check_sharding(devices, shard, precision)
        self._shard = (
            shard if callable(shard) else partial(shard_parameters, sharding=shard or "blocks", precision=precision)
        )
        self._mesh: DeviceMesh | None = None
        self._communication = Communication(devices.each)
        self._mode = DeviceFakeMode()
        self.fakes = FakeCopies(self._mode)
        """makes fake copies of models, samples and optimizers"""

    making = staticmethod(construct_on_meta)
    """Build models on the meta device within the context."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enter before anything else: this process is then the first of one per device.

        Raises UnsupportedModelError for several devices if a process group exists already.
        """
        if self.devices.count == 1:
            yield
            return
        with world_of(self.devices.count) as self._mesh:
            yield

    def model(self, model: nn.Module) -> nn.Module:
        """A fake copy of a model with this process's shard of the parameters."""
        found = self.fakes.model(model)
        if self._mesh is not None:
            with self.measuring():
                self._shard(found, self._mesh)
        return found

    def follow(self, step: SimulatedStep) -> None:
        """Plan a measured model with the communication bytes of a `step` by its plan."""
        if self._mesh is not None:
            self._communication.find_room(step)

    def reserve(self, step: SimulatedStep, *, keep_limit: bool) -> Reservation:
        if self._mesh is None:
            return find_reservation(step, self.devices, keep_limit=keep_limit)
        found = find_reservation(step, self.devices, keep_limit=keep_limit, requests_of=self._communication.requests)
        self._communication.promise(step)
        return found

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Fake new tensors, and predict measurements for the device, within the context.

        Raises UnsupportedModelError for code that reads values.
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


def _check_sharding(devices: Devices, shard: Shard | None, precision: torch.dtype | None) -> None:
    for name, value in (("shard", shard), ("precision", precision)):
        if devices.count == 1 and value is not None:
            raise InvalidValueError(
                f"{name} is for parameters that several devices share, and device names one; write device='h100:8'",
                kind="one_device",
                name=name,
            )
    if precision is not None and callable(shard):
        raise InvalidValueError(
            "precision is for shard 'blocks' and 'whole'; a function gives fully_shard an mp_policy itself",
            kind="excluded_together",
            name="precision",
        )
    if not callable(shard) and shard not in (None, "blocks", "whole"):
        raise InvalidValueError(
            f"shard is {shard!r}; give 'blocks' or 'whole', or a function of model and mesh",
            kind="unknown_value",
            name="shard",
        )
