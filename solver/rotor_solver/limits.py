"""What people give to the solver besides a chain, checked: memory limits, and numbers of slots."""

from __future__ import annotations

import math
from typing import Any


def bytes_of_limit(mem_limit: Any) -> int:
    """A limit as a whole number of bytes, rounded down. ValueError if it is not a number of bytes, zero or more."""
    if isinstance(mem_limit, bool) or not isinstance(mem_limit, int):
        if not isinstance(mem_limit, float) or not math.isfinite(mem_limit):
            raise ValueError(f"mem_limit is {mem_limit!r}; it has to be a number of bytes")
        mem_limit = math.floor(mem_limit)
    if mem_limit < 0:
        raise ValueError(f"mem_limit is {mem_limit}; it has to be zero bytes or more")
    return int(mem_limit)


def check_slots(slots: Any) -> None:
    """ValueError unless memory can be divided into `slots`: a whole number, one or more."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots is {slots!r}; memory has to be divided into at least one slot")
