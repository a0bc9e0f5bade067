"""Forwards that keep less for the backward, which makes the rest again from what is kept.

A stage may have two options for its `Fe`: to keep all that autograd saves, and this one, as option 1. A stage that has
it says so in a method `lean_forward(unread=False)`, which returns how to run it, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rotor_py.stage.skipped_output import Run


def lean_forward(function: Callable[..., Any], *, unread: bool = False) -> Run | None:
    """How to run a stage so that it keeps less; None if it has no such way.

    Nobody reads the values of an `unread` output.
    """
    own = getattr(type(function), "lean_forward", None)
    found: Run | None = None if own is None else own(function, unread=unread)
    return found
