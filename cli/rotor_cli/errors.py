"""Exit codes, and errors shown as one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import click

UNEXPECTED, USAGE, INFEASIBLE, MODEL_RAISED, DIFFERENT, INTERRUPTED = 1, 2, 3, 4, 5, 130
_OWN = ("rotor_cli", "rotor_py", "rotor_profiling", "rotor_solver", "importlib", "<frozen")


class Failure(click.ClickException):
    """An exit code and a message on stderr, without traceback. Its fields are those of the solver's errors."""

    def __init__(
        self, message: str, exit_code: int, *, kind: str, name: str | None = None, **numbers: int | float | str
    ) -> None:
        super().__init__(message)
        self.__dict__["exit_code"] = exit_code  # click declares it for the class
        self.kind, self.stage, self.name, self.numbers = kind, None, name, numbers

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"rotor-plan: {self.format_message()}", err=True, file=file)


def usage(message: str, *, kind: str, name: str | None = None, **numbers: int | float | str) -> Failure:
    """The failure for wrong use of the command, or for an unusable model file."""
    return Failure(message, USAGE, kind=kind, name=name, **numbers)


def kind_of(error: BaseException) -> str:
    """The kind of an error; its class name by default."""
    return getattr(error, "kind", type(error).__name__)


@contextmanager
def about_option(name: str) -> Iterator[None]:
    """Turn a ValueError into the failure of the option `name`."""
    try:
        yield
    except ValueError as error:
        raise usage(f"{name}: {error}", kind=kind_of(error), name=name) from error


@contextmanager
def model_code(file: str) -> Iterator[None]:
    """Run user code. Its errors become a Failure with their own traceback, from the user's file on."""
    try:
        yield
    except (Failure, KeyboardInterrupt):
        raise
    except BaseException as error:  # a file may call sys.exit(), which would end the command silently
        raise raised_by_model(error, file) from error


@contextmanager
def explained(file: str) -> Iterator[None]:
    """Distinguish errors of user code from our own errors about the model."""
    from rotor_profiling import UnknownOptimizerError, UnusableLossError  # they import torch, and --help does not
    from rotor_py import UnsupportedModelError

    try:
        yield
    except Failure:
        raise
    except (UnsupportedModelError, UnusableLossError, UnknownOptimizerError) as error:
        raise Failure(str(error), USAGE, kind=kind_of(error)) from error
    except Exception as error:
        raise raised_by_model(error, file) from error


def raised_by_model(error: BaseException, file: str) -> Failure:
    """The failure for an error of the user's code."""
    frames = _theirs(error.__traceback__, file)
    text = "".join(traceback.format_exception(type(error), error.with_traceback(frames), frames, chain=False))
    return Failure(f"the model itself raised an error\n\n{text.rstrip()}", MODEL_RAISED, kind="model_raised")


def raised_by_script(error: BaseException, file: str) -> Failure:
    """The failure for an error of the user's script, without our frames between the script's."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        theirs = [frame for frame in each.stack if not any(own in frame.filename for own in _OWN)]
        each.stack = traceback.StackSummary.from_list(theirs)
        each = each.__cause__ or each.__context__
    return Failure(
        f"{file} itself raised an error\n\n{''.join(shown.format()).rstrip()}", MODEL_RAISED, kind="script_raised"
    )


def _theirs(trace: TracebackType | None, file: str) -> TracebackType | None:
    """The traceback from the first frame in `file` on; else from the first frame that is not ours."""
    wanted = Path(file).resolve()
    first = trace
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == wanted:
            return trace
        trace = trace.tb_next
    while first is not None and any(own in first.tb_frame.f_code.co_filename for own in _OWN):
        first = first.tb_next
    return first
