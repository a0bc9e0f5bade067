"""Errors with the facts of their message as attributes, so that no program has to parse it; checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

Field = int | float | str


class DescribedError(Exception):
    """An error with the facts of its message as attributes: `kind`, `stage`, `name` and `numbers`.

    Args:
        message: One sentence, such as "X must be Y, got Z", and what to do, if anything helps.
        kind: Identifier of the cause, such as "limit_too_small", the same in all releases. Defaults to the class's.
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
        # By default, copies and pickles call the class with `args`, but subclasses have constructors with other
        # arguments. Notes are not copied: they describe where this instance was raised.
        state = {name: value for name, value in self.__dict__.items() if name != "__notes__"}
        return type(self).__new__, (type(self), *self.args), state


class InvalidValueError(DescribedError, ValueError):
    """Raised if an argument, or the content of a file, has an unusable value."""


class InvalidTypeError(DescribedError, TypeError):
    """Raised if an argument has the wrong type."""


class InvalidStateError(DescribedError, RuntimeError):
    """Raised if a call is impossible in the present state of the model, the process or the machine."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def within_memory(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a solver function to turn a MemoryError into an InvalidStateError that says what to do."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except MemoryError as error:
            raise InvalidStateError(
                f"use fewer slots, or join neighbouring stages of the chain: the tables of {function.__name__} do not "
                "fit into the memory of this machine",
                kind="tables_too_large",
                name=function.__name__,
            ) from error

    return run


def whole_bytes(mem_limit: Any) -> int:
    """Return a limit in whole bytes, rounded down. Raises ValueError unless it is a finite number."""
    if not is_number(mem_limit) or not -math.inf < mem_limit < math.inf:
        raise InvalidValueError(f"mem_limit must be bytes, got {mem_limit!r}", kind="not_bytes", name="mem_limit")
    limit: int = math.floor(mem_limit)
    return limit


def bytes_of_limit(mem_limit: Any) -> int:
    """Return a limit in whole bytes, rounded down. Raises ValueError unless it is a finite number, at least 0."""
    limit = whole_bytes(mem_limit)
    if limit < 0:
        raise InvalidValueError(f"mem_limit must be ≥ 0, got {limit}", kind="negative", name="mem_limit", got=limit)
    return limit


def check_count(value: Any, name: str) -> None:
    """Raise ValueError unless `value` is a whole number, at least 1."""
    if not is_number(value, Integral) or value < 1:
        raise InvalidValueError(f"{name} must be an integer ≥ 1, got {value!r}", kind="not_a_count", name=name)


def is_number(value: Any, kind: type = Real) -> bool:
    """Whether `value` is an instance of `kind`, a class of Python's `numbers`, and no bool. NumPy scalars count."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_type(value: Any, wanted: type, name: str, remedy: str) -> None:
    """Raise InvalidTypeError, whose message ends with `remedy`, unless `value` is an instance of `wanted`."""
    if not isinstance(value, wanted):
        raise _wrong_type(value, wanted.__name__, name, remedy)


def listed(values: Any, name: str) -> list[Any]:
    """Return the items of `values` as a list. Raises InvalidTypeError for text, bytes, and what is not iterable."""
    try:
        found = None if isinstance(values, str | bytes) else list(values)
    except TypeError:
        found = None
    if found is None:
        raise _wrong_type(values, "list", name, "pass its entries in order")
    return found


def _wrong_type(value: Any, wanted: str, name: str, remedy: str) -> InvalidTypeError:
    got, text = type(value).__name__, repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return InvalidTypeError(
        f"{name} must be of type {wanted}, got {text} of type {got}; {remedy}", kind="wrong_type", name=name, got=got
    )


class InfeasibleError(DescribedError, ValueError, RuntimeError):
    """Raised if no plan of the algorithm fits in `mem_limit` bytes; `min_bytes` is the least limit with a plan.

    If a step is refused before it is measured, `min_bytes` is only a lower bound of that limit. `stage` is the stage
    whose own backward needs the most memory, or None if no single stage is at fault. This error is a RuntimeError, too,
    like torch's out-of-memory error, so that code that retries with a smaller batch catches both.
    """

    kind = "limit_too_small"

    def __init__(
        self, message: str, *, min_bytes: int, mem_limit: int, stage: int | None = None, kind: str = ""
    ) -> None:
        super().__init__(message, kind=kind, stage=stage, min_bytes=min_bytes, mem_limit=mem_limit)
        self.min_bytes = min_bytes
        self.mem_limit = mem_limit


def check_fits(what: str, needed: int, mem_limit: int) -> None:
    """Raise InfeasibleError if `needed` bytes exceed `mem_limit`. The message begins with `what`: "the chain needs"."""
    if needed > mem_limit:
        raise InfeasibleError(
            f"{what} at least {needed} bytes; the limit is {mem_limit}", min_bytes=needed, mem_limit=mem_limit
        )
