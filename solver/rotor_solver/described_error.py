"""Errors that carry their facts as fields, so that programs need not parse messages; checks of limits and slots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Field = int | float | str


class DescribedError(Exception):
    """An error with `kind`, `stage`, `name` and numbers in addition to the message.

    Args:
        message: One sentence: "X must be Y, got Z", then the remedy.
        kind: A stable slug such as "limit_too_small". Defaults to the class's own.
        stage: Index of the stage at fault, or None.
        name: Name of the argument, option, stage, layer or file at fault, or None.
        numbers: Other facts of the message, as numbers or text. Never a tensor, which the error would keep alive.
    """

    kind: str = "invalid"
    stage: int | None = None
    name: str | None = None
    numbers: Mapping[str, Field]

    def __init__(
        self, message: str, *, kind: str = "", stage: int | None = None, name: str | None = None, **numbers: Field
    ) -> None:
        super().__init__(message)
        self.kind = kind or type(self).kind
        self.stage = stage
        self.name = name
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying and pickling pass an exception's positional arguments, which differ in subclasses. Notes stay behind:
        # they describe where this instance was raised.
        state = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return type(self).__new__, (type(self), *self.args), state


class InvalidValueError(DescribedError, ValueError):
    """An argument, or the content of a file, that cannot be used."""


class InvalidTypeError(DescribedError, TypeError):
    """An argument of the wrong type."""


class InvalidStateError(DescribedError, RuntimeError):
    """A call at a time or in a state in which it cannot work."""


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
            f"mem_limit must be zero bytes or more, got {mem_limit}", kind="negative", name="mem_limit", got=mem_limit
        )
    return int(mem_limit)


def check_count(value: Any, name: str) -> None:
    """Raise ValueError unless `value` is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidValueError(
            f"{name} is {value!r}; it has to be a whole number, one or more", kind="not_a_count", name=name
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


def check_fits(what: str, needed: int, mem_limit: int) -> None:
    """Raise InfeasibleError if `needed` bytes are more than `mem_limit`; `what` begins the sentence."""
    if needed > mem_limit:
        raise InfeasibleError(
            f"{what} at least {needed} bytes; the limit is {mem_limit}", min_bytes=needed, mem_limit=mem_limit
        )
