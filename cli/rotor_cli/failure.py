"""Exit codes of `rotor-plan`, and errors that it prints without a traceback through its own code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

UNEXPECTED, USAGE, INFEASIBLE, MODEL_RAISED, DIFFERENT, INTERRUPTED = 1, 2, 3, 4, 5, 130
_OWN = ("rotor_cli", "rotor_py", "rotor_profiling", "rotor_solver", "importlib", "<frozen")


class Failure(click.ClickException):
    """Error that ends the command with `exit_code`, its message on stderr. Has the fields of a `DescribedError`."""

    def __init__(
        self, message: str, exit_code: int, *, kind: str, name: str | None = None, **numbers: int | float | str
    ) -> None:
        super().__init__(message)
        self.__dict__["exit_code"] = exit_code  # click declares a class variable, which mypy lets no instance set
        self.kind, self.stage, self.name, self.numbers = kind, None, name, numbers

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"rotor-plan: {self.format_message()}", err=True, file=file)


def usage(kind: str, name: str, message: str, **numbers: int | float | str) -> Failure:
    """Return the failure, with exit code 2, for the wrong option or unusable model file `name`."""
    return Failure(message, USAGE, kind=kind, name=name, **numbers)


def failed(error: BaseException, exit_code: int = USAGE) -> Failure:
    return Failure(str(error), exit_code, kind=kind_of(error), **getattr(error, "numbers", {}))


def kind_of(error: BaseException) -> str:
    return getattr(error, "kind", type(error).__name__)


@contextmanager
def about_option(name: str) -> Iterator[None]:
    """Within the context, turn a ValueError or OSError into a failure whose message begins with the option `name`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise usage(kind_of(error), name, f"{name}: {error}") from error


@contextmanager
def user_code(file: str) -> Iterator[None]:
    """Within the context, turn errors into failures; one that user code raised shows its traceback from `file` on."""
    from rotor_profiling import UnknownOptimizerError, UnusableLossError  # here, since they import torch
    from rotor_py import InfeasibleError, UnsupportedModelError

    try:
        yield
    except (Failure, KeyboardInterrupt):
        raise
    except InfeasibleError as error:
        raise failed(error, INFEASIBLE) from error
    except (UnsupportedModelError, UnusableLossError, UnknownOptimizerError) as error:
        raise failed(error) from error
    except BaseException as error:  # a file may call sys.exit(), which would end the command silently
        raise raised_by("the model", error, file) from error


def raised_by(
    code: str, error: BaseException, file: str, kind: str = "model_raised", *, chain: bool = False
) -> Failure:
    """Return the failure for an error in user code; its traceback begins in `file` and skips our own lines."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        theirs = [frame for frame in each.stack if not any(own in frame.filename for own in _OWN)]
        begins = (at for at, frame in enumerate(theirs) if Path(frame.filename).resolve() == Path(file).resolve())
        each.stack = traceback.StackSummary.from_list(theirs[next(begins, 0) :])
        each = each.__cause__ or each.__context__
    text = "".join(shown.format(chain=chain)).rstrip()
    return Failure(f"{code} itself raised an error\n\n{text}", MODEL_RAISED, kind=kind)
