"""Which accelerators a computation uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def accelerators(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """The devices other than the CPU, each once, in an order that every process finds."""
    return tuple(sorted({device for device in devices if device.type != "cpu"}, key=str))
