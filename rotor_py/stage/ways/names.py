"""The names of ways to store a stage: what it does by itself, what a keeper does, or one after the other."""

from __future__ import annotations

from collections.abc import Collection, Container

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


def base_of(way: str, ways: Collection[str]) -> str | None:
    """The one of `ways` that `way` adds a keeper to; None if it adds one to the whole stage, or none.

    Ways that add a keeper come with the keeper alone, as one of `ways`. Else, what follows is a part of the name.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None
