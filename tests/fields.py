"""Check errors, warnings and log records by their fields, so that their sentences can be edited."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rotor_solver import DescribedError


@contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...], kind: str, **fields: object
) -> Iterator[pytest.ExceptionInfo[DescribedError]]:
    """Expect an error of this class and kind, with these fields: `stage`, `name`, and what is in `numbers`."""
    with pytest.raises(error) as caught:
        yield caught
    check(caught.value, kind, **fields)


@contextmanager
def warns(kind: str, **fields: object) -> Iterator[None]:
    """Expect one warning of this kind, and no other."""
    with pytest.warns() as caught:
        yield
    (warning,) = caught
    check(warning.message, kind, **fields)


def check(error: BaseException | str, kind: str, **fields: object) -> None:
    """Assert the fields of an error that was caught some other way: by a compiler, or at the end of a command."""
    assert isinstance(error, DescribedError), repr(error)
    assert error.kind == kind, str(error)
    for name, value in fields.items():
        assert _field(error, error.numbers, name) == value, f"{name}: {error}"


def logged(caplog: pytest.LogCaptureFixture, kind: str, **fields: object) -> list[logging.LogRecord]:
    """List the log records of this kind that have these fields; `name` is the one that the message names."""
    fields = {"subject" if name == "name" else name: value for name, value in fields.items()}
    return [
        record
        for record in caplog.records
        if getattr(record, "kind", None) == kind
        and all(_field(record, record.__dict__["numbers"], name) == value for name, value in fields.items())
    ]


def kinds(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List the kinds of all log records that have one."""
    return [record.__dict__["kind"] for record in caplog.records if hasattr(record, "kind")]


def _field(owner: object, numbers: dict[str, object], name: str) -> object:
    return getattr(owner, name) if name in ("stage", "name", "subject") else numbers[name]
