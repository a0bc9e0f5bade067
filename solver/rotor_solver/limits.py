"""Validate memory limits and slot counts; define the error for a limit that no plan keeps."""

from __future__ import annotations

import math
from typing import Any

from rotor_solver.errors import DescribedError, InvalidValueError


def bytes_of_limit(mem_limit: Any) -> int:
    """Return a limit in whole bytes, rounded down. Raises ValueError unless it is a finite number, at least 0."""
    # bool is an int in Python, but never meant as bytes.
    if isinstance(mem_limit, bool) or not isinstance(mem_limit, int):
        if not isinstance(mem_limit, float) or not math.isfinite(mem_limit):
            raise InvalidValueError(
                f"mem_limit is {mem_limit!r}; it has to be a number of bytes", kind="not_bytes", name="mem_limit"
            )
        mem_limit = math.floor(mem_limit)
    if mem_limit < 0:
        raise InvalidValueError(
            f"mem_limit is {mem_limit}; it has to be zero bytes or more",
            kind="negative",
            name="mem_limit",
            got=mem_limit,
        )
    return int(mem_limit)


def check_slots(slots: Any) -> None:
    """Raise ValueError unless `slots` is a whole number, at least 1."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise InvalidValueError(
            f"slots is {slots!r}; memory has to be divided into at least one slot", kind="not_a_count", name="slots"
        )


class InfeasibleError(DescribedError, ValueError, RuntimeError):
    """No plan of the algorithm fits in `mem_limit` bytes; `min_bytes` is the least limit that works.

    If a step is refused before it is measured, `min_bytes` is a lower bound of its need. Also a RuntimeError, like
    torch's out-of-memory error, so that code that retries with smaller batches catches it. `stage` is the stage whose
    own backward needs the most memory, or None if no single stage is at fault.
    """

    kind = "limit_too_small"

    def __init__(
        self, message: str, *, min_bytes: int, mem_limit: int, stage: int | None = None, kind: str = ""
    ) -> None:
        super().__init__(message, kind=kind, stage=stage, min_bytes=min_bytes, mem_limit=mem_limit)
        self.min_bytes = min_bytes
        self.mem_limit = mem_limit
