"""Where a page comes from: when it was made, with which versions, and on which device."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

import torch


@dataclass(frozen=True, slots=True)
class Origin:
    """What a reader has to know before comparing the numbers of two pages. `device` is the device in words."""

    made: datetime
    device: str
    versions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions)
        return f"Made on {self.made:%Y-%m-%d at %H:%M %Z} with {versions}, for {self.device}."


def origin(device: str, made: datetime | None = None) -> Origin:
    """Of a page that is made on this machine, now unless `made` says when; `device` as torch names it: "cuda:0"."""
    versions = (
        ("rotor_py", version("rotor-plan")),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
    )
    return Origin(datetime.now(timezone.utc) if made is None else made, _described(device), versions)


def _described(device: str) -> str:
    """The device with what its times depend on: the name of a GPU, the threads of a CPU."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):  # one that need not be here, which has a name of its own
        return f"{device}, predicted"
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if torch.device(device).type == "cpu":
        return f"{device} ({platform.machine()}, threads: {torch.get_num_threads()})"
    return device
