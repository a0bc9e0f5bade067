"""Look up devices in `devices.toml` or a file like it. Does not import torch, so that typos are reported at once."""

from __future__ import annotations

import difflib
import sys
from functools import cache
from pathlib import Path
from typing import Any

from rotor_py.data_sheet import CONTEXT_BYTES, LAUNCH_SECONDS, UNANCHORED, Device, Devices, Efficiencies, Rates
from rotor_py.errors import InvalidValueError, kind_of
from rotor_py.units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = Path(__file__).with_name("devices.toml")
_RATES = ("bf16", "fp16", "tf32", "fp32")
_REQUIRED = ("memory", "bandwidth", *_RATES, "compute_capability", "link", "pcie")
_OPTIONAL = ("name", "vendor", "context", "launch_seconds", "efficiencies")
_EFFICIENCIES = ("matmul", "convolution", "attention", "attention_backward", "streaming")


def split_count(text: str) -> tuple[str, int]:
    """Split "h100:8" into the name and the number of devices, by default 1. Raises ValueError unless it is above 0."""
    name, colon, number = text.partition(":")
    if colon and not (number.isdecimal() and int(number) > 0):
        message = f"{text!r} is not a number of devices; write {name}:8 for eight of them"
        raise InvalidValueError(message, kind="not_a_count", name=text)
    return name, int(number) if colon else 1


def device_names() -> tuple[str, ...]:
    return tuple(_table())


def find_device(name: str) -> Device:
    """Return the device called `name` in the table, ignoring case and separators. Raises ValueError if none is."""
    table = _table()
    spelled = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-").removeprefix("amd-")
    for each in (spelled, spelled.replace("-", "")):
        if each in table:
            return table[each]
    # If `name` is the beginning of device names, suggest these: a100-80 or a100-40 for a100.
    beginning = [each for each in table if each.startswith(f"{spelled}-")]
    meant = " or ".join(beginning or difflib.get_close_matches(spelled, table, cutoff=0.4) or table)
    message = f"no device is called {name!r}; did you mean {meant}? Or describe a device in a file like {_TABLE.name}"
    raise InvalidValueError(message, kind="unknown_device", name=name)


def find_devices(text: str, file: str | Path | None = None) -> Devices:
    """Return the devices that `text` names, as "h100" or "h100:8" (eight), in the table or `file`; "": its only device.

    Raises ValueError for an unknown name or a wrong number, and the errors of `device_from_file`.
    """
    name, count = split_count(text)
    return Devices(find_device(name) if file is None else device_from_file(file, name or None), count)


def devices_of(device: str | Device | Devices) -> Devices:
    if isinstance(device, str):
        return find_devices(device)
    return Devices(device) if isinstance(device, Device) else device


def device_from_file(path: str | Path, name: str | None = None) -> Device:
    """Read a device from the TOML file at `path`, in the format of `devices.toml`. `name` chooses one of several.

    Raises OSError if the file cannot be read; ValueError if it is no TOML, or lacks the device or a required entry.
    """
    devices = _read(Path(path))
    if name is None:
        if len(devices) > 1:
            raise InvalidValueError(f"{path} has the devices {', '.join(devices)}; say which one", kind="which_device")
        (name,) = devices
    if name.lower() not in devices:
        message = f"{path} has no device {name!r}, only {', '.join(devices)}"
        raise InvalidValueError(message, kind="unknown_device", name=name)
    return devices[name.lower()]


@cache
def _table() -> dict[str, Device]:
    return _read(_TABLE)


def _read(path: Path) -> dict[str, Device]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} is no TOML file: {error}", kind="not_toml", name=str(path)) from None
    sources = content.pop("sources", {})
    devices = {}
    for key, cells in content.items():
        if not isinstance(cells, dict):
            message = f"{path}: {key!r} belongs to no device; begin a device with a line such as [my-gpu]"
            raise InvalidValueError(message, kind="outside_device", name=key)
        try:
            devices[key.lower()] = _device(key, cells, sources)
        except (ValueError, TypeError) as error:
            raise InvalidValueError(
                f"{path}, device {key!r}: {error}", kind=kind_of(error), name=getattr(error, "name", None), device=key
            ) from None
    if not devices:
        message = f"{path} has no device; begin a device with a line such as [my-gpu]"
        raise InvalidValueError(message, kind="no_device", name=str(path))
    return devices


def _device(key: str, cells: dict[str, Any], sources: dict[str, str]) -> Device:
    _check_names("entries", cells, _REQUIRED, _OPTIONAL)
    values, said = {}, []
    for cell in cells.keys() - {"efficiencies"}:
        # An entry is a value, or a table with `value` and `source`, the name of an entry of [sources].
        given = cells[cell] if isinstance(cells[cell], dict) and "value" in cells[cell] else {"value": cells[cell]}
        values[cell], source = given["value"], given.get("source", "the file itself")
        if cell in _REQUIRED:
            said.append((cell, sources.get(source, source)))
    context = values.get("context", CONTEXT_BYTES)
    major, _, minor = str(values["compute_capability"]).partition(".")
    return Device(
        name=str(values.get("name", key)),
        memory_bytes=parse_bytes(values["memory"]),
        bandwidth=_above_zero("bandwidth", values["bandwidth"]),
        rates=Rates(*(_above_zero(each, values[each]) for each in _RATES)),
        compute_capability=(int(major), int(minor or 0)),
        link_bandwidth=_above_zero("link", values["link"]),
        pcie_bandwidth=_above_zero("pcie", values["pcie"]),
        efficiencies=_efficiencies(cells.get("efficiencies")),
        context_bytes=0 if context == 0 and not isinstance(context, bool) else parse_bytes(context),  # 0 for a CPU
        launch_seconds=float(values.get("launch_seconds", LAUNCH_SECONDS)),
        vendor=str(values.get("vendor", "nvidia")),
        sources=tuple(sorted(said)),
    )


def _check_names(what: str, given: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for kind, names in (
        ("missing_fields", [each for each in required if each not in given]),
        ("unknown_fields", sorted(given.keys() - {*required, *optional})),
    ):
        if names:
            message = (
                f"{kind.removesuffix('_fields')} {what}: {', '.join(names)}; known: {', '.join(required + optional)}"
            )
            raise InvalidValueError(message, kind=kind, name=", ".join(names))


def _efficiencies(cells: dict[str, Any] | None) -> Efficiencies:
    if cells is None:
        return UNANCHORED
    _check_names("efficiencies", cells, _EFFICIENCIES, ("anchor", "taken_from"))
    if {"anchor", "taken_from"} <= cells.keys():
        message = "leave out anchor or taken_from: efficiencies are fitted to an anchor, or taken from another device"
        raise InvalidValueError(message, kind="excluded_together", name="taken_from")
    anchor, taken_from = (str(cells[each]) if each in cells else None for each in ("anchor", "taken_from"))
    found = {each: _above_zero(each, cells[each]) for each in _EFFICIENCIES}
    return Efficiencies(**found, anchor=anchor, taken_from=taken_from)


def _above_zero(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidValueError(f"{name} has to be a number above zero, not {value!r}", kind="not_positive", name=name)
    return float(value)
