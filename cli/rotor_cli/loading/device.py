"""The device and the limit, from their texts on the command line."""

from __future__ import annotations

from dataclasses import replace

import torch

from rotor_cli.errors import usage
from rotor_cli.loading.place import Here, Place, There
from rotor_cli.loading.sample import dtype_called
from rotor_cli.loading.values import autocast_dtype
from rotor_cli.request import Request
from rotor_py.devices.device import UNANCHORED
from rotor_py.devices.table import devices_from_file, find_devices
from rotor_py.measure.device import limit_bytes
from rotor_py.units import format_bytes, parse_bytes

_OF_MEMORY_ALONE = "a100-80"
"""Whose data sheet stands in where only the bytes of a device are given. A guess: the middle of the table."""


def device_of(name: str | None) -> torch.device:
    """The device called `name`; without one, the present CUDA device, or the CPU where there is none.

    Failure if it is no device to plan for, or not there.
    """
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # torch has never heard of it; the refusal below says so
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise usage(f"--device {name!r} is not a device to plan for; write cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise usage(f"--device {name!r} is not there: PyTorch sees {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def place_for(request: Request) -> Place:
    """Where the model is measured: on a device of this machine, or without memory for one of the table or a file.

    Failure if there is no such device.
    """
    text = request.device
    if not request.elsewhere:
        return Here(device_of(text))
    try:
        if request.device_file is not None:
            devices = devices_from_file(request.device_file, text)
        else:
            devices = find_devices(_OF_MEMORY_ALONE if text is None else text)
    except OSError as error:
        raise usage(f"--device-file: {error}") from error
    except ValueError as error:
        raise usage(f"{'--device' if request.device_file is None else '--device-file'}: {error}") from error
    precision = None if request.precision is None else dtype_called(request.precision, "--precision")
    autocast = None if request.autocast is None else dtype_called(autocast_dtype(request.autocast), "--autocast")
    if request.device_memory is not None:
        size = parse_bytes(request.device_memory)
        each = devices.each
        if text is None and request.device_file is None:  # of which nothing else is known
            name = f"a device of {format_bytes(size)}"
            each = replace(each, name=name, efficiencies=UNANCHORED, sources=(), rates_of=each.name)
        try:
            devices = replace(devices, each=replace(each, memory_bytes=size))
        except ValueError as error:
            raise usage(f"--device-memory: {error}") from error
    return There(devices, precision, autocast, request.shard)


def limit_on(device: torch.device, text: str | None) -> int:
    """The bytes that a limit stands for on `device`; Failure if it is not a size."""
    try:
        return limit_bytes(text, device)
    except ValueError as error:
        raise usage(f"--mem-limit: {error}") from error
