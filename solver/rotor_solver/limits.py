"""Memory limits and numbers of slots as people give them, checked; and the error for a limit that no plan keeps."""

from __future__ import annotations

import math
from typing import Any


def bytes_of_limit(mem_limit: Any) -> int:
    """A limit as a whole number of bytes, rounded down. ValueError if it is not a number of bytes, zero or more."""
    # bool is a kind of int in Python, but never meant as bytes.
    if isinstance(mem_limit, bool) or not isinstance(mem_limit, int):
        if not isinstance(mem_limit, float) or not math.isfinite(mem_limit):
            raise ValueError(f"mem_limit is {mem_limit!r}; it has to be a number of bytes")
        mem_limit = math.floor(mem_limit)
    if mem_limit < 0:
        raise ValueError(f"mem_limit is {mem_limit}; it has to be zero bytes or more")
    return int(mem_limit)


def check_slots(slots: Any) -> None:
    """Raise ValueError unless `slots` is a whole number, one or more."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots is {slots!r}; memory has to be divided into at least one slot")


class InfeasibleError(ValueError, RuntimeError):
    """No plan of the algorithm fits in `mem_limit` bytes; `min_bytes` is the least limit for which it has one.

    Of a step that is refused before it is measured, `min_bytes` is what it holds in any case: it needs more.

    A RuntimeError as well, as an out-of-memory error of torch is: what retries with smaller batches looks for these.

    `stage` is the number of the stage whose own backward needs the most memory; None where no single one is to blame.
    """

    def __init__(self, message: str, *, min_bytes: int, mem_limit: int, stage: int | None = None) -> None:
        super().__init__(message)
        self.min_bytes = min_bytes
        self.mem_limit = mem_limit
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled with its positional arguments only; the keywords would be missing.
        state = {"min_bytes": self.min_bytes, "mem_limit": self.mem_limit, "stage": self.stage}
        return _restored, (str(self), state)


def _restored(message: str, state: dict[str, Any]) -> InfeasibleError:
    return InfeasibleError(message, **state)
