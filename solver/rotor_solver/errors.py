"""Errors with fields, so that a program need not read the sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Field = int | float | str


class DescribedError(Exception):
    """Carry `kind`, `stage`, `name` and numbers beside the message.

    Args:
        message: One sentence: "X must be Y, got Z", then the remedy.
        kind: A short slug that stays as it is, such as "limit_too_small". Defaults to the class's own.
        stage: Index of the stage at fault, or None.
        name: Name of the argument, option, stage, layer or file at fault, or None.
        numbers: Whatever else the message says: numbers, and texts where they are no numbers. Never a tensor, which an
            error would keep alive.
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
        # An exception is copied and pickled by its positional arguments, which are not those of every subclass.
        # Notes stay behind: they tell where this one was raised.
        state = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return _restored, (type(self), self.args, state)


def _restored(error_class: type[DescribedError], args: tuple[object, ...], state: dict[str, Any]) -> DescribedError:
    error = error_class.__new__(error_class, *args)
    error.__dict__.update(state)
    return error


class InvalidValueError(DescribedError, ValueError):
    """An argument, or the content of a file, that cannot be used."""


class InvalidTypeError(DescribedError, TypeError):
    """An argument of another type than is taken."""


class InvalidStateError(DescribedError, RuntimeError):
    """A call at a time, or in a state, in which it cannot work."""
