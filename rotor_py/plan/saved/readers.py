"""Readers of numbers in a plan's file, and of lists and records of them.

They return what is there as it is in memory. ValueError for what is no such thing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import fields
from math import inf
from typing import Any, TypeVar

from rotor_py.errors import InvalidValueError
from rotor_solver.chain import LARGEST_SIZE

T = TypeVar("T")
Reader = Callable[[str, Any], T]
"""Called with the name of a part, and what the file has there."""

_LONGEST = 1e9
"""Seconds of anything; about thirty years."""
_BELOW_ZERO = frozenset({"backward_temp_bytes", "replay_temp_bytes", "waiting_gradients", "summed_gradients"})
"""A backward may free more of its input than it needs, or gradients that later stages have left."""
IN_FILES = {"skipped_output_seconds": "output_seconds"}
"""Names of parts that files know by an older name, so that saved plans go on loading."""


def size(name: str, value: Any) -> int:
    """A number of bytes, which is below zero for few parts only."""
    least = -LARGEST_SIZE if name in _BELOW_ZERO else 0
    # By type: to `isinstance`, True is a number of bytes.
    if type(value) is not int or not least <= value <= LARGEST_SIZE:
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number of bytes", kind="bad_field", name=name
        )
    return value


def seconds(name: str, value: Any) -> float:
    """A number of seconds, zero or more."""
    if type(value) is not float or not 0 <= value <= _LONGEST:  # which a NaN is not
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number of seconds", kind="bad_field", name=name
        )
    return value


def share(name: str, value: Any) -> float:
    """A finite number, zero or more."""
    if type(value) is not float or not 0 <= value < inf:
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number from zero on", kind="bad_field", name=name
        )
    return value


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """A list of numbers of bytes."""
    return many(size)(name, value)


def many(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Reads a list of what `read` reads."""

    def read_all(name: str, value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise InvalidValueError(
                f"{name} is {reprlib.repr(value)}; it has to be a list", kind="bad_field", name=name
            )
        return tuple(read(name, each) for each in value)

    return read_all


def or_none(read: Reader[T]) -> Reader[T | None]:
    """Reads null, or what `read` reads."""
    return lambda name, value: None if value is None else read(name, value)


def record(kind: Callable[..., T]) -> Reader[T]:
    """Reads a dataclass of seconds and bytes."""
    names = {IN_FILES.get(field.name, field.name): field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    readers = {name: _READERS[str(field.type)] for name, field in names.items()}

    def read(name: str, value: Any) -> T:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise InvalidValueError(
                f"{name} has {reprlib.repr(value)}; it has to have {', '.join(readers)}", kind="bad_field", name=name
            )
        return kind(**{names[part].name: reader(part, value[part]) for part, reader in readers.items()})

    return read


_READERS: dict[str, Reader[Any]] = {"int": size, "float": seconds, "tuple[int, ...]": sizes}
