"""Simulate the devices that a step is planned for: instruments, sharding and the process group.

PyTorch's "fake" backend makes collectives return at once, with arbitrary values. Only shapes count here, so one process
shows the memory of each of any number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotor_profiling.backends import Storages, using
from rotor_profiling.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from rotor_py.checkpointable import Checkpointable
from rotor_py.data_sheet import Device, Devices, Reservation, workspace_bytes
from rotor_py.errors import InvalidValueError, UnsupportedModelError
from rotor_py.estimation.caching_allocator import MIN_BLOCK, Event
from rotor_py.estimation.cuda_autocast import cuda_autocast
from rotor_py.estimation.cuda_operators import cuda_operators
from rotor_py.estimation.fake_tensors import DeviceFakeMode, FakeCopies, construct_on_meta
from rotor_py.estimation.predicted_device import PredictedDevice
from rotor_py.estimation.reservation import FollowedStep, find_reservation
from rotor_py.estimation.roofline import Roofline
from rotor_py.estimation.scratch import scratch_bytes
from rotor_py.estimation.simulated_step import SimulatedStep
from rotor_py.measure.device import limit_bytes
from rotor_solver import InfeasibleError, Sequence

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
        storages=Storages(MIN_BLOCK, fake=True),
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


# FSDP's hooks decide during a step which parameters are gathered at once. Real processes plan with an upper bound
# (`gathered_bytes`); steps on fake tensors are cheap, so here the observed bytes replace the bound.


_GATHERING = 1


@contextmanager
def gathering_apart(step: FollowedStep) -> Iterator[None]:
    """Trace FSDP2's all-gather buffers on a stream of their own, as on CUDA.

    The allocator keeps a pool for each stream, so these buffers are reserved separately.
    """
    group: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:  # no sharding
        yield
        return
    gather = group.foreach_all_gather

    def gathered(*args: Any, **kwargs: Any) -> Any:
        before, step.stream = step.stream, _GATHERING
        try:
            return gather(*args, **kwargs)
        finally:
            step.stream = before

    group.foreach_all_gather = gathered
    try:
        yield
    finally:
        group.foreach_all_gather = gather


_SLACK = (0.0, 0.0, 0.03, 0.06, 0.12)
"""Slack added to the bytes of the last step, by round, as a share. Guesses: too little does not converge, too much
wastes memory.

A plan with less memory recomputes other stages, which gathers other parameters and may need more memory again. Without
slack, this did not converge for a Llama of 80 layers.
"""


class Communication:
    """Steps of sharded models on `device`, by their plans. Each plan is traced once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: tuple[Checkpointable, Sequence, FollowedStep] | None = None

    def requests(self, step: SimulatedStep) -> list[Event]:
        """Requests of two steps by the plan, with the optimizer's state already allocated."""
        followed = self._followed(step)
        with step.state_restored(), gathering_apart(followed), followed:
            step()
        return followed.events

    def find_room(self, step: SimulatedStep) -> None:
        """Plan the measured network of `step` with the communication bytes that the step takes.

        If no step stays within its planned bytes, the upper bound applies again. If no plan fits, the bytes stay, and
        planning raises the error.
        """
        network = step.network
        budget = network.budget
        assert budget is not None
        step.prepare()
        taken = 0
        for slack in _SLACK:
            room = int((1 + slack) * taken)
            divided = budget.with_communication(room)
            network.divide(divided)
            try:
                network.compute_sequence()
            except InfeasibleError:
                return
            taken = self._taken(step)
            if taken <= room:
                return
        network.divide(budget)

    def promise(self, step: SimulatedStep) -> None:
        """Set the communication bytes to those of the current plan.

        If the peak then exceeds the limit, the limit becomes the peak.
        """
        network = step.network
        plan, budget = network.sequence, network.budget
        assert plan is not None
        assert budget is not None
        taken = self._taken(step)
        if taken > budget.fixed.communication:
            divided = budget.with_communication(taken)
            network.divide(divided)
            network.sequence = plan
            network.mem_limit = max(limit_bytes(network.mem_limit, network.device), divided.peak_bytes(plan))

    def _taken(self, step: SimulatedStep) -> int:
        """Communication bytes with which the plan's peak equals that of the step."""
        followed, budget, plan = self._followed(step), step.network.budget, step.network.sequence
        assert plan is not None
        assert budget is not None
        return budget.fixed.total + followed.risen() - budget.peak_bytes(plan)

    def _followed(self, step: SimulatedStep) -> FollowedStep:
        network, plan = step.network, step.network.sequence
        assert plan is not None
        if self._last is None or self._last[0] is not network or self._last[1] != plan:
            followed = FollowedStep()
            followed.hold_workspace(self._device)
            followed.hold(step.present())
            followed.begin()
            with step.state_restored(), gathering_apart(followed), followed:
                step()
            self._last = network, plan, followed
        return self._last[2]


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
