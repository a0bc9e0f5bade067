"""What pictures share: how wide they are, columns to point at, and round numbers along an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCREEN, PHONE = 804, 354
"""Pixels: how wide a picture is, with all its labels, on a screen; and on a phone, whose own width is 390.

A page has each picture in both widths, and shows the one that there is room for. One picture made smaller would have
letters too small to read; one that can be moved in its frame never shows the whole curve.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A part of a picture's width, in pixels, and what is said when it is pointed at."""

    x: float
    width: float
    title: str


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between `low` and `high`: as many as there can be up to `most`."""
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    for scale in (power, power + 1):
        for factor in (1, 2, 5):
            step = factor * 10.0**scale
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first < most:
                return [step * at for at in range(first, last + 1)]
    raise AssertionError
