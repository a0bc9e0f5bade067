"""How fast bytes go out of a device's memory and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second in each direction, while both are busy. The two directions do not wait for each other.

    ValueError if a rate is no finite number above zero.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "in_bytes_per_second"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} is {rate!r}; it has to be a finite number of bytes, above zero")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds in which a byte goes out and comes back."""
        return 1 / self.out_bytes_per_second + 1 / self.in_bytes_per_second

    @classmethod
    def slowest(cls, links: Iterable[Link]) -> Link:
        """As fast each way as the slowest of `links`."""
        out, back = zip(*((link.out_bytes_per_second, link.in_bytes_per_second) for link in links), strict=True)
        return cls(min(out), min(back))
