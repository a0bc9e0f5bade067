"""Check errors, warnings and log records by their fields, so that their sentences can be edited."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rotor_solver import DescribedError


class Noted(list[Any]):
    """A list that measuring and recomputations leave as it is: they restore no lists of other classes."""


@contextmanager
def raises(error: Any, kind: str, **fields: object) -> Iterator[pytest.ExceptionInfo[DescribedError]]:
    """Expect an error of this class and kind, with these fields: `stage`, `name`, and what is in `numbers`."""
    with pytest.raises(error) as caught:
        yield caught
    try:
        check(caught.value, kind, **fields)
    finally:
        del caught  # this frame is in the error's traceback: the cycle would keep what the failed step held


@contextmanager
def warns(kind: str, **fields: object) -> Iterator[None]:
    """Expect one warning of this kind, and no other."""
    with pytest.warns() as caught:
        yield
    (warning,) = caught
    check(warning.message, kind, **fields)


def check(error: BaseException | str | None, kind: str, **fields: object) -> None:
    """Assert the fields of an error that was caught some other way; it may be inside of a compiler's own error."""
    found: Any = error
    while not hasattr(found, "numbers") and found is not None:
        found = getattr(found, "inner_exception", None) or found.__cause__
    assert found is not None, repr(error)
    assert found.kind == kind, f"{found.kind}: {found}"
    for name, value in fields.items():
        assert _field(found, found.numbers, name) == value, f"{name}: {found}"


def invoke(*arguments: object) -> Result:
    """Run the command in this process. The result's `failure` is the error that it ended with, or None."""
    from rotor_cli.failure import Failure
    from rotor_cli.main import main

    failures: list[Failure] = []

    def show(failure: Failure, file: Any = None) -> None:
        failures.append(failure)
        shown(failure, file)

    shown = Failure.show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Failure, "show", show)
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    result.__dict__["failure"] = next(iter(failures), None)
    return result


def ends(result: Result, exit_code: int, kind: str, **fields: object) -> None:
    """Assert how a command ended that was run in this process: its exit code, and the fields of its failure."""
    assert result.exit_code == exit_code, result.output
    check(result.__dict__["failure"], kind, **fields)
    assert "Traceback" not in result.output


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


def _field(owner: object, numbers: Mapping[str, object], name: str) -> object:
    return getattr(owner, name) if name in ("stage", "name", "subject") else numbers[name]
