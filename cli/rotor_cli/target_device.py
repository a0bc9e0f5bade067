"""The planned device, on this machine or simulated, and its limit."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import click
import torch
from torch import nn

from rotor_cli.errors import INFEASIBLE, Failure, about_option, kind_of, usage
from rotor_cli.option_values import autocast_dtype, floating_dtype, no_floating_dtype
from rotor_cli.request import Request
from rotor_profiling import tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.data_sheet import UNANCHORED, Devices
from rotor_py.estimation.calibration import as_toml, calibrate
from rotor_py.estimation.device_table import devices_from_file, find_devices
from rotor_py.estimation.simulated_target import SimulatedDevices
from rotor_py.measure.device import limit_bytes, total_bytes
from rotor_py.plan.sample import arguments_of
from rotor_py.units import format_bytes, parse_bytes

_HOLDERS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)
_OF_MEMORY_ALONE = "a100-80"
"""Device whose data sheet applies if only a memory size is given. A guess: the middle of the table; times are then off.
"""


class LocalTarget:
    """A device of this machine, which is measured."""

    elsewhere: SimulatedDevices | None = None
    """The simulated devices; None if measured on this machine."""
    autocast: torch.dtype | None = None
    """Autocast dtype of steps; None if they enter a region themselves, or none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)

    def making(self) -> AbstractContextManager[object]:
        """Context in which user code makes its model and sample."""
        return nullcontext()

    def measuring(self) -> AbstractContextManager[object]:
        """Context in which the model is measured and planned."""
        return nullcontext()

    def model(self, model: nn.Module, module: ModuleType) -> nn.Module:
        """Move the model to the device, with other tensors of the model file, such as targets of a loss."""
        return model.to(self.device)

    def sample(self, sample: Any, model: nn.Module) -> Any:
        """Move a sample to the device."""
        return moved_to(self.device, sample)


class SimulatedTarget(LocalTarget):
    """Simulated devices of the table: fake tensors on the CPU."""

    elsewhere: SimulatedDevices

    def __init__(
        self,
        devices: Devices,
        precision: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        shard: Literal["blocks", "whole"] | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.name, self.autocast = devices.name, autocast
        self.elsewhere = SimulatedDevices(devices, shard=shard, precision=precision)

    def making(self) -> AbstractContextManager[object]:
        return self.elsewhere.making()

    def measuring(self) -> AbstractContextManager[object]:
        return self.elsewhere.measuring()

    def model(self, model: nn.Module, module: ModuleType) -> nn.Module:
        for name, value in list(vars(module).items()):
            if isinstance(value, _HOLDERS) and any(each.is_meta for each in tensors_in(value)):
                setattr(module, name, self.elsewhere.without_memory.value(value))
        return self.elsewhere.model(model)

    def sample(self, sample: Any, model: nn.Module) -> Any:
        arguments, keywords = arguments_of(sample, model)  # the first batch of a DataLoader
        return self.elsewhere.without_memory.value(keywords or arguments)


_OF_MEMORY_ALONE = "a100-80"


def device_of(name: str | None) -> torch.device:
    """The device `name`; by default CUDA's current device if there is one, else the CPU.

    Raises Failure for an unsupported or missing device.
    """
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # unknown to torch; refused below
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise usage(
            f"--device {name!r} is not a device to plan for; write cpu, cuda or cuda:N",
            kind="unknown_device",
            name="--device",
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise usage(
                f"--device {name!r} is not there: PyTorch sees {count} CUDA devices",
                kind="no_such_device",
                name="--device",
            )
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def target_of(request: Request) -> LocalTarget:
    """The device of the model: on this machine and measured, or simulated from the table or a file.

    Raises Failure if there is no such device.
    """
    text = request.device
    if not request.elsewhere:
        return LocalTarget(device_of(text))
    try:
        if request.device_file is not None:
            devices = devices_from_file(request.device_file, text)
        else:
            devices = find_devices(_OF_MEMORY_ALONE if text is None else text)
    except OSError as error:
        raise usage(f"--device-file: {error}", kind=kind_of(error), name="--device-file") from error
    except ValueError as error:
        raise usage(
            f"{'--device' if request.device_file is None else '--device-file'}: {error}",
            kind=kind_of(error),
            name="--device" if request.device_file is None else "--device-file",
        ) from error
    precision = None if request.precision is None else dtype_called(request.precision, "--precision")
    autocast = None if request.autocast is None else dtype_called(autocast_dtype(request.autocast), "--autocast")
    if request.device_memory is not None:
        size = parse_bytes(request.device_memory)
        each = devices.each
        if text is None and request.device_file is None:  # nothing else is known of it
            name = f"a device of {format_bytes(size)}"
            each = replace(each, name=name, efficiencies=UNANCHORED, sources=(), rates_of=each.name)
        with about_option("--device-memory"):
            devices = replace(devices, each=replace(each, memory_bytes=size))
    return SimulatedTarget(devices, precision, autocast, request.shard)


def limit_on(device: torch.device, text: str | None) -> int:
    """A limit on `device` in bytes. Raises Failure for an invalid size."""
    with about_option("--mem-limit"):
        return limit_bytes(text, device)


def print_calibration(name: str | None) -> None:
    """Measure the device `name` (CUDA by default if present), and print its file to stdout."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise usage(
            f"--calibrate measures cpu, cuda or cuda:N, not {name!r}; it needs no MODEL",
            kind="unknown_device",
            name="--calibrate",
        )
    device = device_of(name)
    try:
        found = calibrate(
            device, total_bytes(device), progress=lambda what: click.echo(f"measuring {what} on {device} ...", err=True)
        )
    except torch.OutOfMemoryError as error:
        raise Failure(
            f"{device} has too little free memory to be measured: {error}",
            INFEASIBLE,
            kind="device_full",
            name="--calibrate",
        ) from error
    key = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")
    click.echo(as_toml(key, found), nl=False)


def dtype_called(name: str, option: str = "--dtype") -> torch.dtype:
    """The floating-point dtype `name`: `bfloat16`, `bf16`. Raises Failure for `option` otherwise."""
    found = getattr(torch, floating_dtype(name, option), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise no_floating_dtype(name, option)
    return found


def moved_to(device: torch.device, sample: Any) -> Any:
    """Move every tensor of the sample to `device`; those with a gradient become leaves there."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, moved, sample)
