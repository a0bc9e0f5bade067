"""Parse and format bytes and seconds: `4GB` is 4·10⁹ bytes, `512MiB` 512·2²⁰ bytes, `80%` a share of the device."""

from __future__ import annotations

import re
from decimal import Decimal

from rotor_py.errors import InvalidValueError

_SIZE = re.compile(r"\s*(?P<number>\d+(_\d+)*(\.\d*)?|\.\d+)(e(?P<power>\d+))?\s*(?P<unit>[a-z%]*)\s*", re.IGNORECASE)
_DECIMAL = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12, "p": 15}
_BINARY = {"ki": 10, "mi": 20, "gi": 30, "ti": 40, "pi": 50}
_MOST = 2**63 - 1  # largest number of bytes that is accepted: no address is larger
_MOST_DIGITS = 30  # largest exponent of ten that is computed; a larger one is replaced by it
_HINT = "write for example 4GB (4·10⁹ bytes), 512MiB (512·2²⁰ bytes) or 80%"


def parse_bytes(size: float | str, *, device_bytes: int | None = None) -> int:
    """Return the number of bytes, rounded down, of a size such as 1e9, "4GB" or "80%".

    `80%` is that share of `device_bytes`. Raises ValueError for anything that is not a positive size, for sizes that do
    not fit 64 bits, and for a share above 100 % or without `device_bytes`.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str) or size != size:
        raise InvalidValueError(f"{size!r} is not a size in bytes; {_HINT}", kind="not_a_size")
    if isinstance(size, float):
        result = int(min(size, 2.0 * _MOST))  # infinity cannot be converted to an integer
    else:
        result = size if isinstance(size, int) else _parse(size, device_bytes)
    if result <= 0:
        raise InvalidValueError(f"a size must be more than zero bytes, got {size!r}; {_HINT}", kind="not_positive")
    if result > _MOST:
        raise InvalidValueError(f"{size!r} is more memory than any device has; {_HINT}", kind="too_large")
    return result


def _parse(text: str, device_bytes: int | None) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidValueError(f"{text!r} is not a size; {_HINT}", kind="not_a_size")
    number = Decimal(match["number"]).scaleb(min(int(match["power"] or 0), _MOST_DIGITS))
    unit = match["unit"].lower()
    if unit == "%":
        if device_bytes is None:
            raise InvalidValueError(
                f"{text!r} is a share of a device's memory, but no device is known; {_HINT}", kind="unknown_device"
            )
        if number > 100:
            raise InvalidValueError(f"{text!r} is more than all memory of a device; {_HINT}", kind="above_device")
        return int(number * device_bytes / 100)
    prefix = unit.removesuffix("b")
    if prefix in _DECIMAL:
        return int(number.scaleb(_DECIMAL[prefix]))
    if prefix in _BINARY:
        return int(number * 2 ** _BINARY[prefix])
    raise InvalidValueError(
        f"{match['unit']!r} in {text!r} is not a unit of size; {_HINT}", kind="unknown_unit", name=match["unit"]
    )


def format_bytes(size: int) -> str:
    """Format `size` with three significant digits and a decimal unit: 4.00 GB, 57.2 MB, 999 B."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        scaled = size / 10**power
        if abs(scaled) >= 0.9995:
            return f"{_three_digits(scaled)} {unit}"
    return f"{size} B"


def exact_bytes(size: int) -> str:
    """Format `size` rounded and in bytes: 4.00 GB (4000000000 bytes)."""
    return f"{format_bytes(size)} ({size} bytes)"


def limit_text(size: int) -> str:
    """Format `size` as a limit to type, rounded up so that it still suffices: 2.32GB, 57.3MB."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            hundredths = -(-size * 100 // 10**power)
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + unit
    return str(size)


def format_seconds(seconds: float) -> str:
    """Format a time with three significant digits and a unit: 1.25 s, 31.0 ms, 250 µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f}"
