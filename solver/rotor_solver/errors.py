"""Errors that carry their facts as fields, so that programs need not parse messages."""

from __future__ import annotations

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
        return _restored, (type(self), self.args, state)


def _restored(error_class: type[DescribedError], args: tuple[object, ...], state: dict[str, Any]) -> DescribedError:
    error = error_class.__new__(error_class, *args)
    error.__dict__.update(state)
    return error


class InvalidValueError(DescribedError, ValueError):
    """An argument, or the content of a file, that cannot be used."""


class InvalidTypeError(DescribedError, TypeError):
    """An argument of the wrong type."""


class InvalidStateError(DescribedError, RuntimeError):
    """A call at a time or in a state in which it cannot work."""
