"""Where a step is planned for devices that are not there: what is made there, and what is measured there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh

from rotor_profiling.backends import using
from rotor_py.devices.device import Devices
from rotor_py.devices.reservation import Reservation
from rotor_py.errors import InvalidValueError, UnsupportedModelError
from rotor_py.predict.communication import Communication
from rotor_py.predict.operators.autocast import cuda_autocast
from rotor_py.predict.operators.layouts import TensorsWithoutMemory
from rotor_py.predict.prediction import prediction_for
from rotor_py.predict.reserving import find_reservation
from rotor_py.predict.sharding import SHARDINGS, Sharding
from rotor_py.predict.training_step import TrainingStep
from rotor_py.predict.without_memory import WithoutMemory, made_without_memory
from rotor_py.predict.world import world_of

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
