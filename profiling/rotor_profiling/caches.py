"""The caches of the CPU, emptied: as a stage finds them in a step, after others have run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_USUAL, _MOST = 32 << 20, 64 << 20
"""Bytes of the caches where nobody says how large they are, and the most of them that are read over."""
_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


class OtherData:
    """As many bytes as caches hold, and a quarter more: once they are read, nothing else is in caches.

    They are read, not written: what has been written has to be brought to memory when it gives way, which other stages
    do as well, but not with all that they touch.
    """

    def __init__(self) -> None:
        self._bytes = b"\1" * (5 * _cache_bytes() // 4)

    def read(self) -> None:
        """Read all of them, at the speed of memory: a search for a byte that is not there."""
        self._bytes.find(b"\0")


@cache
def _cache_bytes() -> int:
    """Of the largest cache that a core has, as Linux says, in units of 1024 bytes with a K behind."""
    found = [
        int(size[:-1]) << 10 for file in _FOLDER.glob("index*/size") if (size := file.read_text().strip()).endswith("K")
    ]
    return min(max(found, default=_USUAL), _MOST)
