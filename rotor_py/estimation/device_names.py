"""The names of the devices in the table. Nothing here imports torch: the command answers a typing error before that."""

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
"""The one part of a table that is no device."""


def name_and_count(text: str) -> tuple[str, int]:
    """The name in the table of what a text names, and how many of them: of "H100:8" "h100" and 8.

    Case and spaces do not matter. ValueError, with the nearest names, if there is no such device, or no such number.
    """
    name, count = counted(text)
    return name_in_table(name), count


def counted(text: str) -> tuple[str, int]:
    """A name, whoever knows it, and the number behind it: of "h100:8" "h100" and 8. ValueError if that is no number."""
    name, colon, number = text.partition(":")
    if colon and not (number.isdecimal() and int(number) > 0):
        raise InvalidValueError(
            f"{text!r} is not a number of devices; write {name}:8 for eight of them", kind="not_a_count", name=text
        )
    return name, int(number) if colon else 1


def name_in_table(name: str) -> str:
    """The name as it is in the table. ValueError, with the nearest names, if it is not."""
    known = device_names()
    wanted = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-").removeprefix("amd-")
    for each in (wanted, wanted.replace("-", "")):
        if each in known:
            return each
    near = difflib.get_close_matches(wanted, known, cutoff=0.4) or list(known)
    # A family stands for several: a100 for a100-80 and a100-40.
    near = [each for each in known if each.startswith(f"{wanted}-")] or near
    raise InvalidValueError(
        f"no device is called {name!r}; did you mean {_either(near)}? A file of your own has the form of {TABLE.name}",
        kind="unknown_device",
        name=name,
    )


@cache
def device_names() -> tuple[str, ...]:
    """The names of the table, in its order."""
    return tuple(name for name in tables_in(TABLE) if name != SOURCES)


def tables_in(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. OSError, and ValueError if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} is no TOML file: {error}", kind="not_toml", name=str(path)) from None


def _either(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
