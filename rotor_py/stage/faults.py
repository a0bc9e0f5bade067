"""What is added to an error that passes through a stage: which stage it was, and what was being done with it.

The error stays the user's own: the same object, with its type, arguments and traceback.
"""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

from rotor_py.stage.activity import tell

_log = logging.getLogger("rotor_py")


class During:
    """A context that notes, on any exception that leaves it, what was being done with which stage.

    Watchers are told that it begins, and that it ends.
    """

    __slots__ = ("doing", "name")

    def __init__(self, doing: str, name: str) -> None:
        self.doing = doing
        self.name = name

    def __enter__(self) -> None:
        tell(self.doing, self.name, True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tell(self.doing, self.name, False)
        if error is not None:
            note(error, f"in the {self.doing} of stage {self.name!r}")


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, once. Before Python 3.11, whose tracebacks show no notes, it is logged as well."""
    if text in getattr(error, "__notes__", ()):
        return
    with contextlib.suppress(Exception):  # an exception that takes no note is the user's still
        if hasattr(error, "add_note"):
            error.add_note(text)
            return
        error.__notes__ = [*getattr(error, "__notes__", ()), text]
    _log.error("%s: %s", type(error).__name__, text)
