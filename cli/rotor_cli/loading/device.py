"""The device and the limit, from their texts on the command line."""

from __future__ import annotations

import torch

from rotor_cli.errors import usage
from rotor_py.measure.device import limit_bytes


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


def limit_on(device: torch.device, text: str | None) -> int:
    """The bytes that a limit stands for on `device`; Failure if it is not a size."""
    try:
        return limit_bytes(text, device)
    except ValueError as error:
        raise usage(f"--mem-limit: {error}") from error
