"""The names in the device table. Does not import torch, so that the CLI reports typos at once."""

from __future__ import annotations

import difflib
import sys
from functools import cache
from pathlib import Path
from typing import Any

from rotor_py.errors import InvalidValueError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("devices.toml")
SOURCES = "sources"
"""Section of a table that is no device."""


def name_and_count(text: str) -> tuple[str, int]:
    """Parse a device and its count: "H100:8" gives "h100" and 8.

    Ignores case and spaces. Raises ValueError, with the nearest names, if the device or the count is unknown.
    """
    name, count = counted(text)
    return name_in_table(name), count


def counted(text: str) -> tuple[str, int]:
    """Split any name from its count: "h100:8" gives "h100" and 8. Raises ValueError if the count is no number."""
    name, colon, number = text.partition(":")
    if colon and not (number.isdecimal() and int(number) > 0):
        raise InvalidValueError(
            f"{text!r} is not a number of devices; write {name}:8 for eight of them", kind="not_a_count", name=text
        )
    return name, int(number) if colon else 1


def name_in_table(name: str) -> str:
    """The spelling of the table. Raises ValueError, with the nearest names, if it lacks the name."""
    known = device_names()
    wanted = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-").removeprefix("amd-")
    for each in (wanted, wanted.replace("-", "")):
        if each in known:
            return each
    near = difflib.get_close_matches(wanted, known, cutoff=0.4) or list(known)
    # A family matches its members: a100 matches a100-80 and a100-40.
    near = [each for each in known if each.startswith(f"{wanted}-")] or near
    raise InvalidValueError(
        f"no device is called {name!r}; did you mean {_either(near)}? A file of your own has the form of {TABLE.name}",
        kind="unknown_device",
        name=name,
    )


@cache
def device_names() -> tuple[str, ...]:
    """The names of the table, in order."""
    return tuple(name for name in tables_in(TABLE) if name != SOURCES)


def tables_in(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises OSError, or ValueError if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} is no TOML file: {error}", kind="not_toml", name=str(path)) from None


def _either(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
