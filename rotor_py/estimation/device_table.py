"""The device table, and files of the same form, written by hand or by `rotor-plan --calibrate`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rotor_py.data_sheet import CONTEXT_BYTES, LAUNCH_SECONDS, UNANCHORED, Device, Devices, Efficiencies, Rates
from rotor_py.errors import InvalidValueError, kind_of
from rotor_py.estimation.device_names import SOURCES, TABLE, counted, name_and_count, name_in_table, tables_in
from rotor_py.units import parse_bytes

_RATES = ("bf16", "fp16", "tf32", "fp32")
_REQUIRED = ("memory", "bandwidth", *_RATES, "compute_capability", "link", "pcie")
_OPTIONAL = ("name", "vendor", "context", "launch_seconds", "efficiencies")
_EFFICIENCIES = ("matmul", "convolution", "attention", "attention_backward", "streaming")
_ORIGINS = ("anchor", "taken_from")
_OWN = "the file itself"


def find_device(name: str) -> Device:
    """The device `name` of the table, as in `device_names()`; case and spaces do not matter.

    Raises ValueError with the nearest names if there is none.
    """
    return _table()[name_in_table(name)]


def find_devices(text: str) -> Devices:
    """Devices by text: "h100" or "h100:8". Raises ValueError for unknown names."""
    name, count = name_and_count(text)
    return Devices(_table()[name], count)


def device_from_file(path: str | Path, name: str | None = None) -> Device:
    """Read the device in the TOML file at `path`, which has the form of the table. `name` chooses among several.

    Raises OSError if the file cannot be read; ValueError if it is no TOML, or lacks a cell.
    """
    devices = _read(Path(path))
    if name is None and len(devices) == 1:
        return next(iter(devices.values()))
    if name is None or name.lower() not in devices:
        names = ", ".join(devices) or "none"
        if name is None:
            raise InvalidValueError(f"{path} has the devices {names}; say which one", kind="which_device")
        raise InvalidValueError(f"{path} has no device {name!r}, only {names}", kind="unknown_device", name=name)
    return devices[name.lower()]


def devices_from_file(path: str | Path, text: str | None = None) -> Devices:
    """Devices by text from the file at `path`: "mine" or "mine:8". Raises the errors of `device_from_file`."""
    name, count = (None, 1) if text is None else counted(text)
    return Devices(device_from_file(path, name), count)


@cache
def _table() -> dict[str, Device]:
    return _read(TABLE)


def _read(path: Path) -> dict[str, Device]:
    content = tables_in(path)
    sources = content.pop(SOURCES, {})
    devices = {}
    for key, cells in content.items():
        if not isinstance(cells, dict):
            raise InvalidValueError(
                f"{path}: {key!r} stands outside a device; begin one with a line such as [my-gpu]",
                kind="outside_device",
                name=key,
            )
        try:
            devices[key.lower()] = _device(key, cells, sources)
        except (ValueError, TypeError) as error:
            raise InvalidValueError(
                f"{path}, device {key!r}: {error}", kind=kind_of(error), name=getattr(error, "name", None), device=key
            ) from None
    if not devices:
        raise InvalidValueError(
            f"{path} has no device; begin one with a line such as [my-gpu]", kind="no_device", name=str(path)
        )
    return devices


def _device(key: str, cells: dict[str, Any], sources: dict[str, str]) -> Device:
    if missing := [each for each in _REQUIRED if each not in cells]:
        raise InvalidValueError(f"{', '.join(missing)} is missing", kind="missing_fields", name=", ".join(missing))
    if unknown := cells.keys() - {*_REQUIRED, *_OPTIONAL}:
        raise InvalidValueError(
            f"{', '.join(sorted(unknown))} is no cell; known are {', '.join((*_REQUIRED, *_OPTIONAL))}",
            kind="unknown_fields",
            name=", ".join(sorted(unknown)),
        )
    values, said = {}, []
    for cell in cells.keys() - {"efficiencies"}:
        values[cell], source = _value_and_source(cells[cell])
        if cell in _REQUIRED:
            said.append((cell, sources.get(source, source)))
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
        context_bytes=_context(values.get("context", CONTEXT_BYTES)),
        launch_seconds=float(values.get("launch_seconds", LAUNCH_SECONDS)),
        vendor=str(values.get("vendor", "nvidia")),
        sources=tuple(sorted(said)),
    )


def _value_and_source(cell: Any) -> tuple[Any, str]:
    """Split a cell: a plain value, or a table of the value and its source's name."""
    return (cell["value"], cell.get("source", _OWN)) if isinstance(cell, dict) and "value" in cell else (cell, _OWN)


def _context(value: Any) -> int:
    """Bytes of the device's context; zero is valid, as on a CPU."""
    return 0 if value == 0 and not isinstance(value, bool) else parse_bytes(value)


def _efficiencies(cells: dict[str, Any] | None) -> Efficiencies:
    if cells is None:
        return UNANCHORED
    if unknown := cells.keys() - {*_EFFICIENCIES, *_ORIGINS}:
        raise InvalidValueError(
            f"{', '.join(sorted(unknown))} is no efficiency; known are {', '.join(_EFFICIENCIES)}",
            kind="unknown_fields",
            name=", ".join(sorted(unknown)),
        )
    if missing := [each for each in _EFFICIENCIES if each not in cells]:
        raise InvalidValueError(
            f"efficiencies lack {', '.join(missing)}", kind="missing_fields", name=", ".join(missing)
        )
    found = {each: _above_zero(each, cells[each]) for each in _EFFICIENCIES}
    origins = {each: str(cells[each]) for each in _ORIGINS if each in cells}
    if len(origins) > 1:
        raise InvalidValueError(
            "efficiencies have an anchor of their own, or are taken_from another device; leave one out",
            kind="excluded_together",
            name="taken_from",
        )
    return Efficiencies(**found, anchor=origins.get("anchor"), taken_from=origins.get("taken_from"))


def _above_zero(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidValueError(f"{name} has to be a number above zero, not {value!r}", kind="not_positive", name=name)
    return float(value)
