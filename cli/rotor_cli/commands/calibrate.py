"""`rotor-plan --calibrate`: the device that one is on, as a file for `--device-file`."""

from __future__ import annotations

import re

import click
import torch

from rotor_cli.errors import INFEASIBLE, Failure, usage
from rotor_cli.loading.device import device_of
from rotor_py.devices.calibration import calibrate
from rotor_py.devices.device_file import as_toml
from rotor_py.measure.device import total_bytes


def run(name: str | None) -> None:
    """Measure the device called `name`, by default CUDA's where there is one; the file goes to stdout."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise usage(f"--calibrate measures cpu, cuda or cuda:N, not {name!r}; it needs no MODEL")
    device = device_of(name)
    try:
        found = calibrate(
            device, total_bytes(device), progress=lambda what: click.echo(f"measuring {what} on {device} ...", err=True)
        )
    except torch.OutOfMemoryError as error:
        raise Failure(f"{device} has too little free memory to be measured: {error}", INFEASIBLE) from error
    key = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")
    click.echo(as_toml(key, found), nl=False)
