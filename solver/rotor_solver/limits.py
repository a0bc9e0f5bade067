"""Memory limits and numbers of slots as people give them, checked; and the error for a limit that no plan keeps."""

from __future__ import annotations

import math
from typing import Any

from rotor_solver.errors import DescribedError, InvalidValueError


def bytes_of_limit(mem_limit: Any) -> int:
    """A limit as a whole number of bytes, rounded down. ValueError if it is not a number of bytes, zero or more."""
    # bool is a kind of int in Python, but never meant as bytes.
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
    """Raise ValueError unless `slots` is a whole number, one or more."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise InvalidValueError(
            f"slots is {slots!r}; memory has to be divided into at least one slot", kind="not_a_count", name="slots"
        )


class InfeasibleError(DescribedError, ValueError, RuntimeError):
    """No plan of the algorithm fits in `mem_limit` bytes; `min_bytes` is the least limit for which it has one.

    Of a step that is refused before it is measured, `min_bytes` is what it holds in any case: it needs more.

    A RuntimeError as well, as an out-of-memory error of torch is: what retries with smaller batches looks for these.

    `stage` is the number of the stage whose own backward needs the most memory; None where no single one is to blame.
    """

    kind = "limit_too_small"

    def __init__(
        self, message: str, *, min_bytes: int, mem_limit: int, stage: int | None = None, kind: str = ""
    ) -> None:
        super().__init__(message, kind=kind, stage=stage, min_bytes=min_bytes, mem_limit=mem_limit)
        self.min_bytes = min_bytes
        self.mem_limit = mem_limit
