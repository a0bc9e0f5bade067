"""A device as a file: the text that `device_from_file` reads."""

from __future__ import annotations

import json
from dataclasses import fields

from rotor_py.devices.device import Device

_HEAD = """\
# For rotor-plan --device-file. Bandwidths are bytes a second, rates floating point operations a second.
# link is what one device can send to another: it is not measured here, and PCIe's.
"""


def as_toml(key: str, device: Device) -> str:
    """The file of a device, which is called `key` there."""
    cells: dict[str, object] = {
        "name": device.name,
        "vendor": device.vendor,
        "memory": device.memory_bytes,
        "context": device.context_bytes,
        "bandwidth": device.bandwidth,
        "bf16": device.rates.bf16,
        "fp16": device.rates.fp16,
        "tf32": device.rates.tf32,
        "fp32": device.rates.fp32,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "link": device.link_bandwidth,
        "pcie": device.pcie_bandwidth,
        "launch_seconds": device.launch_seconds,
    }
    known = device.efficiencies
    efficiencies = {field.name: getattr(known, field.name) for field in fields(known)}
    return f"{_HEAD}\n[{key}]\n{_lines(cells)}\n[{key}.efficiencies]\n{_lines(efficiencies)}"


def _lines(cells: dict[str, object]) -> str:
    # JSON's numbers and strings are TOML's, too; a name with quotes is escaped in the same way.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in cells.items() if value is not None)
