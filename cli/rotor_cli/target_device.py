"""The device to plan for: one of this machine, or a simulated one."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import click
import torch
from torch import nn

from rotor_cli.failure import INFEASIBLE, Failure, about_option, usage
from rotor_cli.request import HERE, Request
from rotor_profiling import tensors_in
from rotor_profiling.value_tree import tree_map_only
from rotor_py.data_sheet import UNANCHORED
from rotor_py.estimation.calibration import as_toml, calibrate
from rotor_py.estimation.device_table import find_devices
from rotor_py.estimation.simulated_target import SimulatedDevices
from rotor_py.measure.device import limit_bytes, total_bytes
from rotor_py.plan.step_spec import arguments_of
from rotor_py.units import format_bytes, parse_bytes

_HOLDERS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)
# Device of the table whose rates are assumed if only --device-memory is given. A guess: one of middling speed.
_DEFAULT_DEVICE = "a100-80"


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class Target:
    device: torch.device
    simulated: SimulatedDevices | None = None  # None for a device of this machine
    autocast: torch.dtype | None = None  # dtype of autocast around forward and loss; None for no autocast

    def making(self) -> AbstractContextManager[object]:
        return nullcontext() if self.simulated is None else self.simulated.making()

    def measuring(self) -> AbstractContextManager[object]:
        return nullcontext() if self.simulated is None else self.simulated.measuring()

    def model(self, model: nn.Module, module: ModuleType) -> nn.Module:
        """Return the model on the device; if it is simulated, a fake copy, and make tensors in `module` fake."""
        if self.simulated is None:
            return model.to(self.device)
        for name, value in list(vars(module).items()):
            if isinstance(value, _HOLDERS) and any(each.is_meta for each in tensors_in(value)):
                setattr(module, name, self.simulated.fakes.value(value))
        return self.simulated.model(model)

    def sample(self, sample: Any, model: nn.Module) -> Any:
        if self.simulated is not None:
            arguments, keywords = arguments_of(sample, model)  # the first batch if `sample` is a DataLoader
            return self.simulated.fakes.value(keywords or arguments)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == self.device:
                return tensor
            return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

        return tree_map_only(torch.Tensor, moved, sample)


def dtype_called(name: str, option: str) -> torch.dtype:
    """Return the floating-point dtype `name`, such as `bf16`. Raises Failure, which names `option`, for others."""
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise usage("bad_value", option, f"{option} must be bfloat16, float16 or float32, got {name!r}")
    return found


def device_of(name: str | None) -> torch.device:
    """Return the device `name` of this machine; by default the current CUDA device, or the CPU if there is none."""
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= (count := torch.cuda.device_count()):
        raise usage("no_such_device", "--device", f"--device {name!r}: PyTorch sees {count} CUDA devices")
    return torch.device("cuda", int(index or 0))


def target_of(request: Request) -> Target:
    """Return the device that the options name: one of this machine, or one to simulate, from the table or a file."""
    text, file = request.device, request.device_file
    if not request.simulated:
        return Target(device_of(text))
    with about_option("--device" if file is None else "--device-file"):
        devices = find_devices(text or (_DEFAULT_DEVICE if file is None else ""), file)
    precision = None if request.precision is None else dtype_called(request.precision, "--precision")
    autocast = None if request.autocast is None else dtype_called(request.autocast, "--autocast")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise usage("bad_value", "--autocast", f"--autocast must be bfloat16 or float16, got {request.autocast}")
    if request.device_memory is not None:
        size = parse_bytes(request.device_memory)
        each = devices.each
        if text is None and file is None:  # only the memory of the device is known
            name = f"a device of {format_bytes(size)}"
            each = replace(each, name=name, efficiencies=UNANCHORED, sources=(), rates_of=each.name)
        with about_option("--device-memory"):
            devices = replace(devices, each=replace(each, memory_bytes=size))
    return Target(torch.device("cpu"), SimulatedDevices(devices, shard=request.shard, precision=precision), autocast)


def limit_on(device: torch.device, text: str | None) -> int:
    with about_option("--mem-limit"):
        return limit_bytes(text, device)


def print_calibration(name: str | None) -> None:
    """Measure the device `name` (by default CUDA, else the CPU), and print a file for --device-file to stdout."""
    if name is not None and not HERE.fullmatch(name):
        raise usage(
            "unknown_device", "--calibrate", f"--calibrate takes cpu, cuda or cuda:N, not {name!r}, and no MODEL"
        )
    device = device_of(name)
    try:
        found = calibrate(
            device, total_bytes(device), progress=lambda what: click.echo(f"measuring {what} on {device} ...", err=True)
        )
    except torch.OutOfMemoryError as error:
        message = f"{device} has too little free memory to be measured: {error}"
        raise Failure(message, INFEASIBLE, kind="device_full", name="--calibrate") from error
    click.echo(as_toml(re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-"), found), nl=False)
