"""The error for limits that no plan can keep."""

from __future__ import annotations

from typing import Any


class InfeasibleError(ValueError):
    """No plan of the algorithm fits in `mem_limit` bytes; `min_bytes` is the least limit for which it has one.

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
