"""The names of ways to store a stage: what it does by itself, what a keeper does, or one after the other."""

from __future__ import annotations

from collections.abc import Container, Iterable

_AND = ", "


def both(own: str, keeper: str) -> str:
    """The way in which a stage is stored in its `own` way, and what that saves by a keeper."""
    return f"{own}{_AND}{keeper}"


def parted(way: str, keepers: Container[str]) -> tuple[str | None, str | None]:
    """What the stage does by itself in a way, and the name of the keeper; None for what has no part in it."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def base_of(way: str, ways: Iterable[str]) -> str | None:
    """The one of `ways` that `way` adds a keeper to; None if it adds one to the whole stage, or none."""
    return next((each for each in ways if way.startswith(each + _AND)), None)
