"""What `offload` does not go together with."""

from __future__ import annotations

from typing import Any, Protocol

from rotor_py.errors import InvalidValueError
from rotor_py.offload.offload import Offload, checked_name


class Asked(Protocol):
    """The settings that are looked at."""

    offload: str | None
    by_hand: Any
    forwards_in_flight: int
    on_oom: str
    compile: Any


def refuse_beside_offload(asked: Asked) -> None:
    """ValueError where `offload` is no tier that there is here, or excludes what else is asked for.

    A tier is named in full from here on.
    """
    if asked.offload is None:
        return
    asked.offload = checked_name(asked.offload)
    forwards = asked.forwards_in_flight
    others = {
        f"{asked.by_hand} leaves nothing to choose": asked.by_hand is not None,
        f"forwards_in_flight={forwards} has several forwards share the way": forwards > 1,
        "on_oom='replan' runs stages again that have moved what they saved": asked.on_oom == "replan",
        "compile= has Inductor decide what a stage saves": bool(asked.compile),
    }
    for reason, given in others.items():
        if given:
            raise InvalidValueError(
                f"offload= has a plan move what stages save, and {reason}; leave one of them out",
                kind="excluded_together",
                name="offload",
            )


def refuse_compiled(offload: Offload | None) -> None:
    """ValueError where stages are to be compiled, and plans may move what they save."""
    if offload is not None:
        raise InvalidValueError(
            "offload= has a plan move what stages save, and compile() has Inductor decide what that is; leave "
            "one of them out",
            kind="excluded_together",
            name="compile",
        )
