"""In which order rows run, so that what time there is shows the most.

Time on a GPU is short, and ends without asking. So first comes what nothing else shows: the device measured, and each
model's predictions beside its plain step and two plans. Then the tests, then what PyTorch offers beside plans at equal
peaks, and at the end what takes minutes to compile.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_parts.estimates import LIMITS, STORED

_FIRST = ("calibration", "size", "plain", STORED, "planned-half", *LIMITS)
_TESTS = 1
Where = tuple[int, str]
"""A part, and a row of it."""


def by_priority(rows: Iterable[Where]) -> list[Where]:
    """Rows in the order in which they run. Within a rank, those of a part stay in its order, and parts in turn."""
    return sorted(rows, key=lambda each: rank(*each))


def rank(part: int, row: str) -> int:
    """How early a row runs: 0 first."""
    if row in _FIRST:
        return 0
    if part == _TESTS:
        return 1
    return 3 if "compile" in row else 2
